"""Waiting for systemd's jobs.

systemd bounds every job by the unit's own timeouts, which a worker may extend again and again: a
caller that cannot wait sets a limit. What is left then, or when a person interrupts the wait,
systemd finishes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.systemd.manager import Manager, Verb
from nomarr_systemd.systemd.systemctl import ManagerError

_FIRST_S: Final = 0.02
_LONGEST_S: Final = 0.5
_PORTION: Final = 128  # jobs that systemd has at a time: more than it does in _PORTION_S
_PORTION_S: Final = 0.05
_LOADS_S: Final = 2.0  # a worker that is not ready by then loads, and is not waited for
_STUCK_S: Final = 5.0  # jobs of which none has begun for so long wait for other units
FACTS: Final = ("ActiveState", "SubState", "LoadState", "InvocationID", "Job", "Result")
_STATES: Final = ("ActiveState", "SubState", "LoadState", "Job")  # quick to ask for many units
Facts = dict[str, str]
Tell = Callable[[str], None]  # takes a line that says how far a wait has got


def is_idle(facts: Facts) -> bool:
    """Return True if systemd has no job queued or running for the unit."""
    return facts.get("Job", "") in ("", "0")


def is_down(facts: Facts) -> bool:
    return is_idle(facts) and facts["ActiveState"] in ("inactive", "failed")


def queue(manager: Manager, verb: Verb, units: Sequence[str]) -> None:
    """Queue a job for each unit; ManagerError if some are refused, the others are done then."""
    _complain([each for each in manager.queue(verb, units).values() if each])


def queue_gently(manager: Manager, verb: Verb, units: Sequence[str], what: str, tell: Tell) -> None:
    """As ``queue``, but with few jobs at a time: thousands of workers that start at once would keep
    the machine busy for minutes. Return when the last has begun, or waits for another unit, which
    may take for ever. Hold no lock meanwhile."""
    left, begun = list(units), dict[str, float]()
    refused: list[ManagerError] = []
    moved = time.monotonic()
    while left or begun:
        before = dict(begun)
        now = time.monotonic()
        for unit, facts in manager.show(list(begun), ["ActiveState", "Job"]).items():
            if facts["ActiveState"] not in ("inactive", "failed"):
                begun[unit] = min(begun[unit], now)
            if is_idle(facts) or now - begun[unit] > _LOADS_S:
                del begun[unit]
        portion = left[: _PORTION - len(begun)]
        left = left[len(portion) :]
        answers = manager.queue(verb, portion)
        refused += [each for each in answers.values() if each]
        begun |= {unit: math.inf for unit, error in answers.items() if not error}
        if begun != before:
            moved = now
        elif now - moved > _STUCK_S:
            begun.clear()
        if left or begun:
            tell(f"{what}: {len(units) - len(left) - len(begun)} of {len(units)}")
            manager.close()  # systemd sends every change of every unit to all that are connected
            time.sleep(_PORTION_S)
    _complain(refused)


def _complain(refused: Sequence[ManagerError]) -> None:
    """Raise the first refusal, which is as a rule that of all: one line, not thousands."""
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise type(refused[0])(f"{refused[0]}{more}", hint=refused[0].hint)


def wait_for(
    manager: Manager,
    workers: Sequence[Component],
    is_done: Callable[[Component, Facts], bool],
    what: str,
    tell: Tell,
    *,
    limit_s: float | None = None,
) -> dict[Component, Facts]:
    """Return when ``is_done`` holds for each worker, with what systemd says of each then; after
    ``limit_s``, those for which it held. ``is_done`` gets no more than the states and the job."""
    ends = None if limit_s is None else time.monotonic() + limit_s
    found: dict[Component, Facts] = {}
    left = list(workers)
    pause_s = _FIRST_S
    while left:
        shown = manager.show([worker.unit for worker in left], _STATES)
        found |= {each: shown[each.unit] for each in left if is_done(each, shown[each.unit])}
        left = [each for each in left if each not in found]
        if left:
            if ends is not None and time.monotonic() >= ends:
                break
            names = ", ".join(each.instance for each in left[:4])
            more = " …" if len(left) > 4 else ""
            tell(f"{what}: {len(found)} of {len(workers)} ({names}{more})")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_S, pause_s * 1.5)
    shown = manager.show([worker.unit for worker in found], FACTS)
    return {worker: shown[worker.unit] for worker in found}
