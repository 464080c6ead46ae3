"""The controller's log lines: to the journal by way of standard error, with fields."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from nomarr_systemd.core.text import one_line

ERROR: Final = 3
NOTICE: Final = 5
_MAX_FIELD: Final = 500


def log(priority: int, text: str, **fields: object) -> None:
    """Write one line; what is not printable is escaped, what is long is cut."""
    said = "".join(f" {name}={one_line(str(value), _MAX_FIELD)}" for name, value in fields.items())
    line = f"<{priority}>nomarr-controller: {one_line(text)}{said}\n"
    with contextlib.suppress(OSError):  # a journald that hangs must not hold up a restart
        os.write(2, line.encode("utf-8", "replace"))
