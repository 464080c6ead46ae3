"""Events for subscribers about workers, crashes, frames and the system as a whole.

An event is made only if a subscriber wants it and it says something new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nomarr_systemd.core.frames import Frame
from nomarr_systemd.live.protocol import SYSTEM, frames_topic, make_event, status_topic
from nomarr_systemd.supervisor.live_connection import Subscribers
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Worker, Workers

_SHOWN = ("status", "pid", "current_job", "phase", "invocation", "disagreement", "last_crash")


class Announcer:
    """Reads workers and publishes. ``is_store_away`` is set by the supervisor."""

    def __init__(self, loop: Loop, workers: Workers, subscribers: Subscribers) -> None:
        self.is_store_away = False
        self._loop = loop
        self._workers = workers
        self._subscribers = subscribers
        self._system: dict[str, Any] = {}
        self._is_system_queued = False

    def tell_frames(self, worker: Worker, frames: Sequence[Frame]) -> None:
        """Publish frames at once: a kill of the supervisor loses those of one read at most."""
        topic = frames_topic(worker.component_id)
        if self._subscribers.want(topic):
            lines = [frame.line.decode() for frame in frames]
            self._subscribers.publish(make_event(topic, "frames", frames=lines), worker.order)
        self.tell_worker(worker)

    def tell_worker(self, worker: Worker) -> None:
        """Publish a worker's state if it differs from what was published before."""
        if not self._subscribers.connections:
            return
        topic = status_topic(worker.component_id)
        if self._subscribers.want(topic):
            described = worker.describe()
            shown = extract_shown(described)
            if shown != worker.shown:
                worker.shown = shown
                event = make_event(topic, "worker_update", worker=described)
                self._subscribers.publish(event, worker.order)
        self.tell_system_soon()

    def tell_crash(self, worker: Worker, cause: str) -> None:
        """Publish a death when it is seen, and again with the controller's cause and decision."""
        crash = worker.crash
        if self._subscribers.connections and crash:
            event = make_event(
                status_topic(worker.component_id),
                "worker:crash",
                worker=worker.describe(),
                cause=cause,
                invocation=crash.invocation,
                decision=crash.decision,
            )
            self._subscribers.publish(event, worker.order)

    def tell_system_soon(self) -> None:
        """Publish the system's state once for many changes: it depends on every worker."""
        if not self._is_system_queued and self._subscribers.want(SYSTEM):
            self._is_system_queued = True
            self._loop.soon(self._tell_system)

    def describe_system(self) -> dict[str, Any]:
        """Return the system's present state, and publish it if it has changed."""
        self._tell_system()
        return self._system

    def _tell_system(self) -> None:
        self._is_system_queued = False
        system = self._assess()
        if system != self._system:
            self._system = system
            self._subscribers.publish(make_event(SYSTEM, "system_update", system=system))

    def _assess(self) -> dict[str, Any]:
        """Return the state: healthy, degraded (a worker is not), or error (none of a pool is)."""
        pools: dict[str, bool] = {}
        is_whole = True
        for worker in self._workers:
            is_healthy = worker.status == "healthy"
            is_whole = is_whole and is_healthy
            pools[worker.component.pool] = pools.get(worker.component.pool, False) or is_healthy
        errors = [f"pool {pool} has no healthy worker" for pool in pools if not pools[pool]]
        if self.is_store_away:
            errors.append("the store cannot be written")
        status = "error" if errors else "healthy" if is_whole else "degraded"
        return {"status": status, "errors": errors}


def extract_shown(described: dict[str, Any]) -> tuple[Any, ...]:
    """The part of a worker's state whose changes are published."""
    return tuple(described[name] for name in _SHOWN)
