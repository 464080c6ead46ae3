"""``nomarrctl status``: every worker on one screen, as systemd, the ledger and the supervisor
know it. Without the supervisor it says so and shows the rest.
"""

from __future__ import annotations

import click

from nomarr_systemd.cli.common import (
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


@click.command(epilog=examples("status", "status tag-0", "status tag --json", "status --watch"))
@names_argument
@click.option("--watch", is_flag=True, help="Keep showing changes as they happen, until Ctrl-C.")
@json_option
@click.pass_obj
def status(scope: Scope, names: tuple[str, ...], watch: bool, as_json: bool) -> int:
    """Show every worker: its health, its job, its restarts, and what comes next.

    WINDOW is restarts within the policy's window and their limit, LIFETIME (LIFE on a narrow
    terminal) all restarts since the last reset and their limit. NEXT is when a restart is due, or
    the command that a worker waits for. Named workers are shown in full. The exit status is 3 if
    one of them does not run.
    """
    config = scope.read_in_force()
    need_view(scope)
    if watch:
        from nomarr_systemd.cli.watch import watch as stay

        choose(config, names)
        return stay(scope, names, as_json=as_json)
    overview = look(scope, config, names)
    if as_json:
        echo_json([view.to_json() for view in overview.views])
    else:
        from nomarr_systemd.cli.status_table import draw, draw_in_full
        from nomarr_systemd.cli.table import width_of_terminal

        pools = {pool.name for pool in config.pools}
        if names and not pools.intersection(names):
            lines = [line for view in overview.views for line in [*draw_in_full(view), ""]][:-1]
        else:
            lines = list(draw(overview, width_of_terminal()))
        click.echo("\n".join(lines))
    return 0 if all(view.active == "active" for view in overview.views) else NOT_RUNNING
