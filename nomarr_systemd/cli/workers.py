"""``nomarrctl pause``, ``resume``, ``restart``, ``reset`` and ``reconcile``: what a person does to
workers. Each may be repeated, and is on record with the person's name.
"""

from __future__ import annotations

import click

from nomarr_systemd.cli.common import (
    complete,
    complete_pool,
    echo_json,
    examples,
    json_option,
    names_argument,
    warn,
)
from nomarr_systemd.cli.progress import Progress
from nomarr_systemd.cli.since import parse_duration
from nomarr_systemd.core.text import count, one_line
from nomarr_systemd.host.holds import ALL
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate import acts, controlling
from nomarr_systemd.operate.choose import choose


@click.command(
    epilog=examples(
        "pause",
        "pause tag",
        "pause tag-0 tag-1",
        "pause --for 2h --reason 'a new disk'",
    )
)
@names_argument
@click.option("--for", "span", metavar="TIME", help="Resume by itself after TIME: 90s, 2h, 1d.")
@click.option("--reason", default="", metavar="TEXT", help="Why; status and the journal show it.")
@json_option
@click.pass_obj
def pause(
    scope: Scope, names: tuple[str, ...], span: str | None, reason: str, as_json: bool
) -> None:
    """Let workers finish their job and stay down, also after a reboot.

    Without names all workers are paused. A named pool, or all of them, is paused as a whole:
    workers that nomarrctl apply adds later begin paused, too. Restarts that were due are cancelled;
    counts stay as they are. nomarrctl resume lets them run again; with --for they are resumed by
    themselves, also after a reboot.
    """
    for_s = None if span is None else parse_duration(span)
    config = scope.read_in_force()
    workers = choose(config, names)
    known = {pool.name for pool in config.pools}
    pools = [name for name in names if name in known] if names else [ALL]
    with Progress() as progress:
        whole = acts.Span(pools, one_line(reason, 200), for_s)
        report = acts.pause(scope, config, workers, progress.tell, whole)
    _print(report, as_json)


@click.command(epilog=examples("resume", "resume tag"))
@names_argument
@json_option
@click.pass_obj
def resume(scope: Scope, names: tuple[str, ...], as_json: bool) -> None:
    """Let paused workers run again; their counts are as they were.

    A pool that is held because its workers died alike is started as well, and its incident is
    closed. A worker that has failed for good stays down until nomarrctl reset.
    """
    config = scope.read_in_force()
    known = [pool.name for pool in config.pools]
    pools = [name for name in names if name in known] if names else known
    _print(acts.resume(scope, config, choose(config, names), pools), as_json)


@click.command(epilog=examples("restart tag-0", "restart tag", "restart worker:tag:0 --json"))
@click.argument(
    "names", nargs=-1, required=True, metavar="POOL|COMPONENT...", shell_complete=complete
)
@json_option
@click.pass_obj
def restart(scope: Scope, names: tuple[str, ...], as_json: bool) -> int:
    """Let workers finish their job, and start them again.

    One that waits for its restart is started at once; one that does not run is started. This is
    on record and never counted. Paused workers, and those that failed for good, are left alone.
    """
    config = scope.read_in_force()
    with Progress() as progress:
        report = acts.restart(scope, config, choose(config, names), progress.tell)
    _print(report, as_json)
    return 0 if all(each.word == "restarted" for each in report.results) else 1


@click.command(epilog=examples("reset tag-0", "reset tag-0 --start", "reset --pool tag --start"))
@click.argument("names", nargs=-1, metavar="[COMPONENT]...", shell_complete=complete)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="POOL",
    shell_complete=complete_pool,
    help="All workers of this pool (repeatable).",
)
@click.option("--start", is_flag=True, help="Start the workers, too.")
@json_option
@click.pass_obj
def reset(
    scope: Scope, names: tuple[str, ...], pools: tuple[str, ...], start: bool, as_json: bool
) -> None:
    """Reset a worker's counts and unmask it, once the cause is mended.

    Window, lifetime and backoff begin at zero; the history stays. The worker is not started
    without --start. With --pool, the failure of the pool itself is cleared, too.
    """
    if not names and not pools:
        raise click.UsageError("name the workers to reset, or a pool with --pool")
    config = scope.read_in_force()
    workers = choose(config, [*names, *pools])
    _print(acts.reset(scope, config, workers, pools=pools, start=start), as_json)


@click.command(epilog=examples("reconcile"))
@json_option
@click.pass_obj
def reconcile(scope: Scope, as_json: bool) -> None:
    """Find failures that are not booked and decisions that are not carried out; finish both.

    A timer does this every hour and after every boot; it is always safe to run it by hand.
    """
    before, after = controlling.reconcile(scope, scope.read_in_force())
    if as_json:
        echo_json({"before": before, "unfinished": [each._asdict() for each in after]})
    elif after:
        are = "is" if len(after) == 1 else "are"
        click.echo(f"{count(len(after), 'decision')} {are} still to be carried out:")
        for each in after:
            click.echo(f"  {each.component}: {each.action}, {each.effect}")
    else:
        click.echo("Nothing is left undone.")


def _print(report: acts.Report, as_json: bool) -> None:
    for warning in report.warnings:
        warn(warning, "the journal has a record of it")
    if as_json:
        workers = [
            {"component": each.worker.component_id, "result": each.word} for each in report.results
        ]
        echo_json({"action": report.action, "by": report.by, "workers": workers})
        return
    for text in dict.fromkeys(each.text for each in report.results):
        names = [each.worker.component_id for each in report.results if each.text == text]
        if len(names) > 3:
            names = [f"{count(len(names))} from {names[0]} to {names[-1]}"]
        click.echo(f"{', '.join(names)}: {text}")
