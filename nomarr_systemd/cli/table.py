"""Tables for all verbs: cells in columns, cut where the terminal is too narrow.

The verb chooses the text and colour of each cell, and prints other lines between the rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import click

from nomarr_systemd.core.text import describe_ms, one_line

_PIPED: Final = 1000
_GAP: Final = "  "


class Table:
    """Columns as wide as their widest cell, and no narrower than ``least`` says for a head."""

    def __init__(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        least: Mapping[str, int] | None = None,
        right: Collection[str] = (),
    ) -> None:
        self._heads = heads
        self._right = right
        wanted = least or {}
        widest = (max(map(room_of, cells)) for cells in zip(heads, *rows, strict=True))
        self._rooms = {
            head: max(room, wanted.get(head, 0)) for head, room in zip(heads, widest, strict=True)
        }

    @property
    def width(self) -> int:
        return sum(self._rooms.values()) + len(_GAP) * (len(self._rooms) - 1)

    def leave_out(self, heads: Collection[str]) -> None:
        """Draw without these columns."""
        self._rooms = {head: room for head, room in self._rooms.items() if head not in heads}

    def shrink(self, head: str, width: int, least: int) -> None:
        """Make this column narrower, down to ``least``, until the table fits ``width``."""
        over = self.width - width
        if over > 0:
            self._rooms[head] = max(least, self._rooms[head] - over)

    def head(self, width: int = _PIPED) -> str:
        return click.style(self.row(self._heads, width), bold=True)

    def row(
        self, cells: Sequence[str], width: int = _PIPED, colours: Mapping[str, str] | None = None
    ) -> str:
        """One line of at most ``width``; ``colours`` by the head of the cell."""
        given = dict(zip(self._heads, cells, strict=True))
        last = list(self._rooms)[-1]
        shown = {}
        for head, room in self._rooms.items():
            text = fit(given[head], room)
            blanks = " " * (room - room_of(text))
            if head in self._right:
                shown[head] = blanks + text
            else:
                shown[head] = text if head == last else text + blanks
        line = _GAP.join(shown.values())
        if room_of(line) > width:  # the names alone are too long
            return fit(line, max(20, width))
        for head, colour in (colours or {}).items():
            shown[head] = click.style(shown[head], fg=colour)
        return _GAP.join(shown.values()) if colours else line


def fit(text: str, room: int) -> str:
    """Return the text clean and cut to ``room`` columns; a Chinese character takes two of them."""
    text = one_line(text, 1000)
    if len(text) <= room and text.isascii():
        return text
    taken, used = "", 0
    for sign in text:
        used += _width(sign)
        if used > room:
            while taken and room_of(taken) > room - 1:
                taken = taken[:-1]
            return taken + "…"
        taken += sign
    return taken


def room_of(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_width, text))


def brief(ms: int) -> str:
    """Return a duration in one unit, to fit a column."""
    if ms < 1000:
        return "0 s" if ms <= 0 else "1 s"
    return " ".join(describe_ms(ms // 1000 * 1000).split()[:2])


def width_of_terminal() -> int:
    """Return COLUMNS, or the terminal's width; for a file or a pipe, a width that cuts nothing."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isascii() and wanted.isdigit() and int(wanted[:6]) > 0:
        return int(wanted[:6])
    try:  # not by shutil: its import takes a tenth of our start
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return _PIPED


def height_of_terminal() -> int | None:
    """Return the terminal's lines; None for a file or a pipe."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines or None
    except (OSError, ValueError):
        return None


def _width(sign: str) -> int:
    if sign.isascii():
        return 1
    from unicodedata import combining, east_asian_width

    return 0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1
