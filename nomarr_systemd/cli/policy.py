"""``nomarrctl policy``: the restart policy in force, and where each value of it was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import click

from nomarr_systemd.cli.common import Scope, load_config, printable
from nomarr_systemd.core.config import DEFAULT_RULES, Config, Origin
from nomarr_systemd.core.ids import Component, parse_component

Value = int | float | str | tuple[int, ...]


class Effective(NamedTuple):
    """One rule of one worker."""

    rule: str
    value: Value
    default: Value
    origin: Origin

    @property
    def differs(self) -> bool:
        return self.value != self.default


@click.group()
def policy() -> None:
    """Show the restart policy in force."""


@policy.command()
@click.argument("component", required=False)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_obj
def show(scope: Scope, component: str | None, as_json: bool) -> None:
    """Show the policy of every worker, or of COMPONENT, and where each value comes from.

    A star marks a value that is not the default. COMPONENT is worker:tag:0, tag-0 or
    nomarr-worker@tag-0.service.
    """
    wanted = parse_component(component) if component is not None else None
    config = load_config(scope)
    workers = [wanted] if wanted else config.components()
    policies = [(worker, resolve(config, worker)) for worker in workers]
    if as_json:
        click.echo(json.dumps([_to_json(*each) for each in policies], indent=2))
    elif not policies:
        click.echo(f"No workers are configured in {printable(scope.config_file)}.")
    else:
        click.echo("\n\n".join(_draw(policies)))


def resolve(config: Config, worker: Component) -> tuple[Effective, ...]:
    """Every rule of a worker, or NoSuchWorker."""
    rules = config.rules_for(worker)
    return tuple(
        Effective(rule, value, getattr(DEFAULT_RULES, rule), config.origin_of(worker, rule))
        for rule, value in rules._asdict().items()
    )


def _to_json(worker: Component, rules: Iterable[Effective]) -> dict[str, object]:
    return {
        "component": worker.component_id,
        "policy": {
            each.rule: {"value": each.value, "default": each.default, "from": each.origin}
            for each in rules
        },
    }


def _draw(policies: Iterable[tuple[Component, tuple[Effective, ...]]]) -> Iterator[str]:
    """A table for each run of workers of one pool that have the same policy."""
    for (_, rules), run in groupby(policies, key=lambda each: (each[0].pool, each[1])):
        workers = [worker for worker, _ in run]
        title = workers[0].component_id
        if len(workers) > 1:
            title += f" to {workers[-1].component_id}"
        yield "\n".join([click.style(title, bold=True), *(_draw_row(each) for each in rules)])


def _draw_row(each: Effective) -> str:
    mark = "*" if each.differs else " "
    row = f"{mark} {each.rule:<22} {_spell(each.value):>12}  {each.origin}"
    if each.differs:
        row = click.style(f"{row} (default {_spell(each.default)})", fg="yellow")
    return row


def _spell(value: Value) -> str:
    match value:
        case float():
            return f"{value:.12g}"
        case tuple():
            return " ".join(map(str, value)) or "none"
    return str(value)
