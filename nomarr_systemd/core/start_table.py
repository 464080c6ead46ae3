"""When a unit may start: ``judge`` says what follows from a decision that is not done.

``TABLE`` is the only place that answers this. docs/policy.md shows it to people; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from nomarr_systemd.core.death import DEPENDENCY, EX_TEMPFAIL
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.world import RUNNING, Unit

START_JOB_GRACE_MS: Final = 10_000
_SHORTEST_RETRY_MS: Final = 1000


# Its turn to start, where restarts wait for each other: it has one, may take one, or must wait.
Turn = Literal["", "held", "free", "taken"]


class Owed(NamedTuple):
    """A restart or a hold on record that is not done, and all that decides about it."""

    record: Record
    unit: Unit
    hold: str
    supervisor_active: bool
    early: bool  # its incident is over, or has elected it: the backoff is cut short
    now: Moment
    turn: Turn = ""

    @property
    def is_as_left(self) -> bool:
        """True if the unit is still failed in the run that was decided about."""
        run = self.record.invocation.partition("#")[0]
        return self.unit.state == "failed" and self.unit.invocation == run

    @property
    def retry(self) -> Literal["", "waiting", "elapsed", "none"]:
        """The timer of the next try, of a worker that needs a unit which was not active; empty
        for others, and for one that was not tried yet."""
        if self.record.kind != DEPENDENCY.kind:
            return ""
        is_first = self.record.effect != "started" and self.unit.timer == "none"
        return "" if is_first else self.unit.timer

    @property
    def is_due(self) -> bool:
        return self.early or due_in_ms(self.record, self.now) <= 0


Verdict = Literal["wait", "done", "schedule", "start", "retry", "turn", "start-job-failed"]
# The first row that is true decides. After a start the next plan finds out whether it succeeded.
TABLE: Final[tuple[tuple[str, Callable[[Owed], bool], Verdict], ...]] = (
    ("a job of it is queued", lambda owed: owed.unit.has_job, "wait"),
    ("it is masked", lambda owed: owed.unit.masked, "done"),
    ("it is held", lambda owed: bool(owed.hold), "wait"),
    ("it runs", lambda owed: owed.unit.state in RUNNING, "done"),
    ("a person stopped it", lambda owed: not owed.unit.wanted, "done"),
    (
        "a hold prevented its last start",
        lambda owed: owed.unit.kept_down and owed.record.effect != "started",
        "start",
    ),
    ("it was started or stopped since", lambda owed: not owed.is_as_left, "done"),
    ("its retry is due", lambda owed: owed.retry == "elapsed", "start"),
    ("its retry has a timer", lambda owed: owed.retry == "waiting", "wait"),
    ("a unit that it needs was not active", lambda owed: owed.retry == "none", "retry"),
    (
        "it was started, and did not begin",
        lambda owed: (
            owed.record.effect == "started"
            and age_ms(owed.record.due, owed.now) > START_JOB_GRACE_MS
        ),
        "start-job-failed",
    ),
    ("it was started", lambda owed: owed.record.effect == "started", "wait"),
    (
        "its supervisor is away",
        lambda owed: owed.record.code == EX_TEMPFAIL and not owed.supervisor_active,
        "wait",
    ),
    (
        "others of its pool are starting",
        lambda owed: owed.turn == "taken" and (owed.record.action == "hold" or owed.is_due),
        "turn",
    ),
    ("its hold is over", lambda owed: owed.record.action == "hold", "start"),
    ("its backoff is over", lambda owed: owed.is_due, "start"),
    ("its backoff has a timer", lambda owed: owed.unit.timer == "waiting", "wait"),
    ("its backoff has no timer", lambda _owed: True, "schedule"),
)


def judge(owed: Owed) -> tuple[Verdict, str]:
    """Return what to do about a decision that is not done, and why."""
    for why, is_so, verdict in TABLE:
        if is_so(owed):
            return verdict, why
    raise AssertionError(owed)  # the last line is always true


def retry_in_ms(record: Record, rules: Rules, now: Moment) -> int:
    """Return how long to wait for another try: as long as it has been waiting, from 1 s to the
    longest backoff."""
    most_ms = max(_SHORTEST_RETRY_MS, round(rules.backoff_max_s * 1000))
    return min(most_ms, max(_SHORTEST_RETRY_MS, age_ms(record.moment, now)))


def turn_in_ms(record: Record, rules: Rules, now: Moment) -> int:
    """Return how long to wait before it is asked again whether it may start: as long as it has
    been due, from 1 s to the longest backoff."""
    most_ms = max(_SHORTEST_RETRY_MS, round(rules.backoff_max_s * 1000))
    return min(most_ms, max(_SHORTEST_RETRY_MS, age_ms(record.due, now)))


def due_in_ms(record: Record, now: Moment) -> int:
    """Return what is left of a backoff; across a boot by wall time, and never more than it was."""
    due = record.due
    if due.boot_id == now.boot_id:
        return due.boottime_ms - now.boottime_ms
    return min(due.wall_ms - now.wall_ms, record.delay_ms)
