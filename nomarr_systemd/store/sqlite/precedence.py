"""Locks beside a SQLite file that many processes write.

Turn: a transaction has it from its beginning to its end. A process that waits for it asks the
kernel for one lock, and not SQLite, which would read the file each time, and could not begin its
log anew while others read it: then each commit would write to the disk three times.

Precedence: the process that asks first after a commit has the next turn, nearly always the one that
has just committed. That is fast, but others may starve. So one that has waited for
long has precedence, and all others wait until it has begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final

from nomarr_systemd.host.files import share

_FIRST_PAUSE_S: Final = 0.0002
_PAUSE_S: Final = 0.005


class FileLock:
    """A lock beside one database. It is advisory: a process that has waited until ``deadline`` (by
    ``time.monotonic``), or may not use the file, continues: only SQLite's own lock counts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def give_way(self, deadline: float) -> None:
        """Wait while another process has it."""
        if self._lock(fcntl.LOCK_SH, deadline):
            self.leave()

    @contextlib.contextmanager
    def taken(self, deadline: float) -> Iterator[None]:
        """Inside, no other process has it."""
        self.take(deadline)
        try:
            yield
        finally:
            self.leave()

    def take(self, deadline: float) -> bool:
        """Wait until no other process has it; False if that took too long."""
        return self._lock(fcntl.LOCK_EX, deadline)

    def leave(self) -> None:
        """Let others have it; does nothing if we do not have it."""
        if self._fd != -1:
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
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        return False
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _PAUSE_S)
        except OSError:
            self.close()
            return False
