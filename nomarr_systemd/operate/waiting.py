"""Waiting for systemd's jobs.

systemd bounds every job by the unit's own timeouts, which a worker may extend again and again: a
caller that must go on sets a limit. What is left then, or when a person interrupts the wait,
systemd finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.systemd.manager import Manager

_FIRST_S: Final = 0.02
_LONGEST_S: Final = 0.5
FACTS: Final = ("ActiveState", "SubState", "LoadState", "InvocationID", "Job", "Result")
Facts = dict[str, str]
Tell = Callable[[str], None]  # takes a line that says how far a wait has got


def is_idle(facts: Facts) -> bool:
    """True if systemd has no job queued or running for the unit."""
    return facts.get("Job", "") in ("", "0")


def is_down(facts: Facts) -> bool:
    return is_idle(facts) and facts["ActiveState"] in ("inactive", "failed")


def wait_for(
    manager: Manager,
    workers: Sequence[Component],
    is_done: Callable[[Component, Facts], bool],
    what: str,
    tell: Tell,
    *,
    limit_s: float | None = None,
) -> dict[Component, Facts]:
    """Return when ``is_done`` holds for each worker, with what systemd said of each then; after
    ``limit_s``, those for which it holds."""
    ends = None if limit_s is None else time.monotonic() + limit_s
    found: dict[Component, Facts] = {}
    left = list(workers)
    pause_s = _FIRST_S
    while left:
        shown = manager.show([worker.unit for worker in left], FACTS)
        found |= {each: shown[each.unit] for each in left if is_done(each, shown[each.unit])}
        left = [each for each in left if each not in found]
        if left:
            if ends is not None and time.monotonic() >= ends:
                return found
            names = ", ".join(each.instance for each in left[:4])
            more = " …" if len(left) > 4 else ""
            tell(f"{what}: {len(found)} of {len(workers)} ({names}{more})")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_S, pause_s * 1.5)
    return found
