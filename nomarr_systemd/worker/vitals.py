"""A worker's condition and counts, and a line for people that has both."""

from __future__ import annotations

from typing import NamedTuple

from nomarr_systemd.core.text import escape


class Condition(NamedTuple):
    """The worker's status, phase and job. Immutable, so that another thread sees one state."""

    status: str
    phase: str
    job: str | None = None
    note: str = ""


class Tally:
    """Counts of one run; the average is over jobs that were done, also in earlier runs:
    0.8·old + 0.2·new."""

    __slots__ = (
        "avg_time_s",
        "claim_conflicts",
        "consecutive_errors",
        "discovery_attempts",
        "files_processed",
    )

    def __init__(self) -> None:
        self.discovery_attempts = 0
        self.claim_conflicts = 0
        self.files_processed = 0
        self.consecutive_errors = 0
        self.avg_time_s = 0.0

    def count_done(self, seconds: float) -> None:
        old = self.avg_time_s
        self.avg_time_s = 0.8 * old + 0.2 * seconds if old else seconds
        self.files_processed += 1
        self.consecutive_errors = 0

    def metrics(self) -> dict[str, float]:
        return {
            "discovery_attempts": self.discovery_attempts,
            "claim_conflicts": self.claim_conflicts,
            "files_processed": self.files_processed,
            "consecutive_errors": self.consecutive_errors,
            "avg_time_s": round(self.avg_time_s, 3),
        }


def describe(condition: Condition, tally: Tally, *, ending: str, past: str = "") -> str:
    """Return the text of STATUS=: one short line, whatever the job is called. ``past`` is what its
    unit knows of its restarts."""
    words = [ending] if ending and condition.phase != "stopping" else []
    if condition.status in ("recovering", "pending") and condition.phase != "loading_models":
        words.append(condition.status)
    phase = condition.phase.replace("_", " ")
    words.append(f"{phase} {_cut(condition.job)}" if condition.job else phase)
    if condition.note:
        words.append(_cut(condition.note))
    text = ": ".join(words)
    if tally.files_processed:
        text += f"; {tally.files_processed} done, {tally.avg_time_s:.2f} s on average"
    if tally.consecutive_errors:
        text += f"; {tally.consecutive_errors} errors in a row"
    if past:
        text += f"; {escape(past)}"
    return text


def _cut(text: str) -> str:
    """Return the end of a long text, because paths differ there."""
    text = escape(text)
    return text if len(text) <= 120 else "…" + text[-119:]
