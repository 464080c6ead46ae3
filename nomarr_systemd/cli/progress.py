"""What a verb waits for: a line on the terminal, or a line of a log every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

import click

_QUIET_S: Final = 0.3  # nothing is shown for a shorter wait
_LOG_FIRST_S: Final = 2.0  # the same where standard error is no terminal
_LOG_EVERY_S: Final = 10.0


class Progress:
    """Lines on standard error: one that is overwritten if that is a terminal, else a line every
    ten seconds. Use it as a context."""

    def __init__(self) -> None:
        self._shown = False
        self._began = time.monotonic()
        self._log_due = self._began + _LOG_FIRST_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self._clear()

    def tell(self, text: str) -> None:
        """Show how far the verb has got."""
        now = time.monotonic()
        if not sys.stderr.isatty():
            if now >= self._log_due:
                click.echo(f"nomarrctl: {text}", err=True)
                self._log_due = now + _LOG_EVERY_S
        elif now - self._began > _QUIET_S:
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()
            self._shown = True

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._clear()
        click.echo(text)

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
