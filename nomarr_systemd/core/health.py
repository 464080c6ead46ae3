"""The health machine: ``step(state, event, now, rules)`` returns the next state and transitions.

Pure: it knows component ids, frames, silence and time (monotonic seconds), but no process, pipe or
database. ``TABLE`` is the machine; each function above it is one cell (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

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


class Event(NamedTuple):
    """A frame, by its status, or one of the constants below."""

    kind: str
    recover_for_s: float | None = None


REGISTERED: Final = Event("registered")  # systemd shows a new invocation of the unit
TICK: Final = Event("tick")  # time has passed
NOISE: Final = Event("noise")  # a line came that is not a valid frame
EOF_GONE: Final = Event("eof-gone")  # the pipe ended and the main process is gone
SET_FAILED: Final = Event("set-failed")
RESET: Final = Event("reset")


class State(NamedTuple):
    """The state of one worker's health."""

    component_id: str
    status: str = "unregistered"
    at: float = 0.0  # the last sign of life: its registration or a valid frame
    misses: int = 0  # staleness intervals since then that passed in silence
    stopping: bool = False  # after a stopping frame or a stop request: silence is no longer judged
    noise: bool = False  # lines came since ``at``, but no valid frame
    by_frames: bool = False  # unhealthy because of its frames, not of silence
    unhealthy_since: float | None = None  # because of its frames; like the next one
    recovery_since: float | None = None  # only a healthy frame or a new run clears it
    recover_until: float = 0.0
    late: int = 0  # frames that came after death
    cause: str = ""  # of death: one of core.death.LABELS, or pipe-closed


class Transition(NamedTuple):
    """A change of status; ``context`` is the cause of a death."""

    component_id: str
    old: str
    new: str
    context: str


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

_NOTHING: Final[tuple[Transition, ...]] = ()
_FRESH: Final = State("")[5:]  # all that a healthy frame resets
_new: Final = tuple.__new__


def step(
    state: State, event: Event, now: float, rules: HealthRules
) -> tuple[State, tuple[Transition, ...]]:
    """The next state, and the transitions that led to it."""
    status, kind = state.status, event.kind
    if kind == status == "healthy":
        # Most frames: what _become_healthy returns, in half the time.
        stays = (state.component_id, status, now, 0, state.stopping) + _FRESH  # noqa: RUF005 (faster)
        return _new(State, stays), _NOTHING
    cell = TABLE[status].get(kind)
    if cell is None:
        return state, _NOTHING
    after = cell(state, event, now, rules)
    if kind == "tick":
        return _tick_on(state, after, event, now, rules)
    if after.status == status:
        return after, _NOTHING
    return after, (_change(state, after),)


def _tick_on(
    state: State, after: State, event: Event, now: float, rules: HealthRules
) -> tuple[State, tuple[Transition, ...]]:
    """A late tick may cause several changes, such as unhealthy and then dead."""
    transitions = []
    while after is not state:
        if after.status != state.status:
            transitions.append(_change(state, after))
        state, cell = after, TABLE[after.status].get("tick", _stay)
        after = cell(state, event, now, rules)
    return after, tuple(transitions)


def _change(old: State, new: State) -> Transition:
    return Transition(old.component_id, old.status, new.status, new.cause)


def deadline(state: State, rules: HealthRules) -> float | None:
    """When a tick will change the state, if no other event comes before; None: never."""
    if state.stopping:
        return None
    match state.status:
        case "pending":
            return state.at + rules.startup_timeout_s
        case "recovering":
            return state.recover_until
        case "healthy" | "unhealthy":
            stale = state.at + (state.misses + 1) * rules.staleness_interval_s
            if state.by_frames and state.unhealthy_since is not None and rules.max_unhealthy_s:
                return min(stale, state.unhealthy_since + rules.max_unhealthy_s)
            return stale
        case _:
            return None


Cell = Callable[[State, Event, float, HealthRules], State]


def _stay(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state


def _register(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return State(state.component_id, "pending", now)


def _become_healthy(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return State(state.component_id, "healthy", now, 0, state.stopping)


def _become_unhealthy(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return State(
        state.component_id,
        "unhealthy",
        now,
        stopping=state.stopping,
        by_frames=True,
        unhealthy_since=now if state.unhealthy_since is None else state.unhealthy_since,
        recovery_since=state.recovery_since,
    )


def _become_pending(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return State(
        state.component_id,
        "pending",
        now,
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
        state.component_id,
        "recovering",
        now,
        stopping=state.stopping,
        unhealthy_since=state.unhealthy_since,
        recovery_since=since,
        recover_until=min(now + granted, since + rules.max_recovery_s),
    )


def _live_on(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return state._replace(at=now, misses=0, noise=False)


def _stop(state: State, _event: Event, now: float, _rules: HealthRules) -> State:
    return state._replace(at=now, misses=0, noise=False, stopping=True)


def _hear_noise(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state if state.noise else state._replace(noise=True)


def _count_late(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return state._replace(late=state.late + 1)


def _pass_time(state: State, _event: Event, now: float, rules: HealthRules) -> State:
    """Make at most one change; ``step`` calls it until nothing changes."""
    due = deadline(state, rules)
    if due is None or now < due:
        return state
    if state.status == "pending":
        return _die(state, "invalid-heartbeat" if state.noise else "startup-timeout")
    if state.status == "recovering":
        return _die(state, "recovery-timeout")
    if due < state.at + (state.misses + 1) * rules.staleness_interval_s:
        return _die(state, "unhealthy-too-long")
    misses = state.misses + 1
    if misses >= rules.max_misses:
        return _die(state, "invalid-heartbeat" if state.noise else "stale")
    return state._replace(status="unhealthy", misses=misses)


def _lose_process(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    if state.stopping:
        return State(state.component_id)
    return _die(state, "pipe-closed")


def _fail(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State(state.component_id, "failed", cause=state.cause)


def _forget(state: State, _event: Event, _now: float, _rules: HealthRules) -> State:
    return State(state.component_id)


def _die(state: State, cause: str) -> State:
    return State(state.component_id, "dead", state.at, state.misses, cause=cause)


# The machine: status → event → function. An event that is not listed changes nothing. A frame is
# listed by its status.
_LIVING: Final[Mapping[str, Cell]] = {
    "registered": _register,
    "pending": _become_pending,
    "healthy": _become_healthy,
    "unhealthy": _become_unhealthy,
    "recovering": _become_recovering,
    "stopping": _stop,
    "tick": _pass_time,
    "noise": _hear_noise,
    "eof-gone": _lose_process,
    "set-failed": _fail,
}
TABLE: Final[Mapping[str, Mapping[str, Cell]]] = {
    "unregistered": {
        "registered": _register,
        "set-failed": _fail,
    },
    "pending": _LIVING,
    "healthy": _LIVING,
    "unhealthy": _LIVING,
    # Its deadline does not move: loading again does not extend a recovery.
    "recovering": {**_LIVING, "pending": _live_on},
    "dead": {
        "registered": _register,
        "pending": _count_late,
        "healthy": _count_late,
        "unhealthy": _count_late,
        "recovering": _count_late,
        "stopping": _count_late,
        "set-failed": _fail,
    },
    "failed": {
        "reset": _forget,
    },
}
