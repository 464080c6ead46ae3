"""Which runs somebody asked to stop. ExecStop= leaves a mark, but is not run for a worker that has
not said yet that it is ready.

Of such a unit systemd does not even log "Stopping", but "Stopped" when the stop is done, which it
never says of a run that ended by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Final

from nomarr_systemd.controller.pending import Pending
from nomarr_systemd.host.layout import Paths

Facts = dict[str, str]
WAIT_S: Final = 2.0  # for a journal that lags behind, all in all
_ENTRIES: Final = 20
_LOOK_AGAIN_S: Final = 0.01


def has_mark(paths: Paths, run: str) -> bool:
    return os.path.exists(os.path.join(paths.stop, run))


def find_stopped(paths: Paths, failures: Sequence[Pending], facts: Mapping[str, Facts]) -> set[str]:
    """The failed runs that were asked to stop; ``facts`` are those of their units."""
    stopped = {each.invocation for each in failures if has_mark(paths, each.invocation)}
    ends = time.monotonic() + WAIT_S
    for each in failures:
        unit = facts[each.component.unit]
        if (
            each.invocation not in stopped
            and unit["InvocationID"] == each.invocation
            and not _was_ready(unit)
            and _was_stopped(each.invocation, ends, user=paths.user)
        ):
            stopped.add(each.invocation)
    return stopped


def _was_ready(unit: Facts) -> bool:
    """Whether the last run of the unit has ever been active."""
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    return int(unit["ActiveEnterTimestampMonotonic"] or 0) > started


def _was_stopped(run: str, ends: float, *, user: bool) -> bool:
    # Slow to load, and few deaths need it.
    from nomarr_systemd.systemd.journal_reader import FAILED, STOPPED, Journal

    # The manager's own word; nobody else has this pid or, in its scope, this user.
    speaker = [f"_UID={os.getuid()}", f"USER_INVOCATION_ID={run}"]
    terms = [speaker if user else ["_PID=1", f"INVOCATION_ID={run}"]]
    while True:
        try:
            # A reader of its own each time: it sees what has come since.
            with Journal(deadline=ends) as journal:
                ids = [entry.message_id for entry in journal.read_back(terms, limit=_ENTRIES)]
        except OSError:
            return False
        if STOPPED in ids:
            return True
        # "Failed" comes just before it; once anything else has followed, it will not come. Where
        # not even the start is to be seen, there is no journal for us to read.
        is_told = FAILED in ids and ids[-1] != FAILED
        if not ids or is_told or time.monotonic() > ends:
            return False
        time.sleep(_LOOK_AGAIN_S)
