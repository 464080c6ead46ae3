"""History of workers' health, written by a thread: the loop sends samples and never waits.

If the store is slow or away, only samples are lost. SQLite is imported for the first sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.health_history import Sample, append
from nomarr_systemd.ledger.health_series import condense
from nomarr_systemd.ledger.record_archive import Archivist
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.supervisor.workers import Worker

_CONDENSE_EVERY_MS: Final = 600_000
_LEAVE_S: Final = 1.0

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
            worker.frame.line if worker.frame else b"",
        )
        for worker in workers
    ]


class Snapshots:
    """``offer`` from the loop; ``is_failing`` says whether the last write failed. ``public`` is
    the directory of published accounts, whose records are archived."""

    def __init__(self, public: str) -> None:
        self._public = public
        self.is_failing = False  # written by the thread, read by the loop
        self._handed: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # One limit each: many lines about a slow store must not suppress those about its errors.
        self._rate = RateLimit(burst=3, every_s=60)
        self._rate_slow = RateLimit(burst=1, every_s=60)

    def offer(self, settings: StoreSettings, samples: Sequence[Sample]) -> None:
        """Queue a batch to be written; skip it if the one before still waits."""
        if self._thread is None:
            # A daemon: a store that hangs must not delay the end of the program.
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()
        if self._handed.empty():
            self._handed.put((settings, samples))
        else:
            self._rate_slow.log(WARNING, "the history store is slow: a snapshot is left out")

    def close(self) -> None:
        """Let the thread finish, for a second at most."""
        if self._thread is not None:
            self._handed.put(None)
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        store: Store | None = None
        opened: StoreSettings | None = None
        condensed_ms = 0
        archivist = Archivist(self._public)
        while (batch := self._handed.get()) is not None:
            settings, samples = batch
            try:
                if store is None or settings != opened:
                    if store is not None:
                        store.close()
                    store, opened = open_work_store(settings), settings
                    archivist = Archivist(self._public, host_of(settings.url))
                append(store, samples, host_of(settings.url))
                archivist.run(store)
                now_ms = time.time_ns() // 1_000_000
                if now_ms // _CONDENSE_EVERY_MS != condensed_ms // _CONDENSE_EVERY_MS:
                    condense(store, now_ms, host_of(settings.url))
                    condensed_ms = now_ms
                if self.is_failing:
                    log(NOTICE, "the history store is back")
                self.is_failing = False
            except Exception as error:  # the thread's outermost loop; only this batch is lost
                self.is_failing = True
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._rate.log(
                    WARNING, "a history snapshot could not be written", error=error, hint=hint
                )
        if store is not None:
            store.close()
