"""The controller's log lines: to the journal by way of standard error, with fields. A line that
journald cannot take now is kept with the journal's entries, and written later."""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.text import one_line
from nomarr_systemd.systemd.journal_socket import JournalSocket

ERROR: Final = 3
_MAX_FIELD: Final = 500
_NAME: Final = "nomarr-controller"
_late: list[JournalSocket] = []  # at most one: where lines are kept


def never_wait(late: JournalSocket) -> None:
    """Keep lines in ``late`` while standard error takes none: a journald that hangs must not delay
    a restart."""
    os.set_blocking(2, False)
    _late[:] = [late]


def log(priority: int, text: str, **fields: object) -> None:
    """Write one line; what is not printable is escaped, what is long is cut."""
    said = "".join(f" {name}={one_line(str(value), _MAX_FIELD)}" for name, value in fields.items())
    line = one_line(text) + said
    keep = any(late.has_kept() for late in _late)
    if not keep:
        try:
            os.write(2, f"<{priority}>{_NAME}: {line}\n".encode("utf-8", "replace"))
        except BlockingIOError:
            keep = True
        except OSError:
            return  # standard error is closed
    if keep:
        for late in _late:
            late.send({"MESSAGE": line, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": _NAME})
