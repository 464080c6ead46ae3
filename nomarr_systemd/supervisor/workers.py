"""Every configured worker as the supervisor sees it: its pipe's decoder, its health, its last
frames. ``take`` and ``step`` return transitions; what follows from them is decided in
supervisor.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from nomarr_systemd.core.frames import Decoder, Frame, parse_fields
from nomarr_systemd.core.health import (
    NOISE,
    REGISTERED,
    Event,
    HealthRules,
    State,
    Transition,
    deadline,
    step,
    tick,
)
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.live.protocol import PUBLIC_STATUS
from nomarr_systemd.supervisor.frame_ring import FrameRing
from nomarr_systemd.supervisor.loop import Loop

_GRAIN_S: Final = 0.25  # deadlines are rounded up to a multiple of this at most
# Workers whose frames are worth msgspec: its import takes 2 MB, and it saves 3 µs of each frame.
MANY: Final = 500
_DEFAULTS: Final = HealthRules()
_RUNNING: Final = ("pending", "healthy", "unhealthy", "recovering")


class Run(NamedTuple):
    """A run that has ended."""

    invocation: str
    label: str  # why the supervisor ended it; empty if it did not
    job: str | int | None  # the job of its last frame
    bad_line: str = ""  # the last line on its pipe that was no frame, and what is wrong with it


class Crash(NamedTuple):
    """The last known death of a worker."""

    wall_ms: int
    error: str
    invocation: str
    decision: str = ""


class Worker:
    """One worker. ``fd`` is its pipe, ``invocation`` the run that systemd shows, if any."""

    __slots__ = (
        "_said", "armed", "component", "component_id", "crash", "decoder", "disagreement", "drops",
        "ended", "fd", "frames", "heard_at", "invocation", "is_hung_up", "is_queued", "label",
        "line", "order", "progress_age_s", "ring", "rules", "shown", "state",
    )  # fmt: skip

    def __init__(
        self, component: Component, fd: int, order: int, rules: HealthRules, decoder: Decoder
    ) -> None:
        self.rules = rules  # its pool's
        self.component = component
        self.component_id = component.component_id
        self.fd = fd
        self.order = order  # unique for ever: subscribers are shown workers in this order
        self.decoder = decoder
        self.state = State()
        self.heard_at = 0.0  # when it registered, or a frame of this run came
        self.ring = FrameRing()
        self.invocation = ""
        self.line = b""  # the last frame of this run; empty: none came
        self._said: Mapping[str, Any] | None = None  # the fields of that, once they were asked for
        self.progress_age_s = 0.0  # in that
        self.frames = 0  # in this run
        self.label = ""  # why the supervisor ended this run; empty if it did not
        self.disagreement = ""
        self.drops = 0  # dropped lines that were logged
        self.ended: Run | None = None
        self.crash: Crash | None = None
        self.armed: float | None = None  # the deadline that a timer is set for
        self.is_queued = False  # a read of the pipe is due after other workers had theirs
        self.is_hung_up = False
        self.shown: tuple[Any, ...] | None = None  # what subscribers were sent last

    @property
    def status(self) -> str:
        """The public name of its health."""
        if self.state.stopping and self.state.status in _RUNNING:
            return "stopping"
        return PUBLIC_STATUS[self.state.status]

    @property
    def said(self) -> Mapping[str, Any]:
        """The fields of the last frame of this run."""
        if self._said is None:
            self._said = parse_fields(self.line) if self.line else {}
        return self._said

    @property
    def job(self) -> str | int | None:
        """The job of the last frame of this run."""
        return self.said.get("job")

    def begin(self, invocation: str) -> None:
        """Forget what belongs to the run before; an empty invocation means that none runs."""
        self.invocation = invocation
        self.label = self.disagreement = ""
        self.decoder.dropped = None
        self.line, self._said = b"", None
        self.progress_age_s = 0.0
        self.frames = 0

    @property
    def run(self) -> Run:
        """What is known of the present run."""
        return Run(self.invocation, self.label, self.job, self.decoder.describe_dropped())

    def find_run(self, invocation: str) -> Run | None:
        """The present run, or the last one that ended, if it is this one."""
        if invocation and invocation == self.invocation:
            return self.run
        return self.ended if self.ended and invocation == self.ended.invocation else None

    def keep(self, frames: Sequence[Frame]) -> None:
        """Keep frames for the black box, as those of the run that systemd shows."""
        lines = [frame.line for frame in frames]
        self.ring.add(lines, time.time_ns() // 1_000_000, self.invocation)

    def may_be_of_new_run(self, frames: Iterable[Frame]) -> bool:
        """Whether a run may have begun that is not known yet: no run is, the known one is dead, or
        a frame names another."""
        if not self.invocation or self.state.status == "dead":
            return True
        for frame in frames:  # noqa: SIM110 (any() would take three times as long)
            if frame.invocation and frame.invocation != self.invocation:
                return True
        return False

    def take_all(self, frames: Sequence[Frame], now: float) -> Sequence[Transition]:
        """Step the health machine by what was decoded last: frames, or noise if there are none."""
        if frames:
            return self.take(frames, now)
        if sum(self.decoder.drops.values()) != self.drops:
            return self.step(NOISE, now)
        return []

    def take(self, frames: Sequence[Frame], now: float) -> Sequence[Transition]:
        """Step the health machine by frames, and keep them. One that names another run than the
        present is late: it is counted and does not step the machine."""
        if frames:
            self.keep(frames)
        transitions: list[Transition] = []
        last: Frame | None = None
        late = 0
        for frame in frames:
            if frame.invocation and frame.invocation != self.invocation:
                late += 1
                continue
            self.state, changes = step(self.state, frame, now, self.rules)
            transitions += changes
            self.frames += 1
            last = frame
        if last:
            if self.state.status != "dead":
                self.heard_at = now
            self.line, self._said = last.line, None
            self.progress_age_s = last.progress_age_s
        if late:
            self.state = self.state._replace(late=self.state.late + late)
        return transitions

    def register(self, now: float) -> Sequence[Transition]:
        """A run has begun."""
        self.heard_at = now
        return self.step(REGISTERED, now)

    def step(self, event: Event, now: float) -> Sequence[Transition]:
        self.state, transitions = step(self.state, event, now, self.rules)
        return transitions

    def tick(self, now: float) -> Sequence[Transition]:
        self.state, transitions = tick(self.state, self.heard_at, now, self.rules)
        return transitions

    def describe(self) -> dict[str, Any]:
        """The worker's state in the form of the live socket (docs/contract.md)."""
        said = self.said
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
            "note": said.get("note"),
            "seq": said.get("seq"),
            "misses": self.state.misses,
            "late": self.state.late,
            "drops": self.decoder.drops,
            "disagreement": self.disagreement,
            "progress_age_s": said.get("progress_age_s"),
            "metrics": said.get("metrics"),
            "frames": self.frames,
            "frame_age_s": round(time.monotonic() - self.heard_at, 3) if self.line else None,
        }


class Workers:
    """The workers by component id, in the order in which they were added."""

    def __init__(self) -> None:
        self.by_id: dict[str, Worker] = {}
        self._orders = count()
        self._decoder: type[Decoder] = Decoder

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)

    def expect(self, number: int) -> None:
        """Decode the frames of workers that are added from now on with msgspec, if there are MANY
        and it is installed."""
        if number >= MANY:
            with contextlib.suppress(ImportError):
                from nomarr_systemd.core.typed_frames import TypedDecoder

                self._decoder = TypedDecoder

    def add(self, component: Component, fd: int, rules: HealthRules = _DEFAULTS) -> Worker:
        decoder = self._decoder(component.component_id)
        worker = Worker(component, fd, next(self._orders), rules, decoder)
        self.by_id[worker.component_id] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        del self.by_id[worker.component_id]
        worker.armed = None

    def is_last(self, worker: Worker) -> bool:
        """True if no other worker of the pool runs, has crashed or has failed."""
        return all(
            not each.invocation and each.state.status == "unregistered"
            for each in self
            if each.component.pool == worker.component.pool and each is not worker
        )

    def summarize(self) -> str:
        """One line for ``systemctl status``."""
        counts: dict[str, int] = {}
        for worker in self:
            counts[worker.status] = counts.get(worker.status, 0) + 1
        parts = ", ".join(f"{counts[word]} {word}" for word in sorted(counts))
        return f"{len(self)} workers" + (f": {parts}" if parts else "")


def split_frames(
    frames: Iterable[Frame], current: str, *, has_ended: bool
) -> tuple[list[Frame], list[Frame]]:
    """Frames of runs before the present one, and its own.

    One that names no run belongs to the run that has ended, if one has; else to the present one,
    except a stopping frame: that is of a run in between.
    """
    old: list[Frame] = []
    new: list[Frame] = []
    for frame in frames:
        if frame.invocation:
            is_new = frame.invocation == current
        else:
            is_new = bool(current) and not has_ended and frame.kind != "stopping"
        (new if is_new else old).append(frame)
    return old, new


class Deadlines:
    """The next deadline of each worker's health.

    A deadline that moved later is found when its timer fires, so that a frame does not set one.
    Deadlines that are close to each other share the later moment and its timer, so that 2,000
    workers do not cost a wakeup each.
    """

    def __init__(self, loop: Loop, on_due: Callable[[Worker], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._armed: dict[float, list[Worker]] = {}  # by moment

    def arm(self, worker: Worker) -> None:
        due = deadline(worker.state, worker.heard_at, worker.rules)
        if due is None:
            return
        due += -due % min(_GRAIN_S, worker.rules.staleness_interval_s / 20)
        if worker.armed is None or due < worker.armed:
            worker.armed = due
            if due not in self._armed:
                self._armed[due] = []
                self._loop.at(due, partial(self._fire, due))
            self._armed[due].append(worker)

    def _fire(self, when: float) -> None:
        for worker in self._armed.pop(when):
            if worker.armed != when:
                continue  # it has an earlier deadline, or was removed
            worker.armed = None
            due = deadline(worker.state, worker.heard_at, worker.rules)
            if due is not None and due <= self._loop.now:
                self._on_due(worker)
            else:
                self.arm(worker)
