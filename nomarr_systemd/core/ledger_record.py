"""One line of a worker's account, and how it is written as text.

New fields go last: what a newer version has added is left out when read and kept when rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Final, cast

from nomarr_systemd.core.death import Death, Reason, name_signal, reason_for
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Action, Decision, Evidence
from nomarr_systemd.core.time import Moment

DECISIONS: Final = ("restart", "fail", "hold", "ignore")
PERSONAL: Final = ("manual", "pause", "reset", "resume")  # what people do
EFFECTS: Final = ("pending", "scheduled", "started", "done")


class Record(NamedTuple):
    """What was decided, or what a person did, and how far it has been carried out.

    In the document it is one text with bars between the fields: a hundred of them are read and
    written much faster than a hundred JSON objects.
    """

    attempt: int  # 1, 2, 3 … for as long as the document lives
    invocation: str  # "" where no run is meant
    action: str  # restart, fail, hold, ignore; refund; and a person's, PERSONAL
    kind: str
    code: int
    delay_ms: int
    wall_ms: int
    boot_id: str
    boottime_ms: int
    effect: str  # one of EFFECTS
    run_ms: int | None
    window_used: int
    window_limit: int
    lifetime_used: int
    lifetime_limit: int
    k: int
    next_available_ms: int | None
    text: str  # why, in one line
    by: str = ""  # the person who acted, if one did

    @classmethod
    def read(cls, row: str) -> Record:
        """Make a Record of a row of the document; fields of a newer version are ignored."""
        return cls(*map(call, _PARSERS, row.split("|")))  # type: ignore[arg-type]

    def write(self) -> str:
        return "|".join(["" if value is None else str(value) for value in self])

    @property
    def is_scheduled(self) -> bool:
        """True if it is a restart that waits for the end of its backoff."""
        return (self.action, self.effect) == ("restart", "scheduled")

    @property
    def reason(self) -> Reason:
        """The coarser reason: failure, health, timeout or manual."""
        return "manual" if self.action in PERSONAL else reason_for(self.kind)

    @property
    def moment(self) -> Moment:
        return Moment(self.wall_ms, self.boot_id, self.boottime_ms)

    @property
    def due(self) -> Moment:
        return self.moment.later(self.delay_ms)

    def death(self, component_id: str) -> Death:
        """Return the death that was decided about."""
        return Death(
            component_id, self.invocation, self.kind, self.code, run_ms=self.run_ms, at=self.moment
        )

    @property
    def decision(self) -> Decision:
        evidence = Evidence(*self[11:17])
        return Decision(cast(Action, self.action), self.delay_ms, self.text, evidence)


def crash_word(record: Record) -> str:
    """Return a death in one or two words: ``exit 1``, ``SIGSEGV``, ``oom``, ``watchdog``."""
    if record.kind == "exit":
        return f"exit {record.code}"
    if record.kind in ("signal", "core-dump"):
        name = name_signal(-record.code)
        return f"signal {name}" if name.lstrip("-").isdigit() else f"SIG{name}"
    return record.kind


def _maybe_int(text: str) -> int | None:
    return int(text) if text else None


_PARSERS: Final[tuple[Callable[[str], object], ...]] = (
    *(int, str, str, str, int, int, int, str, int, str, _maybe_int),
    *(int, int, int, int, int, _maybe_int, str, str),
)


_ACTION, _EFFECT = Record._fields.index("action"), Record._fields.index("effect")


def action_of(row: str) -> str:
    """Return the action of a row, without reading its other fields."""
    return row.split("|", _ACTION + 1)[_ACTION]


def with_effect(row: str, effect: str) -> str:
    """Return the row with another effect; fields of a newer version stay."""
    fields = row.split("|")
    fields[_EFFECT] = effect
    return "|".join(fields)
