"""Disagreements of systemd and the pipe about a worker, by name. They explain a worker's status
to people, and decide nothing.
"""

from __future__ import annotations

from typing import Final

from nomarr_systemd.core.named_tuple import NamedTuple

HUNG: Final = "hung-but-pinging"  # frames come, and say that there is no progress
WEDGED: Final = "pipe-wedged"  # systemd's watchdog is fed, but frames stopped
BLIND: Final = "supervisor-blind"  # systemd shows it as active, but no frame ever came

# The properties of a unit that a comparison or a kill needs.
PROPERTIES: Final = ("MainPID", "InvocationID", "ActiveState", "WatchdogTimestampMonotonic")


class Facts(NamedTuple):
    """What systemd shows of a unit."""

    pid: int = 0  # 0: no main process
    invocation: str = ""
    active: str = ""  # active, activating, deactivating, inactive, failed …
    fed_at: float = 0.0  # monotonic seconds of its last WATCHDOG=1


def read_facts(shown: dict[str, str]) -> Facts:
    """The facts in the properties that systemd shows; a missing one has its default."""
    return Facts(
        _number(shown.get("MainPID", "")),
        shown.get("InvocationID", ""),
        shown.get("ActiveState", ""),
        _number(shown.get("WatchdogTimestampMonotonic", "")) / 1e6,
    )


def is_stalled(progress_age_s: float, stall_timeout_s: float) -> bool:
    """Whether there was no progress for longer than ``stall_timeout_s`` (0: never)."""
    return 0 < stall_timeout_s < progress_age_s


def compare(
    facts: Facts, heard_at: float, *, frames: int, invocation: str, staleness_s: float
) -> str:
    """Return the name of the disagreement about a silent worker; empty if there is none.

    A ping soon after the last frame is no disagreement: both were sent together.
    """
    if facts.active != "active" or facts.invocation != invocation:
        return ""
    if not frames:
        return BLIND
    return WEDGED if facts.fed_at > heard_at + staleness_s / 2 else ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
