"""``nomarrctl policy``: the restart policy in force and where each value of it was written, what it
means for a worker now, and what another policy would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import click

from nomarr_systemd.cli.common import (
    complete,
    complete_worker,
    echo_json,
    examples,
    json_option,
    note_difference,
    printable,
    read_applied_and_compare,
    warn,
)
from nomarr_systemd.cli.since import since_option
from nomarr_systemd.cli.table import Table, width_of_terminal
from nomarr_systemd.config.values import DEFAULT_RULES
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.configuration import NotApplied
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.public import read_whole
from nomarr_systemd.operate.choose import choose, choose_one
from nomarr_systemd.operate.policies import Effective, Value, resolve, to_json

_HEADS = ("rule", "value", "origin")  # names of the columns; no head is drawn


def _complete_key(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return [f"{key}=" for key in DEFAULT_RULES._fields if key.startswith(incomplete)]


@click.group()
def policy() -> None:
    """Show, explain and try out the restart policy."""


@policy.command(
    short_help="Show every value and where it was written.",
    epilog=examples("policy show", "policy show tag-0 --json"),
)
@click.argument("component", required=False, shell_complete=complete_worker)
@json_option
@click.pass_obj
def show(scope: Scope, component: str | None, as_json: bool) -> None:
    """Show the policy of every worker, or of COMPONENT, and where each value comes from.

    This is the policy that was applied; before the first apply, what the file says. A star marks
    a value that is not the default. COMPONENT is worker:tag:0, tag-0 or
    nomarr-worker@tag-0.service.
    """
    is_applied, differs = True, None
    try:
        config, differs = read_applied_and_compare(scope)
    except NotApplied:
        is_applied, config = False, scope.read_file()
    workers = choose(config, [component]) if component is not None else config.components()
    policies = [(worker, resolve(config, worker)) for worker in workers]
    if not as_json:
        note_difference(scope, differs)
        if not is_applied:
            warn(f"nothing has been applied yet; this is what {scope.config_file} says")
    if as_json:
        state = {"applied": is_applied, "file_differs": differs}
        echo_json([to_json(*each) | state for each in policies])
    elif not policies:
        click.echo(f"No workers are configured in {printable(scope.config_file)}.")
    else:
        click.echo("\n\n".join(_draw(policies)))


@policy.command(
    short_help="Say what follows the next failure of a worker.",
    epilog=examples("policy explain tag-0", "policy explain tag-0 --json"),
)
@click.argument("component", shell_complete=complete_worker)
@json_option
@click.pass_obj
def explain(scope: Scope, component: str, as_json: bool) -> None:
    """Explain the policy's state for COMPONENT: its window as a timeline, what follows the next
    failure, and when the window has room again.
    """
    from nomarr_systemd.cli.explain import draw, explain_worker, to_json
    from nomarr_systemd.host import clock

    config = scope.read_in_force()
    worker = choose_one(config, component)
    rules = config.rules_for(worker)
    found = explain_worker(worker, _read_account(scope, worker), rules, clock.now())
    if as_json:
        echo_json(to_json(found))
    else:
        click.echo("\n".join(draw(found, min(80, width_of_terminal()), scope.paths.nomarrctl)))


@policy.command(
    short_help="Replay the failures on record under another policy.",
    epilog=examples(
        "policy simulate --set max_restarts=3",
        "policy simulate --set window_s=600 --set backoff_base_s=5 tag",
        "policy simulate --since yesterday --set on_exhausted=cooldown tag-0",
    ),
)
@click.argument("names", nargs=-1, metavar="[COMPONENT|POOL]...", shell_complete=complete)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another value for a key of [policy] (repeatable).",
    shell_complete=_complete_key,
)
@since_option
@json_option
@click.pass_obj
def simulate(
    scope: Scope, names: tuple[str, ...], changes: tuple[str, ...], since: str | None, as_json: bool
) -> None:
    """Replay the failures on record under another policy, and show both side by side.

    It shows what would have been restarted, what masked, and how much downtime that would have cost
    or saved. Nothing is changed. Without --set the policy in force is tried, which may differ from
    the policy at the time of the failures.
    """
    from nomarr_systemd.cli.simulation import draw
    from nomarr_systemd.cli.since import parse_since
    from nomarr_systemd.core.simulate import simulate as replay
    from nomarr_systemd.host import clock
    from nomarr_systemd.operate import simulation

    config = scope.read_in_force()
    settings = simulation.read_settings(changes)
    now = clock.now()
    since_ms = parse_since(since, now.wall_ms) if since is not None else 0
    replays = []
    for worker in choose(config, names):
        rules = simulation.change(config.rules_for(worker), settings)
        account = _read_account(scope, worker)
        result = replay(account, rules, now, since_wall_ms=since_ms)
        replays.append(simulation.Replayed(worker, rules, result))
    if as_json:
        echo_json(simulation.to_json(replays, settings))
    elif not any(each.result.steps for each in replays):
        click.echo("No failures are on record" + (" since then." if since else "."))
    else:
        click.echo("\n".join(draw(replays, settings)))


def _read_account(scope: Scope, worker: Component) -> Account:
    account, problem = read_whole(scope.paths.public, worker)
    if problem:
        warn(problem, f"{worker.instance} is treated as a worker without failures")
    return account


def _draw(policies: Iterable[tuple[Component, tuple[Effective, ...]]]) -> Iterator[str]:
    """Yield a table for each group of successive workers of a pool with the same policy."""
    for (_, rules), run in groupby(policies, key=lambda each: (each[0].pool, each[1])):
        workers = [worker for worker, _ in run]
        title = workers[0].component_id
        if len(workers) > 1:
            title += f" to {workers[-1].component_id}"
        rows = [_cells(each) for each in rules]
        table = Table(_HEADS, rows, least={"rule": 23, "value": 12}, right=["value"])
        lines = [
            click.style(table.row(cells), fg="yellow" if each.differs else None)
            for each, cells in zip(rules, rows, strict=True)
        ]
        yield "\n".join([click.style(title, bold=True), *lines])


def _cells(each: Effective) -> tuple[str, str, str]:
    mark, default = ("*", f" (default {_spell(each.default)})") if each.differs else (" ", "")
    return f"{mark} {each.rule}", _spell(each.value), f"{each.origin}{default}"


def _spell(value: Value) -> str:
    match value:
        case float():
            return f"{value:.12g}"
        case tuple():
            return " ".join(map(str, value)) or "none"
    return str(value)
