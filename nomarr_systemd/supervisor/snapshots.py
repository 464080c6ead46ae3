"""History, written by a thread of its own: the loop hands over samples and never waits.

A store that is slow or away costs samples, nothing else. SQLite is imported with the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.ledger.health_history import Sample, append, prune
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.log import NOTICE, WARNING, Limited, log
from nomarr_systemd.supervisor.workers import Worker

_PRUNE_EVERY_MS: Final = 3_600_000
_LEAVE_S: Final = 1.0

Batch = tuple[StoreSettings, Sequence[Sample]]


def take_samples(workers: Iterable[Worker]) -> list[Sample]:
    """Every worker as it is now."""
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


class Snapshots:
    """``offer`` from the loop; ``failing`` says whether the last write failed."""

    def __init__(self) -> None:
        self.failing = False
        self.lost = 0  # batches that found the writer still busy with the one before
        self._handed: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # One each: a slow store is said often, and must not keep what is wrong with it unsaid.
        self._limited = Limited(burst=3, every_s=60)
        self._limited_slow = Limited(burst=1, every_s=60)

    def offer(self, settings: StoreSettings, samples: Sequence[Sample]) -> None:
        """Have a batch written, unless the one before still waits."""
        if self._thread is None:
            # A daemon: a store that hangs must not hold up our end.
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()
        if self._handed.empty():
            self._handed.put((settings, samples))
        else:
            self.lost += 1
            self._limited_slow.log(WARNING, "the history store is slow: a snapshot is left out")

    def close(self) -> None:
        """Let the writer finish, but do not wait for long."""
        if self._thread is not None:
            self._handed.put(None)
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        store: Store | None = None
        opened: StoreSettings | None = None
        pruned_ms = 0
        while (batch := self._handed.get()) is not None:
            settings, samples = batch
            try:
                if store is None or settings != opened:
                    if store is not None:
                        store.close()
                    store, opened = open_work_store(settings), settings
                append(store, samples)
                now_ms = time.time_ns() // 1_000_000
                if now_ms - pruned_ms > _PRUNE_EVERY_MS:
                    prune(store, now_ms)
                    pruned_ms = now_ms
                if self.failing:
                    log(NOTICE, "the history store is back")
                self.failing = False
            except Exception as error:  # the thread's outermost loop; only this batch is lost
                self.failing = True
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._limited.log(
                    WARNING, "a history snapshot could not be written", error=error, hint=hint
                )
        if store is not None:
            store.close()
