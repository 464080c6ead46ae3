"""The health machine: ``step`` by an event and ``tick`` by time return the next state and the
transitions that led to it.

Pure: it knows frames, silence and time (monotonic seconds), but no worker, process, pipe or
database. ``TABLE`` is the machine; each function above it is one cell (docs/contract.md). When a
worker was heard last is not part of its state, so most frames do not change that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from nomarr_systemd.core.named_tuple import NamedTuple


class HealthRules(NamedTuple):
    """``[health]``: intervals and limits of workers and supervisor."""

    frame_interval_s: float = 2.5
    startup_timeout_s: float = 60.0
    staleness_interval_s: float = 5.0
    max_misses: int = 3
    min_recovery_s: float = 5.0
    max_recovery_s: float = 120.0
    max_unhealthy_s: float = 0.0
    stall_timeout_s: float = 300.0
    snapshot_interval_s: float = 30.0
    gpu_health_max_age_s: float = 60.0


class Event(Protocol):
    """A frame, whose kind is its status, or a signal."""

    @property
    def kind(self) -> str: ...

    @property
    def recover_for_s(self) -> float | None: ...


class Signal(NamedTuple):
    """An event that is no frame."""

    kind: str
    recover_for_s: float | None = None


REGISTERED: Final = Signal("registered")  # systemd shows a new invocation of the unit
NOISE: Final = Signal("noise")  # a line came that is not a valid frame
STOP_REQUESTED: Final = Signal("stopping")  # as if the worker had said so
EOF_GONE: Final = Signal("eof-gone")  # the pipe ended and the main process is gone
SET_FAILED: Final = Signal("set-failed")
RESET: Final = Signal("reset")


class State(NamedTuple):
    """The state of one worker's health. It was heard last when it registered or sent a frame."""

    status: str = "unregistered"
    misses: int = 0  # staleness intervals since it was heard that passed in silence
    stopping: bool = False  # after a stopping frame or a stop request: silence is no longer judged
    noise: bool = False  # lines came since it was heard, but no valid frame
    by_frames: bool = False  # unhealthy because of its frames, not of silence
    unhealthy_since: float | None = None  # because of its frames; like the next one
    recovery_since: float | None = None  # only a healthy frame or a new run clears it
    recover_until: float = 0.0
    late: int = 0  # frames that came after death
    cause: str = ""  # of death: one of core.death.LABELS, or pipe-closed


class Transition(NamedTuple):
    """A change of status; ``context`` is the cause of a death."""

    old: str
    new: str
    context: str


class Sample(NamedTuple):
    """One worker at one moment. ``line`` is its last frame, decoded only when it is written."""

    component_id: str
    wall_ms: int
    status: str
    invocation: str
    misses: int
    late: int
    drops: int
    disagreement: str
    line: bytes


# The statuses as the owner contract and the health decision name them (docs/contract.md).
REPORTED: Final[Mapping[str, str]] = {
    "unregistered": "pending",
    "pending": "pending",
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "recovering": "unhealthy",
    "dead": "unhealthy",
    "failed": "failed",
}
DECISION: Final[Mapping[str, str]] = {
    "unregistered": "Unknown",
    "pending": "Unknown",
    "healthy": "Healthy",
    "unhealthy": "Degraded",
    "recovering": "Degraded",
    "dead": "Unhealthy",
    "failed": "Unhealthy",
}

_HEALTHY: Final = State("healthy")
_HEALTHY_STOPPING: Final = State("healthy", stopping=True)


def step(
    state: State, event: Event, now: float, rules: HealthRules
) -> tuple[State, tuple[Transition, ...]]:
    """The next state after an event, and the transition to it, if the status has changed."""
    after = TABLE[state.status][event.kind](state, event, now, rules)
    if after is state or after.status == state.status:
        return after, ()
    return after, (Transition(state.status, after.status, after.cause),)


def tick(
    state: State, heard_at: float, now: float, rules: HealthRules
) -> tuple[State, tuple[Transition, ...]]:
    """The next state after time has passed. A late tick may cause several transitions, such as to
    unhealthy and then to dead."""
    transitions = []
    while (after := _pass_time(state, heard_at, now, rules)) is not state:
        if after.status != state.status:
            transitions.append(Transition(state.status, after.status, after.cause))
        state = after
    return state, tuple(transitions)


def deadline(state: State, heard_at: float, rules: HealthRules) -> float | None:
    """When a tick will change the state, if no event comes before; None: never."""
    if state.stopping:
        return None
    match state.status:
        case "pending":
            return heard_at + rules.startup_timeout_s
        case "recovering":
            return state.recover_until
        case "healthy" | "unhealthy":
            stale = heard_at + (state.misses + 1) * rules.staleness_interval_s
            if state.by_frames and state.unhealthy_since is not None and rules.max_unhealthy_s:
                return min(stale, state.unhealthy_since + rules.max_unhealthy_s)
            return stale
        case _:
            return None


def _pass_time(state: State, heard_at: float, now: float, rules: HealthRules) -> State:
    """Make at most one change."""
    due = deadline(state, heard_at, rules)
    if due is None or now < due:
        return state
    if state.status == "pending":
        return _die(state, "invalid-heartbeat" if state.noise else "startup-timeout")
    if state.status == "recovering":
        return _die(state, "recovery-timeout")
    if due < heard_at + (state.misses + 1) * rules.staleness_interval_s:
        return _die(state, "unhealthy-too-long")
    misses = state.misses + 1
    if misses >= rules.max_misses:
        return _die(state, "invalid-heartbeat" if state.noise else "stale")
    return state._replace(status="unhealthy", misses=misses)


def _die(state: State, cause: str) -> State:
    return State("dead", state.misses, cause=cause)


Cell = Callable[[State, Event, float, HealthRules], State]


def _ignore(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state


def _register(_state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State("pending")


def _become_healthy(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return _HEALTHY_STOPPING if state.stopping else _HEALTHY


def _become_unhealthy(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return State(
        "unhealthy",
        stopping=state.stopping,
        by_frames=True,
        unhealthy_since=now if state.unhealthy_since is None else state.unhealthy_since,
        recovery_since=state.recovery_since,
    )


def _become_pending(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State(
        "pending",
        stopping=state.stopping,
        unhealthy_since=state.unhealthy_since,
        recovery_since=state.recovery_since,
    )


def _become_recovering(state: State, event: Event, now: float, rules: HealthRules) -> State:
    """No frame moves the deadline beyond max_recovery_s after the recovery began."""
    asked = rules.max_recovery_s if event.recover_for_s is None else event.recover_for_s
    granted = min(max(asked, rules.min_recovery_s), rules.max_recovery_s)
    since = now if state.recovery_since is None else state.recovery_since
    return State(
        "recovering",
        stopping=state.stopping,
        unhealthy_since=state.unhealthy_since,
        recovery_since=since,
        recover_until=min(now + granted, since + rules.max_recovery_s),
    )


def _live_on(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state._replace(misses=0, noise=False)


def _stop(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state._replace(misses=0, noise=False, stopping=True)


def _hear_noise(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state if state.noise else state._replace(noise=True)


def _count_late(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state._replace(late=state.late + 1)


def _lose_process(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    if state.stopping:
        return State()
    return _die(state, "pipe-closed")


def _fail(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State("failed", cause=state.cause)


def _forget(_state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State()


# The machine: status → event → function. A frame is listed by its status.
_LIVING: Final[Mapping[str, Cell]] = {
    "registered": _register,
    "pending": _become_pending,
    "healthy": _become_healthy,
    "unhealthy": _become_unhealthy,
    "recovering": _become_recovering,
    "stopping": _stop,
    "noise": _hear_noise,
    "eof-gone": _lose_process,
    "set-failed": _fail,
    "reset": _ignore,
}
_IGNORED: Final[Mapping[str, Cell]] = dict.fromkeys(_LIVING, _ignore)
TABLE: Final[Mapping[str, Mapping[str, Cell]]] = {
    "unregistered": {
        **_IGNORED,
        "registered": _register,
        "set-failed": _fail,
    },
    "pending": _LIVING,
    "healthy": _LIVING,
    "unhealthy": _LIVING,
    # Its deadline does not move: loading again does not extend a recovery.
    "recovering": {**_LIVING, "pending": _live_on},
    "dead": {
        **_IGNORED,
        "registered": _register,
        "pending": _count_late,
        "healthy": _count_late,
        "unhealthy": _count_late,
        "recovering": _count_late,
        "stopping": _count_late,
        "set-failed": _fail,
    },
    "failed": {**_IGNORED, "reset": _forget},
}
