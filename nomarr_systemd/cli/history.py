"""``nomarrctl history``: the ledger's records as a table, newest last."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from nomarr_systemd.cli.common import Scope, printable
from nomarr_systemd.core.death import name_signal
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import describe_ms

SCHEMA = "nomarr.history/1"
_UNITS_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]{1,9}) ?(s|min|m|h|d|w)")
_COLOURS = {"fail": "red", "restart": "yellow"}
HEADS = (
    *("WHEN", "WORKER", "RUN", "HOW", "DECISION", "DELAY", "WINDOW", "LIFETIME", "EFFECT"),
    "BY",
)
DISPENSABLE = ("EFFECT", "LIFETIME", "WINDOW", "DELAY")  # where the terminal is too narrow
_FORMATS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%H:%M")


class Item(NamedTuple):
    component: Component
    record: Record


@click.command()
@click.argument("component", required=False)
@click.option("--since", metavar="WHEN", help="30min, 2h, 3d; or 2026-11-16, '2026-11-16 03:00'.")
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="The newest so many."
)
@click.option("--json", "as_json", is_flag=True, help="For scripts: schema nomarr.history/1.")
@click.pass_obj
def history(
    scope: Scope, component: str | None, since: str | None, limit: int, as_json: bool
) -> None:
    """Show what died, how, and what was decided, for every worker or for COMPONENT; newest last.

    WINDOW and LIFETIME are restarts used and allowed as they were before the decision. The ledger
    keeps the last hundred records of each worker. nomarrctl why --invocation RUN tells more.
    """
    from nomarr_systemd.postmortem.witnesses import check_known, list_workers, read_account

    since_ms = parse_since(since, time.time()) if since else 0
    notes: list[str] = []
    if component is not None:
        workers = [parse_component(component)]
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
    if as_json:
        click.echo(json.dumps(_to_json(shown, notes), indent=2))
        return
    for note in notes:
        click.secho(printable(note), fg="yellow", err=True)
    if not shown:
        click.echo("Nothing is on record" + (" since then." if since else "."))
        return
    _draw(shown)
    if len(items) > limit:
        click.echo(f"{len(items) - limit} older ones are not shown: --limit shows more.", err=True)


def parse_since(text: str, now_s: float) -> int:
    """A moment in wall time, in milliseconds: so long ago, or a date and time of this machine."""
    import datetime

    if match := _DURATION.fullmatch(text.strip()):
        return int((now_s - int(match[1]) * _UNITS_S[match[2]]) * 1000)
    for form in _FORMATS:
        try:
            moment = datetime.datetime.strptime(text.strip(), form)  # noqa: DTZ007  made local below
        except ValueError:
            continue
        if form == "%H:%M":
            today = datetime.datetime.fromtimestamp(now_s).astimezone()
            moment = moment.replace(year=today.year, month=today.month, day=today.day)
        try:
            return int(moment.astimezone().timestamp() * 1000)
        except (OverflowError, ValueError):
            break
    raise BadName(
        f"--since {printable(text)[:60]}: this is no time",
        hint="write 30min, 2h or 3d, or 2026-11-16, or '2026-11-16 03:00'",
    )


def _to_json(items: list[Item], notes: list[str]) -> dict[str, Any]:
    from nomarr_systemd.postmortem.report import record_to_json

    return {
        "schema": SCHEMA,
        "records": [
            {"component": item.component.component_id} | record_to_json(item.record)
            for item in items
        ],
        "notes": notes,
    }


def _draw(items: list[Item]) -> None:
    rows = [HEADS, *(tuple(printable(text) for text in _cells(item)) for item in items)]
    # A column that says nothing is left out.
    columns = [n for n in range(len(HEADS)) if any(row[n] not in ("", "-") for row in rows[1:])]
    widths = {n: max(len(row[n]) for row in rows) for n in columns}
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        for head in DISPENSABLE:
            if sum(widths[n] + 2 for n in columns) - 2 > room:
                columns = [n for n in columns if HEADS[n] != head]
    for number, row in enumerate(rows):
        line = "  ".join(row[n].ljust(widths[n]) for n in columns).rstrip()
        colour = _COLOURS.get(items[number - 1].record.action) if number else None
        click.echo(click.style(line, fg=colour, bold=True if not number else None))


def _cells(item: Item) -> Iterator[str]:
    from nomarr_systemd.postmortem.report import show_moment

    record = item.record
    decided = bool(record.kind)
    yield show_moment(record.wall_ms)
    yield item.component.instance
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
    """A death in two words."""
    if record.kind in ("signal", "core-dump") and record.code < 0:
        dumped = ", core" if record.kind == "core-dump" else ""
        return f"SIG{name_signal(-record.code)}{dumped}"
    return f"{record.kind} {record.code}" if record.kind in ("exit", "config") else record.kind
