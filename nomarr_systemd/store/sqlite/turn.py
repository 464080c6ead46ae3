"""Turns of the processes that write one SQLite file: a transaction has the turn from its beginning
to its end.

A process that waits asks the kernel for one lock, and not SQLite, which would read the file each
time, and could not begin its log anew while others read it: then each commit would write to the
disk three times. And it is woken when the turn is free: if those that wait slept for a while, all
of them would be asleep for a part of the time, and the process that has just committed would often
be the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import time
from typing import Final

from nomarr_systemd.host.files import share

_LONGEST_S: Final = 0.05  # without a wakeup: a process that is killed in its turn sends none
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ALL: Final = 1 << 16  # bytes: a FIFO has no more


class Turn:
    """A FIFO beside one database: the process that has locked it has the turn. A byte in it wakes
    the process that has waited for longest.

    It is advisory: a process that has waited until ``deadline`` (by ``time.monotonic``), or may not
    use the file, continues: only SQLite's own lock counts.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._epoll: select.epoll | None = None

    def take(self, deadline: float) -> bool:
        """Wait until no other process has it; False if that took too long."""
        try:
            epoll = self._epoll or self._open()
            return self._lock() or self._wait(epoll, deadline)
        except OSError:
            self.close()
            return False

    def leave(self) -> None:
        """Let others have it, and wake the next. One that gave up may have read the byte that was
        meant for another."""
        if self._fd != -1:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):  # full: who waits next finds a byte in it
                os.write(self._fd, b".")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _open(self) -> select.epoll:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        self._fd = os.open(self._path, _FLAGS)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "not a FIFO")
        share(self._fd, os.path.dirname(self._path))
        self._epoll = select.epoll()
        return self._epoll

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self, epoll: select.epoll, deadline: float) -> bool:
        """Wait behind all processes that wait already. One that does not wait may still be faster,
        but takes nobody's place. A byte may have been written before, for nobody."""
        epoll.register(self._fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                if epoll.poll(min(left_s, _LONGEST_S)):
                    with contextlib.suppress(BlockingIOError):  # another process has read it
                        os.read(self._fd, _ALL)
                if self._lock():
                    return True
            return False
        finally:
            epoll.unregister(self._fd)
