"""What subscribers are told: changes of workers, crashes, frames, and the system as a whole.

Nothing is made that nobody wants, and nothing is told twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nomarr_systemd.core.frames import Frame
from nomarr_systemd.supervisor import live_server
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Registry, Worker


class News:
    """Looks at workers and tells ``live``. ``is_store_away`` is asked for the system's state."""

    def __init__(
        self,
        loop: Loop,
        registry: Registry,
        channel: live_server.Live,
        *,
        is_store_away: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._registry = registry
        self._live = channel
        self._is_store_away = is_store_away
        self._system: dict[str, Any] = {}
        self._system_queued = False

    def tell_frames(self, worker: Worker, frames: Sequence[Frame]) -> None:
        """What was read, at once: a kill may then cost one read, not more."""
        if not self._live.subscribers:
            return
        topic = live_server.frames_topic(worker)
        if self._live.wants(topic):
            lines = [frame.line.decode() for frame in frames]
            self._live.publish(live_server.make_event(topic, "frames", frames=lines), worker)
        self.tell_worker(worker)

    def tell_worker(self, worker: Worker) -> None:
        """If there is something new about it."""
        if not self._live.subscribers:
            return
        topic = live_server.status_topic(worker)
        if self._live.wants(topic):
            described = worker.describe()
            shown = live_server.essence(described)
            if shown != worker.shown:
                worker.shown = shown
                event = live_server.make_event(topic, "worker_update", worker=described)
                self._live.publish(event, worker)
        self.tell_system_soon()

    def tell_crash(self, worker: Worker, cause: str) -> None:
        """Told when it is seen, and again with the controller's cause and decision."""
        crash = worker.crash
        if self._live.subscribers and crash:
            event = live_server.make_event(
                live_server.status_topic(worker),
                "worker:crash",
                worker=worker.describe(),
                cause=cause,
                invocation=crash.invocation,
                decision=crash.decision,
            )
            self._live.publish(event, worker)

    def tell_system_soon(self) -> None:
        """Once for many changes: it takes a look at every worker."""
        if not self._system_queued and self._live.wants(live_server.SYSTEM):
            self._system_queued = True
            self._loop.soon(self._tell_system)

    def describe_system(self) -> dict[str, Any]:
        """As of now, also for those who subscribed before."""
        self._tell_system()
        return self._system

    def _tell_system(self) -> None:
        self._system_queued = False
        system = self._assess()
        if system != self._system:
            self._system = system
            self._live.publish(
                live_server.make_event(live_server.SYSTEM, "system_update", system=system)
            )

    def _assess(self) -> dict[str, Any]:
        """healthy, degraded (a worker is not healthy) or error (a pool has none that is)."""
        pools: dict[str, bool] = {}
        is_whole = True
        for worker in self._registry.workers.values():
            is_healthy = worker.status == "healthy"
            is_whole = is_whole and is_healthy
            pools[worker.component.pool] = pools.get(worker.component.pool, False) or is_healthy
        errors = [f"pool {pool} has no healthy worker" for pool in pools if not pools[pool]]
        if self._is_store_away():
            errors.append("the store cannot be written")
        status = "error" if errors else "healthy" if is_whole else "degraded"
        return {"status": status, "errors": errors}
