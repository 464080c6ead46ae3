"""What every verb of nomarrctl needs: options, completion of names, text that is safe to show."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from nomarr_systemd.core.errors import NomarrError, NotPermitted
from nomarr_systemd.core.text import escape
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.scope import Scope, make_scope

if TYPE_CHECKING:
    from nomarr_systemd.config.values import Config

FAILED: Final = 1  # exit status
NOT_RUNNING: Final = 3  # exit status; the same as systemctl's for a unit that is not running


def read_applied_and_compare(scope: Scope) -> tuple[Config, bool | None]:
    """Return the applied configuration, and whether the file differs from it (None: unreadable)."""
    config = read_applied(scope.paths)
    return config, scope.file_differs(config)


def note_difference(scope: Scope, differs: bool | None) -> None:
    """Warn if the file was edited and not applied."""
    if differs:
        text = f"{scope.config_file} differs from what was applied, which is in force"
        warn(text, "nomarrctl apply --dry-run shows how")


def need_view(scope: Scope) -> None:
    """Raise NotPermitted unless this user may read the ledger's records: without them, every answer
    would be a guess."""
    from nomarr_systemd.ledger.public import list_published

    _, closed = list_published(scope.paths.public)
    if closed:
        raise NotPermitted(closed)


def printable(text: str) -> str:
    """Return the text without control characters, except for its line breaks."""
    return "\n".join(escape(line) for line in text.split("\n"))


def dump_json(value: object, *, indent: int | None = None) -> str:
    """Return JSON in ASCII without control characters: text of a worker may have any character."""
    import json

    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def echo_json(value: object, *, indent: int | None = 2) -> None:
    """Print JSON."""
    click.echo(dump_json(value, indent=indent))


def warn(text: str, hint: str = "") -> None:
    """Print a warning on standard error."""
    click.echo(f"nomarrctl: {printable(text)}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)


def find_scope(ctx: click.Context) -> Scope:
    """The installation that the command line names, which a shell completes."""
    given = ctx.find_root().params
    user = bool(given.get("user")) or "--user" in os.environ.get("COMP_WORDS", "").split()
    return make_scope(given.get("config_file"), user=user)


def complete(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str, *, pools: bool = True
) -> list[Any]:
    """Return names of configured workers and pools; none if they cannot be read."""
    from click.shell_completion import CompletionItem

    try:
        config = find_scope(ctx).read_in_force()
    except (NomarrError, OSError):
        return []
    found = [CompletionItem(worker.instance) for worker in config.components()]
    if "worker:" in incomplete:  # only after a colon was typed: shells split there
        found = [CompletionItem(worker.component_id) for worker in config.components()]
    elif pools:
        found += [
            CompletionItem(pool.name, help=f"all {pool.workers} workers of the pool")
            for pool in config.pools
        ]
    return [item for item in found if str(item.value).startswith(incomplete)]


def complete_worker(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return names of workers only."""
    return complete(ctx, parameter, incomplete, pools=False)


def complete_run(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return the runs of the worker that is named on the command line, newest first."""
    from click.shell_completion import CompletionItem

    from nomarr_systemd.core.ids import parse_component
    from nomarr_systemd.ledger.public import read_published

    try:
        worker = parse_component(str(ctx.params.get("component") or ""))
        records = read_published(find_scope(ctx).paths.public, worker).account.records
    except (NomarrError, OSError):
        return []
    runs = dict.fromkeys(each.invocation.partition("#")[0] for each in reversed(records))
    return [CompletionItem(run[:8]) for run in runs if run and run.startswith(incomplete[:8])]


def complete_pool(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return names of pools only."""
    found = complete(ctx, parameter, incomplete)
    return [item for item in found if item.help]


Command = Callable[..., Any]


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(
        function
    )


def limit_option(function: Command) -> Command:
    decorate = click.option(
        "--limit",
        type=click.IntRange(1),
        default=50,
        show_default=True,
        metavar="N",
        help="Show at most N records: the newest ones.",
    )
    return decorate(function)


def names_argument(function: Command) -> Command:
    """Add an argument of any number of POOL or COMPONENT; none means all."""
    decorate = click.argument(
        "names", nargs=-1, metavar="[POOL|COMPONENT]...", shell_complete=complete
    )
    return decorate(function)


def examples(*lines: str) -> str:
    """Return the examples for the end of a verb's --help."""
    return "\b\nExamples:\n" + "\n".join(f"  nomarrctl {line}" for line in lines)
