"""``nomarrctl status``: every worker on one screen, as systemd, the ledger and the supervisor
know it. Without the supervisor it says so and shows the rest.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import click

from nomarr_systemd.cli.common import Scope, load_config, printable
from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.config import Config
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.words import describe_ms
from nomarr_systemd.host import clock, control
from nomarr_systemd.host.manager import Manager

_COLOURS = {"healthy": "green", "failed": "red", "crashed": "red", "unhealthy": "yellow"}


class Row(NamedTuple):
    """One worker."""

    component: str
    unit: str  # systemd's word
    health: str  # the supervisor's word
    job: str
    window: str
    lifetime: str
    next: str
    last: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_obj
def status(scope: Scope, as_json: bool) -> int:
    """Show every worker: its unit, its health, its job, its restarts, and what comes next."""
    config = load_config(scope)
    workers = config.components()
    units = Manager(user=scope.user).show(
        [worker.unit for worker in workers], ["ActiveState", "LoadState"]
    )
    answer = control.ask(scope.paths.live, {"op": "snapshot"})
    live = {each.get("component"): each for each in answer.get("workers", [])}
    rows = [
        _describe(worker, config, units[worker.unit], live.get(worker.component_id, {}), scope)
        for worker in workers
    ]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        if not answer:
            click.secho("The supervisor does not answer: no health is shown.", fg="yellow")
        _draw(rows)
    return 0 if all(row.unit == "active" for row in rows) else 3


def _describe(
    worker: Component, config: Config, unit: dict[str, str], live: dict[str, Any], scope: Scope
) -> Row:
    account = _read_public(scope, worker)
    rules = config.rules_for(worker)
    stats = book_keeping.statistics(account, rules.window_s, clock.now())
    limit = rules.max_lifetime_restarts
    last = next((r for r in reversed(account.records) if r.kind), None)
    waiting = ""
    failed = unit["ActiveState"] == "failed"
    if failed and last is not None and (last.action, last.effect) == ("restart", "scheduled"):
        left_ms = last.due.boottime_ms - clock.now().boottime_ms
        waiting = f"in {describe_ms(max(0, left_ms))}"
    masked = unit["LoadState"] == "masked"
    return Row(
        worker.component_id,
        "masked" if masked else unit["ActiveState"],
        str(live.get("status") or "-"),
        str(live.get("current_job") or "-"),
        f"{stats.window_restarts}/{rules.max_restarts}",
        f"{stats.lifetime_restarts}/{limit}" if limit else str(stats.lifetime_restarts),
        account.failure_reason or waiting or "-",
        last.kind if last else "-",
    )


def _read_public(scope: Scope, worker: Component) -> Account:
    """The worker's account as it is published; an empty one if nothing is."""
    path = f"{scope.paths.state}/public/{worker.instance}.json"
    try:
        with open(path, encoding="utf-8") as file:
            return book_keeping.from_doc(json.load(file))
    except (OSError, ValueError):
        return Account(worker.component_id)


def _draw(rows: list[Row]) -> None:
    heads = ("COMPONENT", "UNIT", "HEALTH", "JOB", "WINDOW", "LIFETIME", "NEXT", "LAST CRASH")
    table = [heads, *(tuple(printable(text)[:40] for text in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, line in enumerate(table):
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        if number:
            cells[2] = click.style(cells[2], fg=_COLOURS.get(line[2]))
        click.echo(click.style("  ".join(cells).rstrip(), bold=not number))
