"""The values that everything else talks about: moments, rules, failures, decisions.

Values are named tuples: frozen, cheap to import and to make, and the same in JSON as in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Action = Literal["restart", "fail", "hold", "ignore"]
OnExhausted = Literal["mask", "cooldown"]
Reason = Literal["failure", "health", "timeout", "manual"]


class Moment(NamedTuple):
    """One instant on three clocks: wall time, which boot, and time since that boot."""

    wall_ms: int
    boot_id: str
    boottime_ms: int

    def later(self, delay_ms: int) -> Moment:
        return Moment(self.wall_ms + delay_ms, self.boot_id, self.boottime_ms + delay_ms)


def age_ms(then: Moment, now: Moment) -> int:
    """How long ago ``then`` was: by boottime within one boot, else by wall time; never negative."""
    if then.boot_id == now.boot_id:
        return max(0, now.boottime_ms - then.boottime_ms)
    return max(0, now.wall_ms - then.wall_ms)


class Rules(NamedTuple):
    """The restart policy of one worker: ``[policy]``, under ``[pool.X.policy]`` and so on."""

    max_restarts: int = 5
    window_s: float = 300.0
    max_lifetime_restarts: int = 20
    backoff_base_s: float = 1.0
    backoff_multiplier: float = 2.0
    backoff_max_s: float = 60.0
    backoff_jitter: float = 0.1
    stable_after_s: float = 600.0
    on_exhausted: OnExhausted = "mask"
    never_restart: tuple[int, ...] = (78,)


class HealthRules(NamedTuple):
    """``[health]``: what the worker promises and what the supervisor expects."""

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


class Failure(NamedTuple):
    """One death of one run, by what systemd itself knows of it.

    ``code`` is an exit status (0 and up), −N for signal N, −1 unknown, −2 heartbeat timeout,
    −3 invalid heartbeat. The last five fields are the circumstances that excuse a worker.
    """

    invocation: str  # 32 hex digits, "#n" behind it for a failed start job
    kind: str = "exit"  # the class of DESIGN §14
    code: int = -1
    run_ms: int | None = None
    stop_asked: bool = False
    shutting_down: bool = False
    held: str = ""  # why nothing may start: paused, held
    supervisor_away: bool = False  # it was inactive, or is newer than this run
    incident: str = ""  # the open incident that this death is a part of


class Evidence(NamedTuple):
    """The numbers a decision rests on, as they were before it."""

    window_used: int
    window_limit: int
    lifetime_used: int
    lifetime_limit: int  # 0: none
    k: int  # restarts since the last stable run: the exponent of the backoff
    next_available_ms: int | None  # until the window has room; 0: now, None: only a reset helps


class Decision(NamedTuple):
    """What to do about a failure, and why."""

    action: Action
    delay_ms: int
    reason: str  # one line for people
    evidence: Evidence

    @property
    def failure_reason(self) -> str:
        """What is recorded with a mask; empty for every other decision."""
        return self.reason if self.action == "fail" else ""


class History(NamedTuple):
    """What a decision needs to know of the past, laid out so that it costs the same at any age.

    Restarts in the window are kept by the clock that can judge them: those of this boot by
    boottime, those of earlier boots by wall time; both in order.
    """

    decided: Mapping[str, Decision] = {}
    this_boot_ms: Sequence[int] = ()
    other_boots_ms: Sequence[int] = ()
    lifetime: int = 0
    k: int = 0
    last_due: Moment | None = None  # when the last restart was due
