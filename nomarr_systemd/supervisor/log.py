"""Lines on standard error, as the journal takes them: priority, a sentence, fields behind it.

``logging`` and the journal's own client would cost a resident program 1.5 MB.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from nomarr_systemd.core.text import escape, quote

ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6
_MAX_FIELD: Final = 500


def log(priority: int, message: str, /, **fields: object) -> None:
    """One line. A field is ``name=value``, so that it can be searched for."""
    parts = [f"<{priority}>{escape(message)}"]
    for name, value in fields.items():
        text = str(value)[:_MAX_FIELD]
        parts.append(f"{name}={quote(text) if not text or ' ' in text else escape(text)}")
    # Nobody may be reading, or nobody fast enough: work goes on without the line.
    with contextlib.suppress(OSError):
        os.write(2, (" ".join(parts) + "\n").encode(errors="replace"))


class Limited:
    """At most ``burst`` lines at once and one more each ``every_s``; says how many it left out."""

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
