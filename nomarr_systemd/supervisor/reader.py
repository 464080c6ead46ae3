"""Reading the workers' pipes: edge-triggered, fair, to the end. What the bytes mean, and what an
end means, is told to others.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from functools import partial
from typing import Final

from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Worker

PIPE_BYTES: Final = 65_536  # a pipe's size: a read of all of it ends where a line ends


class Reader:
    """``take(worker, bytes)`` gets what is read, ``at_end(worker)`` is told that no writer is
    left, ``before(worker)`` is asked before anything is read that epoll announced."""

    def __init__(
        self,
        loop: Loop,
        *,
        take: Callable[[Worker, bytes], None],
        at_end: Callable[[Worker], None],
        before: Callable[[Worker], None],
    ) -> None:
        self._loop = loop
        self._take = take
        self._at_end = at_end
        self._before = before

    def watch(self, worker: Worker) -> None:
        """Level-triggered epoll would spin on a pipe without a writer."""
        mask = select.EPOLLIN | select.EPOLLET
        self._loop.watch(worker.fd, mask, partial(self._be_ready, worker))

    def forget(self, worker: Worker) -> int:
        """The file descriptor, now the caller's to close."""
        fd, worker.fd = worker.fd, -1
        self._loop.forget(fd)
        return fd

    def drain(self, worker: Worker, reads: int) -> None:
        """Take what lies in the pipe now, but no more than that many reads of it."""
        for _ in range(reads):
            try:
                chunk = os.read(worker.fd, PIPE_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            self._take(worker, chunk)
        self._read_later(worker)

    def _be_ready(self, worker: Worker, events: int) -> None:
        if events & select.EPOLLHUP:
            worker.hung_up = True
        if not worker.queued:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        """One read; if there may be more, again after the others had theirs."""
        worker.queued = False
        if worker.fd < 0:
            return
        self._before(worker)
        try:
            chunk = os.read(worker.fd, PIPE_BYTES)
        except BlockingIOError:
            worker.hung_up = False
            return
        if not chunk:
            worker.hung_up = False
            self._at_end(worker)
            return
        self._take(worker, chunk)
        # Less than a pipe's size was all there was, and more will be announced again; but an end
        # that was announced already is not.
        if len(chunk) == PIPE_BYTES or worker.hung_up:
            self._read_later(worker)

    def _read_later(self, worker: Worker) -> None:
        if not worker.queued:
            worker.queued = True
            self._loop.soon(partial(self._read, worker))
