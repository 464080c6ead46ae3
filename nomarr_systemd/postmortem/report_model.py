"""The death certificate: what killed a worker, when, with what in hand, what was decided about it
and why, and how often it died like that before. How it comes about is in ``inquest``.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.postmortem.run_log import Coredump, Line
from nomarr_systemd.postmortem.stack_traces import Trace
from nomarr_systemd.postmortem.witnesses import Scene

_NEVER_RAN: Final = range(200, 244)  # systemd's own statuses: the program was not even started


class Death(NamedTuple):
    """One bad end."""

    invocation: str  # with "#n" for a start job that failed
    kind: str
    code: int
    line: str
    at_ms: int
    run_ms: int | None
    job: str
    memory_peak: int  # bytes; 0: unknown
    memory_max: str
    progress_age_s: float | None

    @property
    def never_ran(self) -> bool:
        return self.kind == "start-job" or (self.kind == "exit" and self.code in _NEVER_RAN)


class Repeats(NamedTuple):
    """How often the same crash is on record, this one included."""

    times: int
    deaths: int  # on record in all
    unknown: int  # alike in class, and nothing more is known of them
    first_ms: int
    last_ms: int


class Certificate(NamedTuple):
    """Everything the report shows."""

    scene: Scene
    verdict: str  # died, alive, stopped
    headline: str
    now: str
    death: Death | None = None
    trace: Trace | None = None
    trace_is_cause: bool = False
    fingerprint: str = ""
    frames: tuple[dict[str, Any], ...] = ()
    lines: tuple[Line, ...] = ()
    coredump: Coredump | None = None
    record: Record | None = None
    repeats: Repeats | None = None
    broken: tuple[str, ...] = ()  # units that it needs and that are not there
    notes: tuple[str, ...] = ()
