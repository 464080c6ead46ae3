"""The one wait that sleeps: systemd tells nobody without a bus, so it looks again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

PATIENCE_S: Final = 300.0  # only a hang takes longer, also on a busy machine
# A look costs both sides. The longer it was in vain, the later comes the next, and no more than
# half of the time is spent on looks: a process for each would keep back what is waited for.
_FIRST_S: Final = 0.005
_LONGER: Final = 1.25
_LONGEST_S: Final = 0.05
_LONGEST_LOOK_S: Final = 0.5

_Found = TypeVar("_Found")


def wait_for(look: Callable[[], _Found], timeout_s: float, what: object) -> _Found:
    """What ``look`` finds, as soon as that is true."""
    begins = time.monotonic()
    ends = begins + timeout_s
    pause_s = _FIRST_S
    while not (found := look()):
        now = time.monotonic()
        assert now < ends, f"not within {timeout_s:g} s: {what}"
        time.sleep(max(pause_s, min(now - begins, _LONGEST_LOOK_S)))
        pause_s = min(_LONGER * pause_s, _LONGEST_S)
        begins = time.monotonic()
    return found
