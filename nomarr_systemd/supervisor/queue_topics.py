"""The topics of queues and jobs on the live socket (docs/contract.md). Workers' frames show that
something changed; the settler's thread then reads the store, soon after a frame if there is a
subscriber, and every 30 s in any case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import BadDocument
from nomarr_systemd.core.frames import parse_fields
from nomarr_systemd.core.job import Doc, key_of
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs import queue, stats
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.settlement import failure_of
from nomarr_systemd.live.protocol import JOBS, QUEUES, Patterns, make_event, queue_topic
from nomarr_systemd.store.protocol import Store, walk
from nomarr_systemd.supervisor.job_settler import JobSettler
from nomarr_systemd.supervisor.live_connection import Subscribers
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.workers import Worker, Workers

SOON_S: Final = 0.5  # between two reads while there is a subscriber
SLOW_S: Final = 30.0
_MAX_NAMES: Final = 500
_LARGEST: Final = 1e15  # of a worker's figures
_MOST_SHOWN: Final = 32 << 20  # characters of all jobs that are shown at once
_COUNTED: Final = ("pending", "running", "completed", "errors", "quarantined")

States = dict[str, dict[str, Any]]


class Question(NamedTuple):
    """What to read."""

    config: Config
    is_slow: bool  # the figures are published in the store, too
    wants_jobs: bool
    lines: dict[str, bytes]  # the last frame of each worker
    names: tuple[tuple[str, str], ...]  # pool and job, as named in frames
    known: States  # the jobs that were running at the last read


class Look(NamedTuple):
    """What was read: each pool's queue, and the jobs that are running or have just ended."""

    queues: States
    running: States
    ended: list[dict[str, Any]]


class QueueTopics:
    """Everything but ``read`` happens in the loop."""

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
        self._loop.at(self._loop.now + SLOW_S, self._read_slowly)

    def _read(self, *, is_slow: bool = False) -> None:
        if self._config is None:
            return
        self._timer = None
        self._is_reading, self._is_stale = True, False
        question = Question(
            self._config,
            is_slow,
            self._subscribers.want(JOBS),
            {each.component_id: each.line for each in self._workers if each.line},
            tuple(self._names),
            self._running,
        )
        self._names = {}
        self._settler.ask(partial(read, question), self._take_look)

    def _take_look(self, look: Look) -> None:
        self._is_reading = False
        publish = self._subscribers.publish
        for pool, state in look.queues.items():
            if state != self._queues.get(pool):
                publish(make_event(queue_topic(pool), "queue_update", queue=state))
        if look.queues != self._queues:
            publish(make_event(QUEUES, "queue_update", queue=_sum(look.queues)))
        for key in look.running.keys() - self._running.keys():
            publish(make_event(JOBS, "job_update", job=look.running[key]))
        for job in look.ended:
            publish(make_event(JOBS, "job_update", job=job))
        self._queues, self._running = look.queues, look.running
        if self._is_stale:
            self.read_soon()


def read(question: Question, store: Store) -> Look:
    """Read the store; called in the settler's thread."""
    metrics = {name: _metrics(line) for name, line in question.lines.items()}
    pools = [pool.name for pool in question.config.pools]
    host = host_of(question.config.store)
    queues = {pool: _describe_queue(store, pool, metrics, host) for pool in pools}
    if question.is_slow:
        _publish(store, metrics, queues, host)
    running: States = {}
    ended: list[dict[str, Any]] = []
    if question.wants_jobs:
        room = _MOST_SHOWN
        for claim in walk(store, CLAIMS, {"host": host}):
            key = str(claim.get("job"))
            state = question.known.get(key) or _read_job(store, key)
            room -= len(key) + len(json.dumps(state))
            if room < 0:
                break
            running[key] = state
        named = {key_of(pool, job) for pool, job in question.names}
        for key in sorted((named | question.known.keys()) - running.keys()):
            state = _read_job(store, key)
            room -= len(json.dumps(state))
            if state and state["status"] != "running" and room > 0:
                ended.append(state)
    return Look(queues, {key: state for key, state in running.items() if state}, ended)


def _publish(store: Store, metrics: States, queues: States, host: str) -> None:
    with store.batch():
        for component_id, figures in metrics.items():
            if figures:
                stats.publish(store, component_id, figures, host)
        for pool, state in queues.items():
            stats.publish(store, f"queue:{pool}", state, host)


def _metrics(line: bytes) -> dict[str, Any]:
    """The numbers among a frame's metrics; those that a store or a sum could not hold are left
    out."""
    metrics = parse_fields(line).get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float)
        and abs(value) < _LARGEST
        and name[:1].isalpha()
        and len(name) <= 64
    }


def _describe_queue(store: Store, pool: str, metrics: States, host: str) -> dict[str, Any]:
    """Counts, the mean of the workers' average job times, and the estimated time left."""
    counts = queue.count(store, pool)
    mine = [each for name, each in metrics.items() if name.split(":")[1] == pool and each]
    times = [each["avg_time_s"] for each in mine if each.get("avg_time_s", 0) > 0]
    average = round(sum(times) / len(times), 3) if times else None
    left = counts["pending"] + counts["running"]
    return {
        "queue": pool,
        "pending": counts["pending"],
        "running": counts["running"],
        "completed": counts["done"],
        "errors": counts["error"],
        "quarantined": counts["quarantined"],
        "avg_time": average,
        "eta": round(left * average / len(times), 1) if average is not None else None,
        "failed": failure_of(store, pool, host),
    }


def _sum(queues: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All queues as one; its estimated time left is the longest of theirs."""
    times = [each["avg_time"] for each in queues.values() if each["avg_time"] is not None]
    ends = [each["eta"] for each in queues.values() if each["eta"] is not None]
    return {
        **{name: sum(each[name] for each in queues.values()) for name in _COUNTED},
        "avg_time": round(sum(times) / len(times), 3) if times else None,
        "eta": max(ends, default=None),
    }


def _read_job(store: Store, key: str) -> dict[str, Any]:
    try:
        doc: Doc | None = store.get(queue.JOBS, key)
    except BadDocument:  # a claim may name anything
        doc = None
    if doc is None:
        return {}
    return {
        "id": key,
        "pool": doc.get("pool"),
        "path": doc.get("path"),
        "status": doc.get("status"),
        "worker": doc.get("component_id"),
        "started_ms": doc.get("started_wall_ms"),
        "updated_ms": doc.get("updated_wall_ms"),
        "error": doc.get("error"),
        "results": doc.get("result"),
    }
