"""The topics of queues and jobs on the live socket (docs/contract.md). Workers' frames show that
something changed; the store is then read (queue_reader.py), soon after a frame if there is a
subscriber, and every minute in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.live.protocol import JOBS, QUEUES, Patterns, make_event, queue_topic
from nomarr_systemd.supervisor.job_settler import JobSettler
from nomarr_systemd.supervisor.live_connection import Subscribers
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.workers import Worker, Workers

SOON_S: Final = 0.5  # between two reads while there is a subscriber
SLOW_S: Final = 60.0
_MAX_NAMES: Final = 500
_COUNTED: Final = ("pending", "running", "completed", "errors", "quarantined")

States = dict[str, dict[str, Any]]


class QueueTopics:
    """What is known of queues and jobs, and when they are read again."""

    def __init__(
        self, loop: Loop, settler: JobSettler, workers: Workers, subscribers: Subscribers
    ) -> None:
        self._loop = loop
        self._settler = settler
        self._workers = workers
        self._subscribers = subscribers
        self._config: Config | None = None
        self._queues: States = {}
        self._running: States = {}
        self._names: dict[tuple[str, str], None] = {}
        self._timer: Timer | None = None
        self._is_reading = self._is_stale = False

    def configure(self, config: Config) -> None:
        is_first = self._config is None
        self._config = config
        if is_first:
            self._read_slowly()

    def take_frames(self, worker: Worker) -> None:
        """Read the queue of the worker's pool soon: its frames may mean that it changed."""
        if not self._subscribers.want_queues():
            return
        job = worker.job
        if isinstance(job, str) and len(self._names) < _MAX_NAMES:
            self._names[worker.component.pool, job] = None
        self.read_soon()

    def show(self, patterns: Patterns) -> Iterator[dict[str, Any]]:
        """Snapshots for a new subscriber, as of the last read; a new read follows."""
        for pool, state in self._queues.items():
            if patterns.match(queue_topic(pool)):
                yield make_event(queue_topic(pool), "snapshot", queue=state)
        if patterns.match(QUEUES):
            yield make_event(QUEUES, "snapshot", queue=_sum(self._queues))
        if patterns.match(JOBS):
            yield make_event(JOBS, "snapshot", jobs=list(self._running.values()))
        self.read_soon()

    def read_soon(self) -> None:
        if self._config is None or not self._subscribers.want_queues():
            return
        if self._is_reading:
            self._is_stale = True
        elif self._timer is None:
            self._timer = self._loop.at(self._loop.now + SOON_S, self._read)

    def _read_slowly(self) -> None:
        if not self._is_reading:
            self._read(is_slow=True)
        self._loop.at_next(SLOW_S, self._read_slowly)

    def _read(self, *, is_slow: bool = False) -> None:
        if self._config is None:
            return
        self._timer = None
        self._is_reading, self._is_stale = True, False
        question = {
            "is_slow": is_slow,  # the figures are published in the store, too
            "wants_jobs": self._subscribers.want(JOBS),
            "names": tuple(self._names),  # pool and job, as named in frames
            "known": tuple(self._running),
        }
        self._names = {}
        lines = [(each.component_id, each.line) for each in self._workers if each.line]
        self._settler.look(question, lines, self._take_look)

    def _take_look(self, look: dict[str, Any]) -> None:
        self._is_reading = False
        publish = self._subscribers.publish
        queues: States = look["queues"]
        for pool, state in queues.items():
            if state != self._queues.get(pool):
                publish(make_event(queue_topic(pool), "queue_update", queue=state))
        if queues != self._queues:
            publish(make_event(QUEUES, "queue_update", queue=_sum(queues)))
        for job in (*look["new"].values(), *look["ended"]):
            publish(make_event(JOBS, "job_update", job=job))
        known = self._running | look["new"]
        self._queues = queues
        self._running = {key: known[key] for key in look["running"]}
        if self._is_stale:
            self.read_soon()


def _sum(queues: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All queues as one; its estimated time left is the longest of theirs."""
    times = [each["avg_time"] for each in queues.values() if each["avg_time"] is not None]
    ends = [each["eta"] for each in queues.values() if each["eta"] is not None]
    return {
        **{name: sum(each[name] for each in queues.values()) for name in _COUNTED},
        "avg_time": round(sum(times) / len(times), 3) if times else None,
        "eta": max(ends, default=None),
    }
