"""The log of our programs: lines on standard error with a sentence and fields, and with a priority
if journald reads them. A log that is not read never blocks its writer: lines are kept, and written
later, in order.

``logging`` and the journal's own client would cost a resident program 1.5 MB, and each start of the
controller 10 ms. A worker's own process and the page use ``logging``, as their libraries do.
"""

from __future__ import annotations

import collections
import os
import select
import time
from _thread import allocate_lock  # threading would be a millisecond of each start
from collections.abc import Mapping
from typing import Final, Protocol

from nomarr_systemd.core.text import escape, quote

CRITICAL, ERROR, WARNING, NOTICE, INFO = 2, 3, 4, 5, 6
_MAX_FIELD: Final = 500
_MAX_LINE: Final = 4096  # bytes; a pipe or socket that is writable has room for that many
_MAX_KEPT: Final = 1000  # lines, 4 MB at most; then new ones are dropped and counted
_STDERR: Final = 2


class Keeper(Protocol):
    """Keeps lines as entries of the journal, for a program that may end before they are taken."""

    def has_kept(self) -> bool: ...

    def send(self, fields: Mapping[str, str]) -> None: ...


class _Output:
    """Standard error, written only if it is writable now."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._poll = select.poll()
        self._poll.register(_STDERR, select.POLLOUT)
        self._kept: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._name = ""
        self._keeper: Keeper | None = None

    def keep_in(self, keeper: Keeper, name: str) -> None:
        self._keeper, self._name = keeper, name

    def write(self, priority: int, line: str) -> None:
        with self._lock:
            self._flush()
            if self._keeper and (self._keeper.has_kept() or not self._poll.poll(0)):
                entry = {"MESSAGE": line, "PRIORITY": str(priority)}
                self._keeper.send(entry | {"SYSLOG_IDENTIFIER": self._name})
                return
            if len(self._kept) >= _MAX_KEPT:
                self._dropped += 1
            else:
                if self._dropped:
                    line += f" lines_dropped={self._dropped}"
                    self._dropped = 0
                mark = f"<{priority}>" if "JOURNAL_STREAM" in os.environ else ""
                text = f"{mark}{line}".encode(errors="replace")
                self._kept.append(text[: _MAX_LINE - 1] + b"\n")
            self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def drop_kept(self) -> None:
        self._kept.clear()
        self._dropped = 0

    def _flush(self) -> None:
        while self._kept:
            try:
                if not self._poll.poll(0):
                    return
                os.write(_STDERR, self._kept[0])
            except OSError:
                pass  # no reader, or no such descriptor: the program goes on without the line
            self._kept.popleft()


_output = _Output()


def keep_in(keeper: Keeper, name: str) -> None:
    """Give lines that standard error does not take to ``keeper``, as lines of the program
    ``name``."""
    _output.keep_in(keeper, name)


def flush() -> None:
    """Write the lines that could not be written before."""
    _output.flush()


def drop_kept() -> None:
    """Forget the lines that could not be written, in a child: its parent will write them."""
    _output.drop_kept()


def log(priority: int, message: str, /, **fields: object) -> None:
    """Write one line; what is not printable is escaped, what is long is cut. Each field that is not
    empty is ``name=value``."""
    parts = [escape(message)]
    for name, value in fields.items():
        text = str(value)[:_MAX_FIELD]
        if text:
            parts.append(f"{name}={quote(text) if ' ' in text else escape(text)}")
    _output.write(priority, " ".join(parts))


def log_error(error: Exception, **fields: object) -> None:
    """Write what an error says, and its hint."""
    log(ERROR, str(error), **fields, hint=getattr(error, "hint", ""))


class RateLimit:
    """Writes at most ``burst`` lines at once and one more each ``every_s``; a line that follows
    has the number of those that were left out."""

    def __init__(self, *, burst: int = 20, every_s: float = 1.0) -> None:
        self._burst = burst
        self._every_s = every_s
        self._room = float(burst)
        self._at = time.monotonic()
        self._left_out = 0

    def log(self, priority: int, message: str, /, **fields: object) -> None:
        now = time.monotonic()
        self._room = min(self._burst, self._room + (now - self._at) / self._every_s)
        self._at = now
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        if self._left_out:
            fields["lines_left_out"] = self._left_out
            self._left_out = 0
        log(priority, message, **fields)
