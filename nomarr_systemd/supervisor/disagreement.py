"""Two witnesses, systemd and the pipe, compared: where they disagree about a worker, the
disagreement has a name. It explains; it decides nothing.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from nomarr_systemd.core.health import State

HUNG: Final = "hung-but-pinging"  # frames come, and say that the work stands still
WEDGED: Final = "pipe-wedged"  # systemd is fed, but frames come no more
BLIND: Final = "supervisor-blind"  # systemd calls it active, but no frame ever came

# Of the unit, for the comparison and for a kill.
PROPERTIES: Final = ("MainPID", "InvocationID", "ActiveState", "WatchdogTimestampMonotonic")

_AGE = re.compile(rb'"progress_age_s": ?([0-9]{1,9}(?:\.[0-9]+)?)')


class Facts(NamedTuple):
    """What systemd says of a unit."""

    pid: int = 0  # 0: no main process
    invocation: str = ""
    active: str = ""  # active, activating, deactivating, inactive, failed …
    fed_at: float = 0.0  # monotonic seconds of its last WATCHDOG=1


def read_facts(shown: dict[str, str]) -> Facts:
    """The facts in the properties that systemctl shows; what is missing counts as not there."""
    return Facts(
        _number(shown.get("MainPID", "")),
        shown.get("InvocationID", ""),
        shown.get("ActiveState", ""),
        _number(shown.get("WatchdogTimestampMonotonic", "")) / 1e6,
    )


def stands_still(line: bytes, stall_timeout_s: float) -> bool:
    """Whether a frame says that the work makes no progress for too long (0: never too long).

    Only a frame that looks like it is worth taking apart by the caller.
    """
    if not stall_timeout_s:
        return False
    return any(float(age) > stall_timeout_s for age in _AGE.findall(line))


def compare(facts: Facts, state: State, *, frames: int, invocation: str, staleness_s: float) -> str:
    """The name of the disagreement about a worker that is silent, or nothing.

    Fed a moment after the last frame is no disagreement: both were then sent together.
    """
    if facts.active != "active" or facts.invocation != invocation:
        return ""
    if not frames:
        return BLIND
    return WEDGED if facts.fed_at > state.at + staleness_s / 2 else ""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
