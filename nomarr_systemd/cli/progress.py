"""A line on the terminal that says what a verb is waiting for."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

import click

_QUIET_S: Final = 0.3  # nothing is shown for a shorter wait


class Progress:
    """A line on standard error that is overwritten, if that is a terminal. Use it as a context."""

    def __init__(self) -> None:
        self._shown = False
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self._clear()

    def tell(self, text: str) -> None:
        """Show how far the verb has got."""
        if time.monotonic() - self._began > _QUIET_S and sys.stderr.isatty():
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
