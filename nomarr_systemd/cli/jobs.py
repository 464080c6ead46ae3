"""``nomarrctl jobs``: fill, list and mend the queues of the pools.

The store is that of the applied configuration, which the workers use.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO, Final

import click

from nomarr_systemd.cli.common import (
    complete_pool,
    echo_json,
    find_scope,
    json_option,
    note_difference,
    read_applied_and_compare,
)
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.job import STATUSES, Doc, Status
from nomarr_systemd.core.json import is_deep
from nomarr_systemd.core.text import count, describe_ms
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.view import JobView, view_job
from nomarr_systemd.operate.choose import choose_pool
from nomarr_systemd.operate.job_reading import JobReader, StoreReader, read_jobs
from nomarr_systemd.operate.job_store import open_as_owner

DAY_MS: Final = 86_400_000
_LOOKED_AT: Final = 500  # jobs of each state, when a shell completes one
COLOURS: Final = {"done": "green", "error": "red", "quarantined": "magenta", "running": "cyan"}

_pool = click.option(
    "--pool",
    metavar="POOL",
    shell_complete=complete_pool,
    help="The pool; not needed if there is only one.",
)
_limit = click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="List at most N jobs; 0: all.",
)


def _complete_job(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str, *statuses: Status
) -> list[str]:
    """Paths of jobs that are among the first of their pool and in one of these states; none that a
    shell would have to quote, and none if they cannot be read."""
    try:
        scope = find_scope(ctx)
        config = scope.read_in_force()
        pool = ctx.params.get("pool")
        names = [each.name for each in config.pools if pool in (None, each.name)]
        with read_jobs(scope, config) as reader:
            found = [
                str(doc["path"])
                for name in names
                for status in statuses or STATUSES
                for doc in islice(reader.walk(name, status), _LOOKED_AT)
            ]
    except (NomarrError, OSError):
        return []
    return [each for each in found if each.startswith(incomplete) and shlex.quote(each) == each]


def _complete_ended(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete_job(ctx, parameter, incomplete, "error", "done")


def _complete_quarantined(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    return _complete_job(ctx, parameter, incomplete, "quarantined")


@click.group()
def jobs() -> None:
    """Fill, see and mend the queues that workers take their jobs from.

    A job is a path in a pool. It is pending until a worker takes it, then running, and in the end
    done or error; one that killed its workers is quarantined.
    """


@jobs.command()
@click.argument("paths", nargs=-1, metavar="PATH…", type=click.Path(allow_dash=True))
@click.option(
    "--from-file",
    metavar="FILE",
    type=click.Path(allow_dash=True),
    help="Read paths from FILE, one in each line.",
)
@click.option("-0", "--null", is_flag=True, help="Paths end in NUL, as find -print0 writes them.")
@_pool
@json_option
@click.pass_obj
def add(
    scope: Scope,
    paths: tuple[str, ...],
    from_file: str | None,
    null: bool,
    pool: str | None,
    as_json: bool,
) -> None:
    """Add PATHs to the queue of a pool; jobs that are there already stay as they are.

    If add is interrupted, run it again. A PATH of - stands for the paths on standard input:

        find /srv/music -name '*.flac' -print0 | nomarrctl jobs add -0 -
    """
    config, differs = _read_config(scope, as_json)
    name = choose_pool(config, pool)
    sources = [from_file] if from_file else []
    given = [path for path in paths if path != "-"]
    sources += ["-"] if len(given) < len(paths) else []
    if not given and not sources:
        raise click.UsageError("name paths, --from-file FILE, or - for standard input")
    shows = not as_json and sys.stderr.isatty()

    def show(seen: int, new: int) -> None:
        if shows:
            click.echo(f"\r{seen} paths, {new} of them new …", err=True, nl=False)

    files = [_open_source(source) for source in sources]  # before we become the store's owner

    def all_paths() -> Iterator[str]:
        yield from given
        for file in files:
            with file:
                yield from _read_paths(file, null=null)

    with open_as_owner(config.store) as store:
        whole = (os.path.abspath(path) if path else path for path in all_paths())
        seen, new = queue.add(store, name, whole, on_page=show)
    if shows and seen:
        click.echo(err=True)
    if as_json:
        document = {"pool": name, "paths": seen, "added": new, "file_differs": differs}
        echo_json(document, indent=None)
    else:
        known = f", {seen - new} were there already" if seen > new else ""
        were = "was" if new == 1 else "were"
        click.echo(f"{count(new, 'job')} {were} added to {name}{known}.")


@jobs.command("list")
@click.option(
    "--status",
    "statuses",
    type=click.Choice(STATUSES),
    multiple=True,
    help="Only jobs in this state (repeatable).",
)
@_limit
@_pool
@json_option
@click.pass_context
def list_jobs(
    ctx: click.Context, statuses: tuple[Status, ...], limit: int, pool: str | None, as_json: bool
) -> None:
    """List jobs, and how many there are of each status; with --fleet also on which host they are
    running, or were last."""
    scope: Scope = ctx.obj
    config, differs = _read_config(scope, as_json)
    names = [choose_pool(config, pool)] if pool else [each.name for each in config.pools]
    with read_jobs(scope, config) as reader:
        counts = {name: reader.count(name) for name in names}
        found = (
            doc
            for name in names
            for status in statuses or STATUSES
            for doc in reader.walk(name, status)
        )
        docs = list(islice(found, limit or None))
    if as_json:
        found_jobs = [_to_json(doc) for doc in docs]
        echo_json({"counts": counts, "jobs": found_jobs, "file_differs": differs})
        return
    hosts = _name_hosts(scope, config) if ctx.find_root().params.get("fleet") else None
    for doc in docs:
        click.echo(_draw(view_job(doc), hosts))
    if not names:
        click.echo("No pools are configured: nomarr.toml has no [pool.NAME].")
    for name in names:
        parts = ", ".join(f"{number} {word}" for word, number in counts[name].items() if number)
        click.echo(click.style(f"{name}: {parts or 'no jobs'}", bold=True))
    wanted = sum(each[status] for each in counts.values() for status in statuses or STATUSES)
    if len(docs) < wanted:
        click.echo(f"{wanted - len(docs)} more; --limit 0 lists them all.")


@jobs.command()
@click.argument("job", shell_complete=_complete_job)
@_pool
@json_option
@click.pass_obj
def show(scope: Scope, job: str, pool: str | None, as_json: bool) -> None:
    """Show one JOB, by its key or its path: its result, its error, the workers it killed."""
    config, _ = _read_config(scope, as_json)
    with read_jobs(scope, config) as reader:
        doc = _find(reader, config, job, pool)
    if as_json:
        echo_json(_to_json(doc))
        return
    job_view = view_job(doc)
    click.echo(_draw(job_view))
    click.echo(f"  key       {job_view.key}")
    click.echo(f"  attempts  {job_view.attempts}")
    for name in ("worker", "error", "result"):
        if text := getattr(job_view, name):
            click.echo(f"  {name:<9} {text}")
    for each in job_view.crashes:
        click.echo(f"  killed    {each.component} ({each.cause}) in the run {each.invocation}")
    if job_view.status == "quarantined":
        release = f"{scope.paths.nomarrctl} jobs quarantine release {job_view.key}"
        click.echo(f"To let it run again: {release}")


@jobs.command()
@click.argument("names", nargs=-1, metavar="JOB…", shell_complete=_complete_ended)
@click.option("--all", "every", is_flag=True, help="Every job that failed.")
@_pool
@json_option
@click.pass_obj
def retry(
    scope: Scope, names: tuple[str, ...], every: bool, pool: str | None, as_json: bool
) -> None:
    """Put JOBs that failed, or are done, back into the queue."""
    _mend(scope, names, every, pool, as_json, "error")


@jobs.group()
def quarantine() -> None:
    """Jobs that killed their workers: list them, release them."""


@quarantine.command("list")
@_limit
@_pool
@json_option
@click.pass_context
def list_quarantined(ctx: click.Context, limit: int, pool: str | None, as_json: bool) -> None:
    """List the jobs in quarantine."""
    ctx.invoke(list_jobs, statuses=("quarantined",), limit=limit, pool=pool, as_json=as_json)


@quarantine.command("release")
@click.argument("names", nargs=-1, metavar="JOB…", shell_complete=_complete_quarantined)
@click.option("--all", "every", is_flag=True, help="Every job in quarantine.")
@_pool
@json_option
@click.pass_obj
def release(
    scope: Scope, names: tuple[str, ...], every: bool, pool: str | None, as_json: bool
) -> None:
    """Put JOBs in quarantine back into the queue; their crashes so far no longer count."""
    _mend(scope, names, every, pool, as_json, "quarantined")


@jobs.command()
@click.option(
    "--status",
    type=click.Choice(["done", "error", "quarantined"]),
    default="done",
    show_default=True,
)
@click.option(
    "--days",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="N",
    help="Only jobs that ended N days ago or earlier.",
)
@_pool
@json_option
@click.pass_obj
def prune(scope: Scope, status: Status, days: float, pool: str | None, as_json: bool) -> None:
    """Remove jobs that ended some days ago, with their results."""
    config, differs = _read_config(scope, as_json)
    name = choose_pool(config, pool)
    with open_as_owner(config.store) as store:
        gone = queue.prune(store, name, status, int(days * DAY_MS))
    document = {"pool": name, "pruned": gone, "file_differs": differs}
    if as_json:
        echo_json(document, indent=None)
    else:
        click.echo(f"{count(gone, 'job')} {'was' if gone == 1 else 'were'} removed.")


def _mend(
    scope: Scope,
    names: tuple[str, ...],
    every: bool,
    pool: str | None,
    as_json: bool,
    status: Status,
) -> None:
    if bool(names) == every:
        raise click.UsageError("name jobs, or say --all")
    config, differs = _read_config(scope, as_json)
    change = queue.retry if status == "error" else queue.release
    with open_as_owner(config.store) as store:
        docs: Iterable[Doc]
        if every:
            docs = queue.walk(store, choose_pool(config, pool), status)
        else:
            docs = [_find(StoreReader(store), config, name, pool) for name in names]
        changed = [change(store, doc)["_key"] for doc in docs]
    if as_json:
        echo_json({"pending": changed, "file_differs": differs}, indent=None)
    else:
        are = "is" if len(changed) == 1 else "are"
        click.echo(f"{count(len(changed), 'job')} {are} pending again.")


def _read_config(scope: Scope, as_json: bool) -> tuple[Config, bool | None]:
    """Return the applied configuration, and whether the file differs from it; warn if it does."""
    config, differs = read_applied_and_compare(scope)
    if not as_json:
        note_difference(scope, differs)
    return config, differs


def _find(reader: JobReader, config: Config, job: str, pool: str | None) -> Doc:
    """Return the job with this key, or with this path in the named pool; without one, in any."""
    names = [choose_pool(config, pool)] if pool else [each.name for each in config.pools]
    for name in names:
        for spelled in (job, os.path.abspath(job)):
            try:
                return reader.find(name, spelled)
            except queue.NoSuchJob:
                continue
    return reader.find("", job)


def _open_source(source: str) -> BinaryIO:
    try:
        return open(0 if source == "-" else source, "rb", closefd=source != "-")
    except OSError as error:
        raise NomarrError(
            f"cannot read {source}: {error.strerror}", hint="name a file with a path on each line"
        ) from error


def _read_paths(file: BinaryIO, *, null: bool) -> Iterator[str]:
    """Yield the paths in a file, also those that are not UTF-8; empty lines are skipped."""
    end = b"\0" if null else b"\n"
    rest = b""
    while piece := file.read(1 << 16):
        *whole, rest = (rest + piece).split(end)
        yield from (os.fsdecode(path) for path in whole if path)
    if rest:
        yield os.fsdecode(rest)


def _to_json(doc: Doc) -> dict[str, Any]:
    """Return a job for scripts: its fields, and its key as ``id``. ``raw`` is base64 if the path
    is not text. Fields that are nested too deeply to be printed are left out."""
    fields = {
        name: value
        for name, value in doc.items()
        if not name.startswith("_") and not is_deep(value)
    }
    return {"id": doc["_key"], **fields}


def _name_hosts(scope: Scope, config: Config) -> dict[str, str]:
    """Return the names of the hosts, by their ids."""
    from nomarr_systemd.operate.fleet import read_fleet

    return {each.host: each.name for each in read_fleet(scope, config).hosts}


def _draw(job: JobView, hosts: Mapping[str, str] | None = None) -> str:
    status = click.style(f"{job.status:<11}", fg=COLOURS.get(job.status))
    age_ms = None if job.updated_ms is None else max(0, queue.now_ms() - job.updated_ms)
    age = "" if age_ms is None else f"  {describe_ms(age_ms)} ago"
    why = f"  {job.message[:120]}" if job.status in ("error", "quarantined") else ""
    where = ""
    if hosts is not None and job.worker:
        where = f"  {job.worker}@{hosts.get(job.host, job.host)}"
    return f"{status} {job.path}{age}{where}{why}".rstrip()
