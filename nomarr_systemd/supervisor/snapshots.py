"""History of workers' health, as the loop sees it: which samples are not written yet. The store's
helper writes them (history_thread.py).

Every second batch is written with the one before it: a supervisor that is killed loses one. While
the store is slow or away, a bounded number of samples waits: the oldest are dropped first, and
counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.health import Sample
from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.store_process import StoreProcess, Taker, split
from nomarr_systemd.supervisor.workers import Worker

_MAX_WAITING: Final = 20_000  # samples; each has a frame of up to 4 kB
_TOGETHER: Final = 2  # batches that a helper is started for

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


def _encode(
    settings: StoreSettings, samples: Sequence[Sample], condensed_ms: int
) -> Iterator[Message]:
    for some in split(samples):
        yield ["samples", [(*sample[:-1], sample.line.decode()) for sample in some]]
    yield ["write", settings, condensed_ms]


class Waiting:
    """Batches that are not written yet. The oldest go when there are too many."""

    def __init__(self, most: int = _MAX_WAITING) -> None:
        self._most = most
        self._batches: deque[Batch] = deque()
        self._samples = 0
        self._dropped = 0

    def put(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._samples += len(batch[1])
        while self._samples > self._most and len(self._batches) > 1:
            self._dropped += self._remove()

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def first(self) -> Batch | None:
        """The oldest batch, which stays."""
        return self._batches[0] if self._batches else None

    def done(self, batch: Batch) -> None:
        """Remove a batch that was written. If it was dropped meanwhile, it is not lost."""
        if self.first() is batch:
            self._remove()
        else:
            self._dropped -= len(batch[1])

    def give_up(self, batch: Batch) -> None:
        """Drop a batch that cannot be written, unless that has happened already."""
        if self.first() is batch:
            self._dropped += self._remove()

    def take_dropped(self) -> int:
        """The number of samples dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _remove(self) -> int:
        size = len(self._batches.popleft()[1])
        self._samples -= size
        return size


class Snapshots:
    """``is_failing`` says whether the last write failed."""

    def __init__(self, process: StoreProcess) -> None:
        self.is_failing = False
        self._process = process
        self._waiting = Waiting()
        self._writing: Batch | None = None
        self._is_busy = False
        self._condensed_ms = 0
        self._rate = RateLimit(burst=3, every_s=60)
        takers: dict[str, Taker] = {
            "written": self._take_written,
            "tidied": self._take_end,
            "unwritten": self._take_failure,
        }
        process.add(self, takers)

    def offer(self, settings: StoreSettings, samples: Sequence[Sample]) -> None:
        """Queue a batch to be written. All that wait are tried again."""
        self._waiting.put((settings, samples))
        if self._process.is_up or len(self._waiting) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._is_busy:
            self._write_next()

    def is_busy(self) -> bool:
        return self._is_busy

    def resend(self) -> None:
        if self._writing is not None:
            self._process.send(_encode(*self._writing, self._condensed_ms))

    def lose(self) -> None:
        """A batch that is not written is for the next helper."""
        self._is_busy = self._writing is not None

    def _write_next(self) -> None:
        self._writing = self._waiting.first()
        self._is_busy = self._writing is not None
        self.resend()

    def _take_written(self) -> None:
        if self._writing is not None:
            self._waiting.done(self._writing)
            self._writing = None

    def _take_end(self, condensed_ms: int) -> None:
        self._condensed_ms = condensed_ms
        dropped = self._waiting.take_dropped()
        if self.is_failing:
            log(NOTICE, "the history store is back", dropped_samples=dropped)
        elif dropped:
            log(WARNING, "the history store is slow: the oldest samples are dropped", count=dropped)
        self.is_failing = False
        self._write_next()

    def _take_failure(self, is_away: bool, error: str, hint: str) -> None:
        """If the store is away, retry with the next batch; else only this one is lost."""
        self.is_failing = True
        self._rate.log(WARNING, "a history snapshot could not be written", error=error, hint=hint)
        batch, self._writing, self._is_busy = self._writing, None, False
        if not is_away:
            if batch is not None:
                self._waiting.give_up(batch)
            self._write_next()
