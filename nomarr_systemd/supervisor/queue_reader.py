"""Reads the queues and the running jobs for the topics of the live socket (queue_topics.py), in the
store's helper.
"""

from __future__ import annotations

import json
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import BadDocument
from nomarr_systemd.core.frames import parse_fields
from nomarr_systemd.core.job import Doc, key_of
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs import queue, stats
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.settlement import failure_of
from nomarr_systemd.store.protocol import Store, walk

_LARGEST: Final = 1e15  # of a worker's figures
_MOST_SHOWN: Final = 32 << 20  # characters of all jobs that are shown at once

States = dict[str, dict[str, Any]]


class QueueReader:
    """Remembers the jobs that were running at the last read: they are not read again."""

    def __init__(self) -> None:
        self._running: States = {}

    def read(
        self, store: Store, config: Config, lines: dict[str, str], question: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state of each pool's queue; the keys of jobs that are running now, the states
        of those that the supervisor does not know, and of those that have ended since. ``lines``
        are the last frames of workers."""
        metrics = {name: _metrics(line.encode()) for name, line in lines.items()}
        host = host_of(config.store)
        queues = {
            pool.name: _describe_queue(store, pool.name, metrics, host) for pool in config.pools
        }
        if question["is_slow"]:
            _publish(store, metrics, queues, host)
        known = set(question["known"])
        running: States = {}
        ended: list[dict[str, Any]] = []
        if question["wants_jobs"]:
            room = _MOST_SHOWN
            for claim in walk(store, CLAIMS, {"host": host}):
                key = str(claim.get("job"))
                state = self._running.get(key) or _read_job(store, key)
                room -= len(key) + len(json.dumps(state))
                if room < 0:
                    break
                running[key] = state
            named = {key_of(pool, job) for pool, job in question["names"]}
            for key in sorted((named | known) - running.keys()):
                state = _read_job(store, key)
                room -= len(json.dumps(state))
                if state and state["status"] != "running" and room > 0:
                    ended.append(state)
        self._running = {key: state for key, state in running.items() if state}
        new = {key: state for key, state in self._running.items() if key not in known}
        return {"queues": queues, "running": list(self._running), "new": new, "ended": ended}


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
