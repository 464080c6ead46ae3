"""A bell between threads: a pipe, because ringing it takes no lock.

So it may be rung in a signal handler, and by the kernel's own (signal.set_wakeup_fd).
"""

from __future__ import annotations

import math
import os
import select
from contextlib import suppress


class Bell:
    """Many may ring it, one waits for it."""

    def __init__(self) -> None:
        self._heard, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self.fd, b"\0")

    def wait(self, seconds: float) -> bytes:
        """Until it is rung, or for that long; what it was rung with (signals: their numbers)."""
        if not self._poll.poll(None if seconds == math.inf else math.ceil(seconds * 1000)):
            return b""
        return os.read(self._heard, 4096)

    def close(self) -> None:
        os.close(self._heard)
        os.close(self.fd)
