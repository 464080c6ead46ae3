"""``nomarrctl --fleet status|why|history|events``: all hosts that share the store.

A worker of a host is named WORKER@HOST: ``tag-0@beta``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import click

from nomarr_systemd.cli.common import (
    FAILED,
    NOT_RUNNING,
    echo_json,
    examples,
    json_option,
    limit_option,
)
from nomarr_systemd.cli.history import Line, draw_records, is_since, show_line, tell
from nomarr_systemd.cli.since import parse_since, since_option
from nomarr_systemd.cli.table import Table, brief, fit, width_of_terminal
from nomarr_systemd.core.death import recall
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.core.text import count, describe_ms
from nomarr_systemd.fleet.view import DOWN, WELL, CrashView, HostView
from nomarr_systemd.host import clock
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.fleet import (
    Fleet,
    read_archives,
    read_fleet,
    read_records,
    split_place,
)

STATUS_SCHEMA: Final = "nomarr.fleet/1"
WHY_SCHEMA: Final = "nomarr.fleet-why/1"
HISTORY_SCHEMA: Final = "nomarr.fleet-history/1"
_EVERY_S: Final = 2.0  # between two looks of events --follow
_HEADS: Final = ("HOST", "STATE", "SEEN", "WORKERS", "HEALTHY", "TROUBLE", "LAST CRASH")
_COLOURS: Final = {
    "lost": "red", "stale": "red", "error": "red", "failed": "red", "crashed": "red",
    "degraded": "yellow", "healthy": "green", "up": "green",
}  # fmt: skip
_DEATHS: Final = 5


class Death(NamedTuple):
    """A death, and the host that it happened on."""

    host: HostView
    crash: CrashView


@click.command(epilog=examples("--fleet status", "--fleet status beta", "--fleet status --json"))
@click.argument("names", nargs=-1, metavar="[HOST]...")
@json_option
@click.pass_obj
def status(scope: Scope, names: tuple[str, ...], as_json: bool) -> int:
    """Show every host that shares the store, the worst first; named ones in full.

    A host is stale when its lease is over, and lost when the others have settled its jobs; what is
    shown of its workers is as it was. The exit status is 3 if a host is not up or a worker does not
    run, and 1 if all run and one is unhealthy.
    """
    fleet = read_fleet(scope, scope.read_in_force())
    hosts = [fleet.find(name) for name in names] if names else fleet.hosts
    if as_json:
        document = {"schema": STATUS_SCHEMA, "now_ms": fleet.now_ms, "cut": fleet.is_cut}
        echo_json(document | {"hosts": [each.to_json() for each in hosts]})
    elif names:
        lines = [line for each in hosts for line in [*_draw_in_full(each), ""]][:-1]
        click.echo("\n".join(lines))
    else:
        click.echo("\n".join(_draw(fleet, width_of_terminal())))
    if any(each.state != "up" or DOWN.intersection(each.statuses()) for each in hosts):
        return NOT_RUNNING
    return 0 if all(each.is_well for each in hosts) else FAILED


@click.command(epilog=examples("--fleet why tag-0@beta", "--fleet why tag-0@beta --json"))
@click.argument("place", metavar="WORKER@HOST")
@json_option
@click.pass_context
def why(ctx: click.Context, place: str, as_json: bool) -> int:
    """Tell why a worker of any host died last, by the records that its host has archived.

    The report with its log and its last frames is on that host: run nomarrctl why there.
    """
    scope: Scope = ctx.obj
    config = scope.read_in_force()
    fleet = read_fleet(scope, config)
    worker, host = _find_place(fleet, place)
    records = [each for _, each in read_records(scope, config, host.host, [worker])]
    deaths = [each for each in records if each.action in DECISIONS and each.kind][-_DEATHS:]
    last = next((each for each in host.crashes if each.worker == worker.instance), None)
    if as_json:
        from nomarr_systemd.postmortem.report import record_to_json

        document = {
            "schema": WHY_SCHEMA,
            "component": worker.component_id,
            "host": host.to_json(),
            "status": _status_of(host, worker),
            "last_crash": last and last._asdict(),
            "deaths": [record_to_json(each) for each in deaths],
        }
        echo_json(document)
        return 0
    for line in _tell(host, worker, deaths, last):
        click.echo(fit(line, 1000))
    return 0


@click.command(
    epilog=examples(
        "--fleet history", "--fleet history beta", "--fleet history tag-0@beta --since 2h"
    )
)
@click.argument("place", required=False, metavar="[HOST|WORKER@HOST]")
@since_option
@limit_option
@json_option
@click.pass_obj
def history(scope: Scope, place: str | None, since: str | None, limit: int, as_json: bool) -> None:
    """Show the last death of each worker on all hosts, with incidents between; of HOST or
    WORKER@HOST all that is on record.

    A host's last twenty deaths are shown, one for each worker. The last 5,000 records of each
    worker and the last 500 incidents of each host are kept, and shown within a minute.
    """
    from nomarr_systemd.postmortem.report import incident_to_json, record_to_json

    config = scope.read_in_force()
    fleet = read_fleet(scope, config)
    since_ms = parse_since(since, clock.now().wall_ms) if since is not None else 0
    workers: list[Component] = []
    hosts = fleet.hosts
    if place is not None:
        worker, name = split_place(place)
        hosts = [fleet.find(name)]
        workers = [worker] if worker is not None else []
    archives = read_archives(scope, config, [each.host for each in hosts], limit)
    incidents = [
        (host, incident)
        for host in hosts
        for incident in archives[host.host].incidents
        if is_since(incident, since_ms)
        and (not workers or workers[0].component_id in incident.members)
    ]
    incidents = sorted(incidents, key=lambda each: each[1].opened.wall_ms)[-limit:]
    deaths: list[Death] = []
    records: list[tuple[Component, Record]] = []
    if place is None:
        deaths = [each for each in _deaths(fleet) if each.crash.wall_ms >= since_ms][-limit:]
    else:
        wanted = workers or archives[hosts[0].host].workers
        records = read_records(scope, config, hosts[0].host, wanted, since_ms)[-limit:]
    if as_json:
        told = [_to_json(each) for each in deaths] + [
            {"component": worker.component_id, **_name(hosts[0]), **record_to_json(record)}
            for worker, record in records
        ]
        alike = [{**_name(host), **incident_to_json(incident)} for host, incident in incidents]
        echo_json({"schema": HISTORY_SCHEMA, "records": told, "incidents": alike})
        return
    lines = [Line(each.crash.wall_ms, _describe(each)) for each in deaths]
    told_incidents = [line for host, each in incidents for line in tell(each, host.name)]
    told_incidents = [line for line in told_incidents if line.wall_ms >= since_ms]
    if records:
        names = [(f"{each.instance}@{hosts[0].name}", record) for each, record in records]
        draw_records(names, told_incidents)
        return
    lines += [Line(each.wall_ms, show_line(each)) for each in told_incidents]
    for line in sorted(lines, key=lambda each: each.wall_ms):
        click.echo(line.text)
    if not lines:
        what = "No death is" if place is None else "Nothing is"
        click.echo(f"{what} on record" + (" since then." if since else "."))


@click.command()
@click.option(
    "--follow", "-f", is_flag=True, help="Keep showing events as they happen, until Ctrl-C."
)
@click.option(
    "--lines", "-n", type=click.IntRange(0), default=10, show_default=True, metavar="N",
    help="Show the last N deaths first.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object in each line.")
@click.pass_obj
def events(scope: Scope, follow: bool, lines: int, as_json: bool) -> None:
    """Show the last deaths on all hosts and, with --follow, deaths, and hosts that come and go.

    Hosts report when they renew their leases, so an event is seconds old when it is shown.
    """
    config = scope.read_in_force()
    fleet = read_fleet(scope, config)
    deaths = _deaths(fleet)
    for each in deaths[len(deaths) - min(lines, len(deaths)) :]:
        _show(each, as_json=as_json)
    while follow:
        time.sleep(_EVERY_S)
        before, fleet = fleet, read_fleet(scope, config)
        for event in find_news(before, fleet):
            _show(event, as_json=as_json)


def find_news(before: Fleet, after: Fleet) -> Iterator[Death | HostView]:
    """Yield what happened between two looks: deaths, and hosts whose state has changed."""
    states = {each.host: each.state for each in before.hosts}
    known = {(each.host.host, each.crash) for each in _deaths(before)}
    for host in after.hosts:
        if states.get(host.host) != host.state:
            yield host
    for death in _deaths(after):
        if (death.host.host, death.crash) not in known:
            yield death


def _find_place(fleet: Fleet, place: str) -> tuple[Component, HostView]:
    worker, host = split_place(place)
    if worker is None:
        raise click.UsageError("name a worker and its host: tag-0@HOST")
    return worker, fleet.find(host)


def _deaths(fleet: Fleet) -> list[Death]:
    """Return the last deaths on all hosts, oldest first."""
    found = [Death(host, crash) for host in fleet.hosts for crash in host.crashes]
    return sorted(found, key=lambda each: (each.crash.wall_ms, each.host.host, each.crash))


def _name(host: HostView) -> dict[str, str]:
    return {"host": host.host, "name": host.name}


def _to_json(death: Death) -> dict[str, Any]:
    return {**_name(death.host), **death.crash._asdict()}


def _show(event: Death | HostView, *, as_json: bool) -> None:
    if isinstance(event, HostView):
        if as_json:
            about = {"host": event.host, "name": event.name, "state": event.state}
            echo_json({"type": "host", **about, "age_ms": event.age_ms}, indent=None)
        else:
            word = click.style(f"{event.state:<10}", fg=_COLOURS.get(event.state))
            seen = f"seen {describe_ms(event.age_ms)} ago"
            click.echo(f"{'':<19}  {event.name:<24}  {word}  {seen}")
    elif as_json:
        echo_json({"type": "death", **_to_json(event)}, indent=None)
    else:
        click.echo(_describe(event))


def _describe(death: Death) -> str:
    from nomarr_systemd.postmortem.moments import show_moment

    host, crash = death
    name = f"{crash.worker}@{host.name}"
    decision = f"; {crash.decision}" if crash.decision else ""
    word = click.style(f"{'died':<10}", fg="red")
    return f"{show_moment(crash.wall_ms)}  {name:<24}  {word}  {crash.cause}{decision}"


def _draw(fleet: Fleet, width: int) -> Iterator[str]:
    if not fleet.hosts:
        yield "No host has a lease in the store: is nomarr-supervisor.service running?"
        return
    states: dict[str, int] = {}
    for host in fleet.hosts:
        word = host.system if host.state == "up" else host.state
        states[word or "unknown"] = states.get(word or "unknown", 0) + 1
    parts = ", ".join(f"{number} {word}" for word, number in states.items())
    more = f"; more than {len(fleet.hosts)}, the rest is not shown" if fleet.is_cut else ""
    yield click.style(fit(f"{count(len(fleet.hosts), 'host')}: {parts}{more}", width), bold=True)
    rows = [_row(host, fleet) for host in fleet.hosts]
    table = Table(_HEADS, rows, right=("WORKERS", "HEALTHY"))
    table.shrink("LAST CRASH", width, 10)
    table.shrink("TROUBLE", width, 10)
    yield table.head(width)
    for cells in rows:
        colour = _COLOURS.get(cells[1])
        yield table.row(cells, width, {"STATE": colour} if colour else None)


def _row(host: HostView, fleet: Fleet) -> tuple[str, ...]:
    counts = host.statuses()
    state = (host.system or "unknown") if host.state == "up" else host.state
    trouble = ", ".join(f"{worker} {status}" for worker, status in host.trouble[:3])
    unwell = sum(number for status, number in counts.items() if status not in WELL)
    if unwell > 3:
        trouble += f" and {unwell - 3} more"
    last = host.crashes[0] if host.crashes else None
    ago = f"{last.worker} {brief(fleet.now_ms - last.wall_ms)} ago" if last else "-"
    own = " (this host)" if host.host == fleet.mine else ""
    return (
        host.name + own,
        state,
        f"{brief(host.age_ms)} ago",
        str(sum(counts.values())),
        str(counts.get("healthy", 0)),
        trouble or "-",
        ago,
    )


def _draw_in_full(host: HostView) -> Iterator[str]:
    dot = click.style("●", fg=_COLOURS.get(host.system if host.state == "up" else host.state))
    yield f"{dot} {click.style(host.name, bold=True)} - {host.host}"
    seen, lease = describe_ms(host.age_ms), describe_ms(host.lease_ms)
    yield f"    State: {host.state}, seen {seen} ago, lease of {lease}, version {host.version}"
    for pool, states in host.pools.items():
        parts = ", ".join(f"{number} {word}" for word, number in sorted(states.items()))
        yield f"     Pool: {pool}: {parts or 'no workers'}"
    for worker, word in host.trouble:
        yield f"  Trouble: {worker} {click.style(word, fg=_COLOURS.get(word))}"
    for crash in host.crashes:
        yield f"     Died: {_describe(Death(host, crash))}"


def _tell(
    host: HostView, worker: Component, deaths: list[Record], last: CrashView | None
) -> Iterator[str]:
    from nomarr_systemd.postmortem.moments import show_moment

    now = _status_of(host, worker) or "not in trouble, or not a worker of this host"
    seen = f"{host.state}, seen {describe_ms(host.age_ms)} ago"
    yield f"{worker.component_id} on {host.name} ({seen}): {now}"
    if last is not None:
        yield f"Died {show_moment(last.wall_ms)}: {last.cause}"
        if last.decision:
            yield f"Decided: {last.decision}"
    for record in reversed(deaths):
        line = recall(record.kind, record.code).line
        ran = "" if record.run_ms is None else f" after {describe_ms(record.run_ms)}"
        yield f"  {show_moment(record.wall_ms)}  {line}{ran}; {record.action}: {record.text}"
    if last is None and not deaths:
        yield "No death of it is on record."
    command = f"nomarrctl why {worker.instance}"
    yield f"Its log and its last frames are on {host.name}: run {command} there."


def _status_of(host: HostView, worker: Component) -> str:
    """Return the worker's status if it is in trouble; else an empty text."""
    return dict(host.trouble).get(worker.instance, "")
