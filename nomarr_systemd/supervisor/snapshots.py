"""History of workers' health, written by a thread: the loop sends samples and never waits.

While the store is slow or away, a bounded number of samples waits: the oldest are dropped first,
and counted. SQLite is imported for the first sample.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError, StoreRefused, StoreUnavailable
from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.health_history import Sample, append
from nomarr_systemd.ledger.health_series import condense
from nomarr_systemd.ledger.shared_archive import Archivist
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.work_store import open_bounded
from nomarr_systemd.supervisor.workers import Worker

_CONDENSE_EVERY_MS: Final = 600_000
_LEAVE_S: Final = 1.0
_MAX_WAITING: Final = 20_000  # samples; each has a frame of up to 4 kB

Batch = tuple[StoreSettings, Sequence[Sample]]


def take_samples(workers: Iterable[Worker]) -> list[Sample]:
    """The present state of every worker."""
    wall_ms = time.time_ns() // 1_000_000
    return [
        Sample(
            worker.component_id,
            wall_ms,
            worker.status,
            worker.invocation,
            worker.state.misses,
            worker.state.late,
            worker.drops,
            worker.disagreement,
            worker.line,
        )
        for worker in workers
    ]


class Waiting:
    """Batches that are not written yet, for two threads. The oldest go when there are too many."""

    def __init__(self, most: int = _MAX_WAITING) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._samples = 0
        self._dropped = 0
        self._put = self._seen = 0  # batches
        self._is_closed = False

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._put += 1
            self._samples += len(batch[1])
            while self._samples > self._most and len(self._batches) > 1:
                self._dropped += self._remove()
            self._changed.notify()

    def first(self) -> Batch | None:
        """The oldest batch, which stays; waits for one. None at the end, when all are written."""
        with self._changed:
            while not self._batches and not self._is_closed:
                self._changed.wait()
            self._seen = self._put
            return self._batches[0] if self._batches else None

    def wait_for_more(self) -> bool:
        """Wait until a batch is put after the last call of ``first``; False at the end."""
        with self._changed:
            while self._put == self._seen and not self._is_closed:
                self._changed.wait()
            return not self._is_closed

    def done(self, batch: Batch) -> None:
        """Remove a batch that was written. If it was dropped meanwhile, it is not lost."""
        with self._changed:
            if self._batches and self._batches[0] is batch:
                self._remove()
            else:
                self._dropped -= len(batch[1])

    def give_up(self, batch: Batch) -> None:
        """Drop a batch that cannot be written, unless that has happened already."""
        with self._changed:
            if self._batches and self._batches[0] is batch:
                self._dropped += self._remove()

    def take_dropped(self) -> int:
        """The number of samples dropped since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _remove(self) -> int:
        size = len(self._batches.popleft()[1])
        self._samples -= size
        return size


class Snapshots:
    """``offer`` from the loop; ``is_failing`` says whether the last write failed. ``public`` is
    the directory of published accounts, which hosts that share a store copy there."""

    def __init__(self, public: str) -> None:
        self._public = public
        self.is_failing = False  # written by the thread, read by the loop
        self._waiting = Waiting()
        self._thread: threading.Thread | None = None
        self._rate = RateLimit(burst=3, every_s=60)

    def offer(self, settings: StoreSettings, samples: Sequence[Sample]) -> None:
        """Queue a batch to be written."""
        if self._thread is None:
            # A daemon: a store that hangs must not delay the end of the program.
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()
        self._waiting.put((settings, samples))

    def close(self) -> None:
        """Let the thread finish, for a second at most."""
        if self._thread is not None:
            self._waiting.close()
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        store: Store | None = None
        opened: StoreSettings | None = None
        condensed_ms = 0
        archivist: Archivist | None = None
        while (batch := self._waiting.first()) is not None:
            settings, samples = batch
            try:
                host = host_of(settings)
                if store is None or settings != opened:
                    if store is not None:
                        store.close()
                    store, opened = open_bounded(settings), settings
                    archivist = Archivist(self._public, host) if host else None
                append(store, samples, host)
                self._waiting.done(batch)
                if archivist is not None:
                    archivist.run(store)
                now_ms = time.time_ns() // 1_000_000
                if now_ms // _CONDENSE_EVERY_MS != condensed_ms // _CONDENSE_EVERY_MS:
                    condense(store, now_ms, host)
                    condensed_ms = now_ms
                if not host:  # SQLite: a connection that rests takes a quarter of a megabyte
                    store.close()
                    store = None
                self._tell_back()
            except (StoreUnavailable, StoreRefused) as error:
                self._complain(error, error.hint)
                if not self._waiting.wait_for_more():  # then all that wait are tried again
                    break
            except Exception as error:  # the thread's outermost loop; only this batch is lost
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._complain(error, hint)
                self._waiting.give_up(batch)
        if store is not None:
            store.close()

    def _tell_back(self) -> None:
        dropped = self._waiting.take_dropped()
        if self.is_failing:
            log(NOTICE, "the history store is back", dropped_samples=dropped)
        elif dropped:
            log(WARNING, "the history store is slow: the oldest samples are dropped", count=dropped)
        self.is_failing = False

    def _complain(self, error: Exception, hint: str) -> None:
        self.is_failing = True
        self._rate.log(WARNING, "a history snapshot could not be written", error=error, hint=hint)
