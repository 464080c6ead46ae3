"""The values that a report consists of: the facts of a death, how often it happened before, and
the report itself. ``verdict`` fills them in, ``report`` shows them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.postmortem.run_log import Coredump, Line
from nomarr_systemd.postmortem.stack_traces import Trace
from nomarr_systemd.postmortem.witnesses import Witnesses

NEVER_BEGAN: Final = ("start-job", "dependency")
_NEVER_RAN: Final = range(200, 244)  # exit statuses of systemd: it could not execute the program


class DeathFacts(NamedTuple):
    """A death, and what the witnesses add to it."""

    death: Death
    at_ms: int  # wall time
    job: str = ""
    memory_peak: int = 0  # bytes; 0: unknown
    memory_max: str = ""
    progress_age_s: float | None = None
    phase: str = ""  # of its last frame
    bad_line: str = ""  # the last line on its pipe that was no frame, and what is wrong with it
    forks_refused: bool = False  # by the kernel: TasksMax= was reached
    system_call: int | None = None  # the forbidden one, by the kernel

    @property
    def invocation(self) -> str:
        return self.death.invocation

    @property
    def kind(self) -> str:
        return self.death.kind

    @property
    def code(self) -> int:
        return self.death.code

    @property
    def line(self) -> str:
        return self.death.line

    @property
    def run_ms(self) -> int | None:
        return self.death.run_ms

    @property
    def never_ran(self) -> bool:
        return self.kind in NEVER_BEGAN or (self.kind == "exit" and self.code in _NEVER_RAN)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``death`` in docs/json.md#why."""
        names = ("invocation", "kind", "code", "line", "at_ms", "run_ms", *self._fields[2:])
        return {name: getattr(self, name) for name in (*names, "never_ran")}


class Repeats(NamedTuple):
    """How often the same crash is on record, including this one."""

    times: int
    deaths: int  # all deaths on record
    unknown: int  # deaths of the same class of which the journal has nothing left to compare
    first_ms: int
    last_ms: int


class Report(NamedTuple):
    """Everything that ``nomarrctl why`` shows."""

    witnesses: Witnesses
    verdict: str  # died, alive, stopped, unknown-run
    headline: str
    now: str
    death: DeathFacts | None = None
    trace: Trace | None = None
    trace_is_cause: bool = False
    fingerprint: str = ""
    frames: tuple[dict[str, Any], ...] = ()
    lines: tuple[Line, ...] = ()
    coredump: Coredump | None = None
    record: Record | None = None
    repeats: Repeats | None = None
    broken: tuple[str, ...] = ()  # required units that failed or are missing
    notes: tuple[str, ...] = ()
    frames_known: bool = False  # the supervisor was asked for them, and answered
