"""Every configured worker as the supervisor sees it: its pipe's decoder, its health, its last
frames. Frames and events go in, transitions come out; there is one armed deadline per worker.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.frames import PREFIX, Decoder, Frame
from nomarr_systemd.core.health import (
    NOISE,
    TICK,
    Event,
    HealthRules,
    State,
    Transition,
    deadline,
    step,
)
from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor.frame_ring import BlackBox
from nomarr_systemd.supervisor.loop import Loop

WORDS: Final = {
    "unregistered": "stopped",
    "pending": "starting",
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "recovering": "recovering",
    "dead": "crashed",
    "failed": "failed",
}
_GRAIN_S: Final = 0.25  # deadlines are kept to the next multiple of this, or of less
_RUNNING: Final = ("pending", "healthy", "unhealthy", "recovering")


class Run(NamedTuple):
    """A run that has ended: what the controller may still ask about it."""

    invocation: str
    label: str  # the supervisor's word, if it ended the run itself
    job: str | int | None  # the job in hand
    cause: str


class Crash(NamedTuple):
    """The last death that is known of."""

    wall_ms: int
    error: str
    invocation: str
    decision: str = ""


class Worker:
    """One worker. ``fd`` is its pipe, ``invocation`` the run that systemd shows, if any."""

    __slots__ = (
        "armed", "box", "component", "component_id", "crash", "decoder", "disagreement",
        "drops", "ended", "fd", "frames", "hung_up", "invocation", "label", "line", "order",
        "queued", "shown", "state",
    )  # fmt: skip

    def __init__(self, component: Component, fd: int, order: int) -> None:
        self.component = component
        self.component_id = component.component_id
        self.fd = fd
        self.order = order  # never given twice: who subscribes is shown workers in this order
        self.decoder = Decoder(self.component_id)
        self.state = State(self.component_id)
        self.box = BlackBox()
        self.line = b""  # the last frame of this run
        self.frames = 0  # in this run
        self.drops = 0
        self.invocation = ""
        self.label = ""  # why the supervisor ends this run, once it does
        self.ended: Run | None = None
        self.crash: Crash | None = None
        self.disagreement = ""
        self.armed: float | None = None
        self.queued = False  # a read is due after the others had theirs
        self.hung_up = False
        self.shown: tuple[Any, ...] | None = None  # what subscribers saw last

    @property
    def status(self) -> str:
        """The public word for its health."""
        if self.state.stopping and self.state.status in _RUNNING:
            return "stopping"
        return WORDS[self.state.status]

    def said(self) -> dict[str, Any]:
        """The fields of its last frame in this run."""
        fields: dict[str, Any] = json.loads(self.line[len(PREFIX) :]) if self.line else {}
        return fields

    def describe(self) -> dict[str, Any]:
        """What everyone may know (DESIGN §13)."""
        said = self.said()
        crash = self.crash
        return {
            "component": self.component_id,
            "id": self.component.number,
            "queue_type": self.component.pool,
            "status": self.status,
            "pid": said.get("pid"),
            "current_job": said.get("job"),
            "last_crash": crash
            and {
                "ts": crash.wall_ms,
                "error": crash.error,
                "worker_index": self.component.number,
                "invocation": crash.invocation,
                "decision": crash.decision,
            },
            "invocation": self.invocation,
            "phase": said.get("phase"),
            "seq": said.get("seq"),
            "misses": self.state.misses,
            "late": self.state.late,
            "drops": self.decoder.drops,
            "disagreement": self.disagreement,
            "progress_age_s": said.get("progress_age_s"),
        }


class Registry:
    """The workers by component id, in the order of their coming.

    ``on_change`` hears of transitions; ``before_tick`` is asked before time is held against a
    worker, to read what may still lie in its pipe.
    """

    def __init__(
        self,
        loop: Loop,
        rules: HealthRules,
        *,
        on_change: Callable[[Worker, tuple[Transition, ...]], None],
        before_tick: Callable[[Worker], None],
    ) -> None:
        self.rules = rules
        self.workers: dict[str, Worker] = {}
        self.by_unit: dict[str, Worker] = {}
        self._loop = loop
        self._on_change = on_change
        self._before_tick = before_tick
        self._orders = count()

    def add(self, component: Component, fd: int) -> Worker:
        worker = Worker(component, fd, next(self._orders))
        self.workers[worker.component_id] = worker
        self.by_unit[component.unit] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.component_id]
        del self.by_unit[worker.component.unit]
        worker.armed = None

    def has(self, worker: Worker) -> bool:
        """False for one that was removed, even if another has its name now."""
        return self.workers.get(worker.component_id) is worker

    def running(self) -> dict[str, str]:
        """The invocations that run now, by component id."""
        return {
            each.component_id: each.invocation for each in self.workers.values() if each.invocation
        }

    def feed(self, worker: Worker, chunk: bytes) -> list[Frame]:
        """Take bytes of a worker's pipe; never raises, whatever they are."""
        frames = worker.decoder.feed(chunk)
        if not frames:
            if sum(worker.decoder.drops.values()) != worker.drops:
                self.step(worker, NOISE)
            return frames
        worker.box.add([frame.line for frame in frames])
        worker.line = frames[-1].line
        worker.frames += len(frames)
        last: Event | None = None
        for frame in frames:
            # At one moment the same word again changes nothing; only the dead count each one.
            if frame.event is not last or worker.state.status == "dead":
                self.step(worker, frame.event)
                last = frame.event
        return frames

    def step(self, worker: Worker, event: Event) -> None:
        worker.state, transitions = step(worker.state, event, self._loop.now, self.rules)
        if transitions:
            self._on_change(worker, transitions)
        self.arm(worker)

    def arm(self, worker: Worker) -> None:
        """See that its deadline is not missed. One that moved later is found out when the
        armed one is over: frames must not cost a heap operation each. Deadlines that are close
        to each other share a moment, the later one: 2,000 workers must not cost a wakeup each."""
        due = deadline(worker.state, self.rules)
        if due is None:
            return
        due += -due % min(_GRAIN_S, self.rules.staleness_interval_s / 20)
        if worker.armed is None or due < worker.armed:
            worker.armed = due
            self._loop.at(due, functools.partial(self._be_due, worker, due))

    def _be_due(self, worker: Worker, when: float) -> None:
        if worker.armed != when:
            return  # an earlier one took its place
        worker.armed = None
        due = deadline(worker.state, self.rules)
        if due is not None and due <= self._loop.now:
            self._before_tick(worker)
            if self.has(worker):
                self.step(worker, TICK)
        else:
            self.arm(worker)
