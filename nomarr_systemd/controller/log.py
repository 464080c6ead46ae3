"""The controller's log lines: to the journal by way of standard error, with fields."""

from __future__ import annotations

import sys
from typing import Final

ERROR: Final = 3
NOTICE: Final = 5


def log(priority: int, text: str, **fields: object) -> None:
    """Write one line; what is not printable is escaped."""
    from nomarr_systemd.core.text import escape

    said = "".join(f" {name}={escape(str(value))}" for name, value in fields.items())
    sys.stderr.write(f"<{priority}>nomarr-controller: {escape(text)}{said}\n")
