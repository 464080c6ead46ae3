"""nomarrctl: the group of all verbs and its global options. A verb's module is imported when it is
used. Errors raised on purpose are printed here, as a message, a hint and an exit status.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import click

from nomarr_systemd import __version__
from nomarr_systemd.cli.common import printable
from nomarr_systemd.core.errors import NomarrError, NotPermitted
from nomarr_systemd.host.scope import Scope, make_scope

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Verb(NamedTuple):
    """One verb: the module that has its function, and its line in --help."""

    module: str
    summary: str


VERBS = {
    "apply": Verb("nomarr_systemd.cli.apply", "Bring everything in line with nomarr.toml."),
    "completion": Verb("nomarr_systemd.cli.completion", "Print a completion script for a shell."),
    "demo": Verb("nomarr_systemd.cli.demo", "Run a demo: workers crash, hang and fail."),
    "events": Verb("nomarr_systemd.cli.events", "Show decisions and events as they happen."),
    "history": Verb("nomarr_systemd.cli.history", "Show what died, how, and what was decided."),
    "job": Verb("nomarr_systemd.cli.job", "Take jobs from the queue: for workers, not people."),
    "jobs": Verb("nomarr_systemd.cli.jobs", "Fill, see and mend the queues of jobs."),
    "doctor": Verb("nomarr_systemd.cli.doctor", "Examine the installation; say what mends it."),
    "pause": Verb("nomarr_systemd.cli.workers", "Let workers finish and keep them down."),
    "policy": Verb("nomarr_systemd.cli.policy", "Show, explain and try out the restart policy."),
    "reconcile": Verb("nomarr_systemd.cli.workers", "Carry out what was left undone."),
    "reset": Verb("nomarr_systemd.cli.workers", "Reset a worker's counts, and unmask it."),
    "restart": Verb("nomarr_systemd.cli.workers", "Let workers finish, and start them again."),
    "resume": Verb("nomarr_systemd.cli.workers", "Let paused workers run again."),
    "store": Verb("nomarr_systemd.cli.store", "Copy the documents to another store."),
    "status": Verb("nomarr_systemd.cli.status", "Show every worker."),
    "why": Verb("nomarr_systemd.cli.why", "Tell why a worker died: the post-mortem report."),
}


# Verbs that --fleet changes, and the module that has these; jobs are shared in any case.
FLEET_VERBS = dict.fromkeys(("status", "why", "history", "events"), "nomarr_systemd.cli.fleet")
SHARED = ("jobs",)

# What people type who know other programs, and what does it here.
OTHERS = {
    "start": "nomarrctl resume ends a pause; systemctl start UNIT starts a worker",
    "stop": "nomarrctl pause POOL|COMPONENT keeps workers down, also after a reboot",
    "logs": "journalctl -u nomarr-worker@NAME.service shows them; nomarrctl why, those of a death",
    "log": "journalctl -u nomarr-worker@NAME.service shows it; nomarrctl why, that of a death",
    "list": "nomarrctl status lists all workers",
    "ps": "nomarrctl status lists all workers",
    "enable": "add the worker to nomarr.toml, then run nomarrctl apply",
    "disable": "nomarrctl pause POOL|COMPONENT keeps workers down, also after a reboot",
    "reload": "nomarrctl apply makes nomarr.toml take effect",
    "scale": "set workers = … in [pool.NAME] of nomarr.toml, then run nomarrctl apply",
}


class LazyGroup(click.Group):
    """Lists its verbs by name and summary, and imports only the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(VERBS)

    def get_command(
        self,
        ctx: click.Context,
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = VERBS[cmd_name].module
        if ctx.params.get("fleet") and cmd_name not in SHARED:
            if cmd_name not in FLEET_VERBS:
                known = ", ".join((*FLEET_VERBS, *SHARED))
                ctx.fail(f"--fleet is only for {known}; run {cmd_name} on the host itself")
            module = FLEET_VERBS[cmd_name]
        command: click.Command = getattr(import_module(module), cmd_name)
        _take_user_option(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from nomarr_systemd.core.text import ask_for, quote

            near = (
                OTHERS.get(args[0])
                or ask_for(args[0], VERBS)
                or "nomarrctl --help lists all commands"
            )
            ctx.fail(f"there is no command {quote(args[0])}; {near}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=verb.summary)
            for name, verb in sorted(VERBS.items())
            if name.startswith(incomplete)
        ]

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, VERBS[name].summary) for name in sorted(VERBS)])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="nomarrctl COMMAND --help shows options and examples. Exit status: 0 all is well, 1 it"
    " failed, 2 wrong usage, 3 something is not running, 4 no such worker, 77 a right is"
    " missing, 78 a mistake in nomarr.toml.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(readable=False),  # read_file explains a file that cannot be read
    metavar="FILE",
    help="Use FILE instead of /etc/nomarr/nomarr.toml (--user: ~/.config/nomarr/nomarr.toml).",
)
@click.option("--user", is_flag=True, help="Use your own workers, under your own systemd.")
@click.option(
    "--fleet",
    is_flag=True,
    help="Show all hosts that share the store: for status, why, history, events and jobs.",
)
@click.version_option(__version__, message="nomarrctl %(version)s")
@click.pass_context
def nomarrctl(ctx: click.Context, config_file: str | None, user: bool, fleet: bool) -> None:  # noqa: ARG001  # LazyGroup reads it
    """Workers under systemd, with a restart policy that remembers.

    A worker is named worker:tag:0, tag-0 or nomarr-worker@tag-0.service; most commands also take
    the name of a pool, which stands for all of its workers.
    """
    ctx.obj = make_scope(config_file, user=user)
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status."""
    gc.set_threshold(100_000)  # what thousands of workers are is no garbage
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape what the locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        status = nomarrctl.main(arguments, prog_name="nomarrctl", standalone_mode=False)
        sys.stdout.flush()  # here a full disk can still be told
    except NomarrError as error:
        show_error(error)
        return error.exit_status
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("nomarrctl: interrupted", err=True)
        return 130
    except PermissionError as error:
        refused = NotPermitted(str(error), hint="use sudo, or --user for your own workers")
        show_error(refused)
        return refused.exit_status
    except OSError as error:
        show_error(NomarrError(str(error)))
        _drop_output()
        return 1
    return status if isinstance(status, int) else 0


def show_error(error: NomarrError) -> None:
    """Print the message, with our name before each line, and the hint."""
    for line in printable(str(error)).split("\n"):
        click.echo(f"nomarrctl: {line}", err=True)
    if error.hint:
        click.echo(f"hint: {printable(error.hint)}", err=True)


def _drop_output() -> None:
    """Send unwritten output to /dev/null: the interpreter would report an error at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _take_user_option(command: click.Command) -> None:
    """Accept --user after the verb, too, as systemctl does."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _take_user_option(each)
    elif not any(option.name == "user" for option in command.params):
        command.params.append(
            click.Option(
                ["--user"],
                is_flag=True,
                expose_value=False,
                callback=_choose_user,
                help="Use your own workers, under your own systemd.",
            )
        )


def _choose_user(ctx: click.Context, _option: click.Parameter, user: bool) -> None:
    if user and isinstance(ctx.obj, Scope):
        given = ctx.find_root().params.get("config_file")
        ctx.obj = make_scope(given, user=True)


if __name__ == "__main__":
    sys.exit(main())
