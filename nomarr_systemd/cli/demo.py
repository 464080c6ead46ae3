"""``nomarrctl demo``: the story of ``demo.story`` on the terminal."""

from __future__ import annotations

import signal
import sys
import time

import click

from nomarr_systemd.cli.common import printable
from nomarr_systemd.demo.lab import go_where_a_lab_can_be
from nomarr_systemd.demo.stage import Kind
from nomarr_systemd.demo.story import tell


@click.command()
def demo() -> None:
    """Run a demo: workers crash, hang and fail for good under a real systemd of their own.

    A music tagger works through a folder of files: some are broken, one crashes the worker, and one
    makes it hang. It takes less than half a minute, touches nothing outside a temporary directory,
    and leaves nothing behind. Every line with a tick was checked; exit status 0 means that every
    check passed.
    """
    go_where_a_lab_can_be([sys.executable, *sys.orig_argv[1:]])
    # SIGTERM and SIGHUP end the demo as Ctrl-C does: nothing is left behind. nohup ignores SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    tell(_show)
    click.echo(f"\nAll of it was checked, in {time.monotonic() - started:.0f} s.")


def _show(kind: Kind, text: str) -> None:
    match kind:
        case "chapter":
            click.echo("\n" + click.style(text, bold=True, fg="cyan"))
        case "text":
            click.echo(f"  {text}")
        case "command":
            click.echo("  " + click.style(f"$ {text}", bold=True))
        case "answer":
            for line in printable(text).rstrip().split("\n"):
                click.echo("  " + click.style(f"│ {line}".rstrip(), fg="yellow"))
        case "tick":
            click.echo(click.style(f"  ✓ {text}", fg="green"))
