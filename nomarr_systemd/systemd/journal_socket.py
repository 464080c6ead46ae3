"""Sends entries to journald, and never waits for it: a journald that hangs must not hold up a
restart. An entry that it cannot take now is kept in a file and sent later, in order.

libsystemd would wait, and its import takes half of the controller's start.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

from nomarr_systemd.core.text import one_line
from nomarr_systemd.host.files import remove

_SOCKET: Final = "/run/systemd/journal/socket"
_KIND: Final = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
MAX_KEPT: Final = 20_000  # entries of about 1 kB; then new ones are dropped
_DROPPED: Final = "journald has not answered for long: entries are no longer kept, and are lost"


class JournalSocket:
    """``directory`` is where entries are kept: a file for each, named by time since boot. Several
    processes may use it at once; one that is killed may have sent an entry twice."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def send(self, fields: Mapping[str, str]) -> None:
        """Send an entry, or keep it if others are kept or journald cannot take it. Each value is
        made one printable line, so that no value can begin another field."""
        entry = "".join(f"{name}={one_line(value)}\n" for name, value in fields.items())
        if not self.flush() or not _transmit(entry):
            self._keep(entry)

    def flush(self) -> bool:
        """Send what is kept; True if nothing is kept any more."""
        for name in self._names():
            path = os.path.join(self._directory, name)
            try:
                with open(path, encoding="utf-8") as file:
                    entry = file.read()
            except OSError:
                continue  # another process has sent it
            if not _transmit(f"{entry}NOMARR_LATE_MS={_age_ms(name)}\n"):
                return False
            remove(path)
        return True

    def has_kept(self) -> bool:
        return bool(self._names())

    def _keep(self, entry: str) -> None:
        kept = len(self._names())
        if kept > MAX_KEPT:
            return
        if kept == MAX_KEPT:
            entry = f"MESSAGE={_DROPPED}\nPRIORITY=3\nSYSLOG_IDENTIFIER=nomarr-controller\n"
        with contextlib.suppress(OSError):  # a full /run: the ledger has all decisions
            os.makedirs(self._directory, 0o700, exist_ok=True)
            path = os.path.join(self._directory, f"{_boottime_ns():020}")
            with open(f"{path}.new", "x", encoding="utf-8") as file:
                file.write(entry)
            os.rename(f"{path}.new", path)

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._directory) if name.isdigit())
        except OSError:
            return []


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _age_ms(name: str) -> int:
    return (_boottime_ns() - int(name)) // 1_000_000


def _transmit(entry: str) -> bool:
    """Send an entry in journald's native protocol; False if journald does not read. Without a
    journald there is nothing to wait for."""
    with socket.socket(socket.AF_UNIX, _KIND) as link:
        try:
            link.sendto(entry.encode("utf-8", "replace"), _SOCKET)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True
