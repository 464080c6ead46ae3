"""The one subscription of this process to the live socket; it is renewed whenever it ends.

Events go to the broker. How long jobs took is noted on the way, for the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.json import get_objects
from nomarr_systemd.host.clock import wall_ms
from nomarr_systemd.live.client import NoSupervisor, Subscription
from nomarr_systemd.live.protocol import JOBS, QUEUES, SYSTEM, make_event
from nomarr_systemd.web.broker import Broker

TOPICS: Final = ("worker:*:status", "queue:*:status", QUEUES, JOBS, SYSTEM)
# Types of the events that this process itself publishes, on the topic of the system.
LOST: Final = "supervisor_lost"
BACK: Final = "supervisor_back"
_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 2.0
_MAX_SEEN: Final = 10_000  # workers

Sleep = Callable[[float], Awaitable[None]]
Read = Callable[[], Awaitable[list[dict[str, Any]] | None]]


@contextlib.contextmanager
def subscribed(path: str, topics: Sequence[str]) -> Iterator[Read]:
    """Yield a function that waits for events and returns them; None when the supervisor ends."""
    # Connecting to a Unix socket takes no time, or fails; a full backlog waits for 0.2 s.
    subscription = Subscription(path, topics, timeout_s=0.2)
    readable = asyncio.Event()

    async def read() -> list[dict[str, Any]] | None:
        await readable.wait()
        readable.clear()
        return subscription.read()

    loop = asyncio.get_running_loop()
    loop.add_reader(subscription.fileno(), readable.set)
    try:
        yield read
    finally:
        loop.remove_reader(subscription.fileno())
        subscription.close()


class JobSeen(NamedTuple):
    """A worker's job in hand, by its frames."""

    job: object
    invocation: object
    wall_ms: int
    is_start: bool  # it was seen to begin; else it began before


class Upstream:
    """``run`` until it is cancelled. ``is_connected`` says whether the supervisor answers."""

    def __init__(self, path: str, broker: Broker, *, sleep: Sleep = asyncio.sleep) -> None:
        self.is_connected = False
        self.lost = 0  # events that the supervisor dropped because this process was too slow
        self.on_job: Callable[[str, float], None] = lambda _pool, _seconds: None
        self.on_link: Callable[[], None] = lambda: None  # it is lost, or back
        self._path = path
        self._broker = broker
        self._sleep = sleep
        self._running: dict[str, int] = {}  # when each running job was begun
        self._seen: dict[str, JobSeen] = {}  # by component

    async def run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                await self._follow()
            except (NoSupervisor, OSError):
                pass
            except Exception:  # the outermost loop: an event may have any shape
                logging.exception("an event of the supervisor was not understood; asking again")
            if self.is_connected:
                self._set_connected(LOST)
            retry_s = _FIRST_RETRY_S if time.monotonic() - began > _LAST_RETRY_S else retry_s
            await self._sleep(retry_s)
            retry_s = min(retry_s * 2, _LAST_RETRY_S)

    def find_job(self, component_id: str, job: object) -> JobSeen | None:
        """Return what was seen of this job of a worker; None if it was seen with another one."""
        found = self._seen.get(component_id)
        return found if found and found.job is not None and str(found.job) == job else None

    async def _follow(self) -> None:
        """Pass events on until the supervisor closes the connection."""
        with subscribed(self._path, TOPICS) as read:
            self._broker.forget_states()
            self._running.clear()
            while (events := await read()) is not None:
                if events and not self.is_connected:
                    self._set_connected(BACK)
                for event in events:
                    self._take(event)

    def _set_connected(self, change: str) -> None:
        self.is_connected = change == BACK
        self.on_link()
        self._broker.publish(make_event(SYSTEM, change))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event.get("type") == "lost":
            self.lost += event["count"] if isinstance(event.get("count"), int) else 1
        worker = event.get("worker")
        if isinstance(worker, dict):
            self._see_job(worker, is_change=event.get("type") != "snapshot")
        job = event.get("job")
        for each in ([job] if isinstance(job, dict) else []) + get_objects(event, "jobs"):
            self._time_job(each)
        self._broker.publish(event)

    def _see_job(self, worker: Mapping[str, Any], *, is_change: bool) -> None:
        name, job, invocation = (worker.get(n) for n in ("component", "current_job", "invocation"))
        if not isinstance(name, str) or (name not in self._seen and len(self._seen) >= _MAX_SEEN):
            return
        before = self._seen.get(name)
        if before is None or before[:2] != (job, invocation):
            self._seen[name] = JobSeen(job, invocation, wall_ms(), is_change)

    def _time_job(self, job: Mapping[str, Any]) -> None:
        key, began, ended = str(job.get("id")), job.get("started_ms"), job.get("updated_ms")
        if job.get("status") == "running":
            self._running[key] = began if isinstance(began, int) else 0
        elif job.get("status") in ("done", "error") and isinstance(ended, int):
            start = self._running.pop(key, None)
            start = began if isinstance(began, int) else start
            if start and ended >= start:
                self.on_job(str(job.get("pool")), (ended - start) / 1000)
        else:
            self._running.pop(key, None)
