"""``nomarrctl why``: the post-mortem report of a worker, for a terminal, as a page or as JSON."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import Any

import click

from nomarr_systemd.cli.common import (
    complete,
    complete_run,
    echo_json,
    examples,
    need_view,
    printable,
)
from nomarr_systemd.cli.table import Table
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.death import recall
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.postmortem.moments import show_moment
from nomarr_systemd.postmortem.present import describe_now
from nomarr_systemd.postmortem.report import render, to_json
from nomarr_systemd.postmortem.report_model import Report
from nomarr_systemd.postmortem.verdict import make_report
from nomarr_systemd.postmortem.witnesses import (
    Witnesses,
    check_known,
    choose_run,
    find_last_death,
    find_members,
    gather,
)

_STYLES: dict[str, dict[str, Any]] = {
    "bad": {"fg": "red"},
    "good": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "bold": {"bold": True},
    "dim": {"dim": True},
}
NO_SUCH_RUN = 4
POOL_SCHEMA = "nomarr.why-pool/1"


@click.command(
    epilog=examples(
        "why tag-0", "why tag", "why tag-0 --invocation 78dcdf31", "why tag-0 --html why.html"
    )
)
@click.argument("component", metavar="COMPONENT|POOL", shell_complete=complete)
@click.option(
    "--invocation",
    default="",
    metavar="ID",
    shell_complete=complete_run,
    help="An older run, by its id or the beginning of it.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, allow_dash=True, readable=False),
    metavar="FILE",
    help="Write a self-contained HTML page to FILE; - is standard output.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for scripts: schema nomarr.why/1."
)
@click.pass_obj
def why(scope: Scope, component: str, invocation: str, html: str | None, as_json: bool) -> int:
    """Tell why COMPONENT died last: what killed it, what it was doing, and what was decided.

    It puts together what systemd, the journal, the ledger and the supervisor know. Of a worker that
    runs and is not well it tells what it does, since when, and its last lines. COMPONENT is
    worker:tag:0, tag-0 or nomarr-worker@tag-0.service; nomarrctl history lists the runs that
    --invocation can name. For a POOL: a line for each worker, then the report on the last death.

    Exit status: 0 when there is an answer, also for a worker that never died; 4 if there is no
    such worker or run.
    """
    need_view(scope)
    config = _read_config(scope)
    members = find_members(scope.paths, config, component)
    if len(members) > 1 and invocation:
        raise click.UsageError("--invocation needs one COMPONENT.")
    if not members:
        worker = parse_component(component)
        check_known(scope.paths, config, worker)
        members = [worker]
    everyone = [gather(scope.paths, each) for each in members]
    witnesses = _find_newest(everyone)
    report = make_report(witnesses, *choose_run(witnesses, invocation))
    if len(everyone) > 1 and html is None:
        _tell_pool(component, everyone, report, as_json=as_json)
        return 0
    return _tell(report, html, as_json=as_json)


def _find_newest(everyone: list[Witnesses]) -> Witnesses:
    """Return the worker that died last; the first one if none has died."""

    def died_at(witnesses: Witnesses) -> int:
        last = find_last_death(witnesses.account)
        return last.wall_ms if last else 0

    return max(everyone, key=died_at)


def _tell_pool(pool: str, everyone: list[Witnesses], report: Report, *, as_json: bool) -> None:
    rows = [(each, find_last_death(each.account), describe_now(each)) for each in everyone]
    if as_json:
        workers = [
            {
                "component": each.component.component_id,
                "now": now,
                "last_death": last
                and {
                    "invocation": last.invocation,
                    "kind": last.kind,
                    "code": last.code,
                    "line": recall(last.kind, last.code).line,
                    "at_ms": last.wall_ms,
                },
            }
            for each, last, now in rows
        ]
        document = {"schema": POOL_SCHEMA, "pool": pool, "workers": workers}
        echo_json(document | {"report": to_json(report)})
        return
    heads = ("WORKER", "DIED LAST", "OF", "NOW")
    cells = [
        (
            each.component.instance,
            show_moment(last.wall_ms) if last else "-",
            recall(last.kind, last.code).line if last else "-",
            now,
        )
        for each, last, now in rows
    ]
    table = Table(heads, cells)
    for line in (heads, *cells):
        click.echo(printable(table.row(line)).rstrip())
    click.echo()
    _tell(report, None, as_json=False)


def _tell(report: Report, html: str | None, *, as_json: bool) -> int:
    if html is not None:
        _write_page(html, render(report, "why.html.j2"))
    if as_json:
        echo_json(to_json(report))
    elif html is None:
        on_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else 80
        text = render(report, "why.txt.j2", width=max(40, width), fold=on_terminal, paint=_paint)
        click.echo(text, nl=False)
    return NO_SUCH_RUN if report.verdict == "unknown-run" else 0


def _read_config(scope: Scope) -> Config | None:
    """Return the configuration in force, or the file's if this user may not read that; None if
    neither can be read: a post-mortem must not fail for that."""
    for read in (scope.read_in_force, scope.read_file):
        with contextlib.suppress(ConfigError):
            return read()
    return None


def _write_page(name: str, page: str) -> None:
    if name == "-":
        click.echo(page, nl=False)
        return
    try:
        # The page has lines of the journal, which not every user may read.
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise NomarrError(
            f"cannot write {name}: {error.strerror}", hint="name another file with --html FILE"
        ) from error
    click.echo(f"Written to {click.format_filename(name)}.", err=True)


def _paint(text: str, style: str) -> str:
    """Colours for a terminal; click removes them elsewhere."""
    if style not in _STYLES:
        return text
    return "\n".join(click.style(line, **_STYLES[style]) for line in text.split("\n"))
