"""Precedence to begin a transaction on a SQLite file that many processes write.

SQLite lets the process that asks first after a commit begin the next transaction: nearly always the
one that has just committed. That is fast, but others may starve. So one that has waited for
long locks a file beside the database, and all others wait until it has begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final

from nomarr_systemd.host.files import share

_RETRY_S: Final = 0.001


class Precedence:
    """The lock beside one database. It is advisory: a process that has waited until ``deadline``
    (by ``time.monotonic``), or may not use the file, continues: only SQLite's own lock counts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def give_way(self, deadline: float) -> None:
        """Wait while another process has precedence."""
        if self._lock(fcntl.LOCK_SH, deadline):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def taken(self, deadline: float) -> Iterator[None]:
        """Inside, no other process begins a transaction."""
        is_taken = self._lock(fcntl.LOCK_EX, deadline)
        try:
            yield
        finally:
            if is_taken and self._fd != -1:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)

    def _lock(self, kind: int, deadline: float) -> bool:
        try:
            if self._fd == -1:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._fd = os.open(self._path, flags, 0o600)
                share(self._fd, os.path.dirname(self._path))
            while True:
                try:
                    fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        return False
                time.sleep(_RETRY_S)
        except OSError:
            self.close()
            return False
