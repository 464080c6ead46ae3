"""A wakeup between threads: a pipe, because writing to it takes no lock.

It may be used in a signal handler and as signal.set_wakeup_fd.
"""

from __future__ import annotations

import math
import os
import select
from contextlib import suppress


class Wakeup:
    """Any thread may call ``wake``; one thread waits."""

    def __init__(self) -> None:
        self._heard, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: the waiter will wake up
            os.write(self.fd, b"\0")

    def wait(self, seconds: float) -> bytes:
        """Wait for ``wake``, ``seconds`` at most; return the bytes written (numbers of signals)."""
        if not self._poll.poll(None if seconds == math.inf else math.ceil(seconds * 1000)):
            return b""
        return os.read(self._heard, 4096)

    def close(self) -> None:
        os.close(self._heard)
        os.close(self.fd)
