"""Waiting for systemd's jobs, with a line on the terminal that says for what.

systemd bounds every job by the unit's own timeouts, so there is no other bound here. Who breaks
off leaves the jobs to systemd, which goes on with them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from nomarr_systemd.core.ids import Component
from nomarr_systemd.systemd.manager import Manager

_FIRST_S: Final = 0.02
_LONGEST_S: Final = 0.5
_QUIET_S: Final = 0.3  # what is done by then needs no words
FACTS: Final = ("ActiveState", "SubState", "LoadState", "InvocationID", "Job", "Result")
Facts = dict[str, str]
_Made = TypeVar("_Made")


class Progress:
    """A line on standard error that is written over, if that is a terminal."""

    def __init__(self) -> None:
        self._shown = False
        self._begun = time.monotonic()

    def tell(self, text: str) -> None:
        if time.monotonic() - self._begun > _QUIET_S and sys.stderr.isatty():
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def is_idle(facts: Facts) -> bool:
    """No job of systemd's is under way for the unit."""
    return facts.get("Job", "") in ("", "0")


def is_down(facts: Facts) -> bool:
    return is_idle(facts) and facts["ActiveState"] in ("inactive", "failed")


def wait_for(
    manager: Manager,
    workers: Sequence[Component],
    is_done: Callable[[Facts], bool],
    what: str,
) -> dict[Component, Facts]:
    """Until it is so for each of them; what systemd said of each then."""
    found: dict[Component, Facts] = {}
    left = list(workers)
    pause_s = _FIRST_S
    progress = Progress()
    try:
        while left:
            shown = manager.show([worker.unit for worker in left], FACTS)
            found |= {each: shown[each.unit] for each in left if is_done(shown[each.unit])}
            left = [each for each in left if each not in found]
            if left:
                names = ", ".join(each.instance for each in left[:4])
                more = " …" if len(left) > 4 else ""
                progress.tell(f"{what}: {len(found)} of {len(workers)} ({names}{more})")
                time.sleep(pause_s)
                pause_s = min(_LONGEST_S, pause_s * 1.5)
    finally:
        progress.clear()
    return found
