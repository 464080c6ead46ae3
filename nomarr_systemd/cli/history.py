"""``nomarrctl history``: the ledger's records as a table, newest last, with incidents between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from nomarr_systemd.cli.common import complete, echo_json, limit_option, need_view, printable
from nomarr_systemd.cli.since import parse_since, since_option
from nomarr_systemd.cli.table import Table, width_of_terminal
from nomarr_systemd.core.death import name_signal, recall
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.incident import SPAN_MS, Incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import count, describe_ms
from nomarr_systemd.host import clock
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.public import read_incidents

SCHEMA = "nomarr.history/1"
_NEVER: Final = 1 << 50
_COLOURS = {"fail": "red", "restart": "yellow"}
HEADS = (
    *("WHEN", "WORKER", "RUN", "HOW", "DECISION", "DELAY", "WINDOW", "LIFETIME", "EFFECT"),
    "BY",
)
DISPENSABLE = ("EFFECT", "LIFETIME", "WINDOW", "DELAY")  # left out if the terminal is too narrow


class Item(NamedTuple):
    component: Component
    record: Record


class Line(NamedTuple):
    """A line between the records, about an incident."""

    wall_ms: int
    text: str


@click.command()
@click.argument("component", required=False, metavar="[COMPONENT|POOL]", shell_complete=complete)
@since_option
@limit_option
@click.option(
    "--health",
    is_flag=True,
    help="Draw the health of COMPONENT over time instead; of the last day without --since.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON, for scripts: schema nomarr.history/1, with --health nomarr.health/1.",
)
@click.pass_obj
def history(
    scope: Scope,
    component: str | None,
    since: str | None,
    limit: int,
    health: bool,
    as_json: bool,
) -> None:
    """Show what died, how, and what was decided, for every worker, COMPONENT or POOL; newest last.

    WINDOW and LIFETIME are restarts used and allowed as they were before the decision. Between the
    records is when an incident began and how it ended. The last 5,000 records of each worker and
    the last 500 incidents can be shown. nomarrctl why --invocation RUN tells more.

    With --health: one column for each step of time. Its height is how much of the step the worker
    was healthy, its colour that of the worst state; each death is marked. Samples are kept every
    30 s for 3 days, every 10 min for 90 days, and every 6 h for ever.
    """
    from nomarr_systemd.postmortem.witnesses import (
        check_known,
        find_members,
        list_workers,
        read_account,
    )

    need_view(scope)
    since_ms = parse_since(since, clock.now().wall_ms) if since is not None else 0
    if health:
        from nomarr_systemd.cli.health_history import show

        if component is None:
            raise click.UsageError("--health needs a COMPONENT.")
        worker = parse_component(component)
        check_known(scope.paths, None, worker)
        show(scope.paths, worker, None if since is None else since_ms, as_json=as_json)
        return
    notes: list[str] = []
    if component is not None:
        workers = find_members(scope.paths, None, component) or [parse_component(component)]
        check_known(scope.paths, None, workers[0])
    else:
        workers = sorted(list_workers(scope.paths, notes))
    items = [
        Item(worker, record)
        for worker in workers
        for record in read_account(scope.paths, worker, notes).records
        if record.wall_ms >= since_ms
    ]
    items.sort(key=lambda item: (item.record.wall_ms, item.component, item.record.attempt))
    shown = items[-limit:]
    incidents = _find_incidents(scope, workers if component is not None else None, notes)
    if as_json:
        over = [each for each in incidents if is_since(each, since_ms)]
        echo_json(_to_json(shown, over[-limit:], notes))
        return
    for note in notes:
        click.secho(printable(note), fg="yellow", err=True)
    # Not those before the oldest record that is shown: they would stand for what is left out.
    since_ms = max(since_ms, shown[0].record.wall_ms - SPAN_MS) if items[:-limit] else since_ms
    lines = [line for each in incidents for line in tell(each) if line.wall_ms >= since_ms]
    if not shown and not lines:
        click.echo("Nothing is on record" + (" since then." if since else "."))
        return
    draw_records([(item.component.instance, item.record) for item in shown], lines[-limit:])
    if len(items) > limit:
        click.echo(f"{len(items) - limit} older ones are not shown: --limit shows more.", err=True)


def _find_incidents(
    scope: Scope, workers: list[Component] | None, notes: list[str]
) -> list[Incident]:
    """Return the incidents in which one of these workers died, or all; oldest first."""
    found, problem = read_incidents(scope.paths.public)
    notes += [problem] if problem else []
    if workers is None:
        return found
    names = {each.component_id for each in workers}
    return [each for each in found if not names.isdisjoint(each.members)]


def is_since(incident: Incident, since_ms: int) -> bool:
    """True if the incident is open, or was closed since then."""
    return (incident.closed_wall_ms or _NEVER) >= since_ms


def tell(incident: Incident, host: str = "") -> Iterator[Line]:
    """Yield the lines about an incident, of that host: its beginning, and its end."""
    pool = f"{incident.pool}@{host}" if host else incident.pool
    first = incident.tried[0] if incident.tried else incident.canary
    died = f"{count(len(incident.members))} of {pool} died alike"
    cause = recall(incident.kind, incident.code).line
    yield Line(incident.opened.wall_ms, f"incident: {died} ({cause}); {first} is tried first")
    if incident.closed_wall_ms is not None:
        lasted = describe_ms(max(0, incident.closed_wall_ms - incident.opened.wall_ms))
        deaths = "" if incident.deaths is None else f" and {count(incident.deaths, 'death')}"
        text = f"the incident of {pool} is over after {lasted}{deaths}: {incident.closed}"
        yield Line(incident.closed_wall_ms, text)


def _to_json(items: list[Item], incidents: list[Incident], notes: list[str]) -> dict[str, Any]:
    from nomarr_systemd.postmortem.report import incident_to_json, record_to_json

    return {
        "schema": SCHEMA,
        "records": [
            {"component": item.component.component_id} | record_to_json(item.record)
            for item in items
        ],
        "incidents": [incident_to_json(each) for each in incidents],
        "notes": notes,
    }


def draw_records(items: list[tuple[str, Record]], lines: Sequence[Line] = ()) -> None:
    """Print records as a table, each with the name of its worker; lines between them, by time."""
    rows = [tuple(printable(text) for text in _cells(*item)) for item in items]
    table = Table(HEADS, rows)
    # Empty columns are left out.
    empty = [head for n, head in enumerate(HEADS) if all(row[n] in ("", "-") for row in rows)]
    table.leave_out(empty)
    for head in DISPENSABLE:
        if table.width > width_of_terminal():
            table.leave_out([head])
    if rows:
        click.echo(table.head())
    drawn = [
        (record.wall_ms, click.style(table.row(row).rstrip(), fg=_COLOURS.get(record.action)))
        for (_, record), row in zip(items, rows, strict=True)
    ]
    drawn += [(line.wall_ms, show_line(line)) for line in lines]
    for _, text in sorted(drawn, key=lambda each: each[0]):
        click.echo(text)


def show_line(line: Line) -> str:
    from nomarr_systemd.postmortem.moments import show_moment

    return click.style(printable(f"{show_moment(line.wall_ms)}  {line.text}"), bold=True)


def _cells(name: str, record: Record) -> Iterator[str]:
    from nomarr_systemd.postmortem.moments import show_moment

    decided = bool(record.kind)
    yield show_moment(record.wall_ms)
    yield name
    run, _, start_job = record.invocation.partition("#")
    yield run[:8] + (f"#{start_job}" if start_job else "")
    yield _name_death(record) if decided else "-"
    yield record.action
    yield describe_ms(record.delay_ms) if record.action == "restart" and decided else "-"
    yield f"{record.window_used}/{record.window_limit}" if decided else "-"
    limit = f"/{record.lifetime_limit}" if record.lifetime_limit else ""
    yield f"{record.lifetime_used}{limit}" if decided else "-"
    yield record.effect
    yield record.by or "-"


def _name_death(record: Record) -> str:
    """Return a death in one or two words."""
    if record.kind in ("signal", "core-dump") and record.code < 0:
        dumped = ", core" if record.kind == "core-dump" else ""
        return f"SIG{name_signal(-record.code)}{dumped}"
    return f"{record.kind} {record.code}" if record.kind in ("exit", "config") else record.kind
