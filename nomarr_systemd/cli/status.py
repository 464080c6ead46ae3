"""``nomarrctl status``: every worker on one screen, as systemd, the ledger and the supervisor
know it. Without the supervisor it says so and shows the rest.
"""

from __future__ import annotations

import click

from nomarr_systemd.cli.common import (
    FAILED,
    NOT_RUNNING,
    echo_json,
    examples,
    json_option,
    names_argument,
    need_view,
)
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.choose import choose
from nomarr_systemd.operate.overview import look


@click.command(
    epilog=examples(
        "status", "status tag-0", "status tag --json", "status --problems", "status --watch"
    )
)
@names_argument
@click.option("--problems", is_flag=True, help="Show only workers that are in trouble.")
@click.option("--watch", is_flag=True, help="Keep showing changes as they happen, until Ctrl-C.")
@json_option
@click.pass_obj
def status(scope: Scope, names: tuple[str, ...], problems: bool, watch: bool, as_json: bool) -> int:
    """Show every worker: its health, its job, its restarts, and what comes next.

    WINDOW is restarts within the policy's window and their limit, LIFETIME (LIFE on a narrow
    terminal) all restarts since the last reset and their limit. NEXT is when a restart is due, or
    the command that a worker waits for. Named workers are shown in full. If there are more than
    the terminal has lines for, those in trouble come first, and healthy ones are only counted.

    The exit status is 0 if all of them are healthy, 3 if one does not run, and 1 if all run and one
    is not healthy, or the supervisor does not answer. With --problems only workers in trouble are
    judged: not those that load, and not those that are down because a person or their settings
    want that.
    """
    config = scope.read_in_force()
    need_view(scope)
    if watch:
        from nomarr_systemd.cli.watch import watch as stay

        choose(config, names)
        return stay(scope, names, as_json=as_json, problems=problems)
    overview = look(scope, config, names, problems=problems)
    if as_json:
        echo_json([view.to_json() for view in overview.views])
    else:
        from nomarr_systemd.cli.status_table import draw, draw_in_full
        from nomarr_systemd.cli.table import height_of_terminal, width_of_terminal

        pools = {pool.name for pool in config.pools}
        if names and not pools.intersection(names):
            ours = scope.paths.nomarrctl
            drawn = ([*draw_in_full(view, ours), ""] for view in overview.views)
            lines = [line for each in drawn for line in each][:-1]
        else:
            lines = draw(overview, width_of_terminal(), height_of_terminal())
        click.echo("\n".join(lines))
    if any(view.active != "active" for view in overview.views):
        return NOT_RUNNING
    is_well = not overview.views if problems else all(each.is_healthy for each in overview.views)
    return 0 if is_well and (overview.supervisor or not overview.total) else FAILED
