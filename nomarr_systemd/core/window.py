"""The window of an account: its counted restarts, by boot. Changed only by making another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nomarr_systemd.core.time import Moment, age_ms

# A row repeats invocation, wall_ms, boottime_ms: JSON reads and writes it quickly, and a slice
# selects one of the three.
Window = Mapping[str, Sequence[Any]]


def has(window: Window, invocation: str) -> bool:
    """Return True if the restart after this run is counted in it."""
    return any(invocation in row[0::3] for row in window.values())


def split(window: Window, boot_id: str) -> tuple[list[int], list[int]]:
    """Return its restarts of this boot, by time since boot, and of others, by wall time."""
    here = sorted(window.get(boot_id, ())[2::3])
    others = (row[1::3] for boot, row in window.items() if boot != boot_id)
    return here, sorted(wall_ms for row in others for wall_ms in row)


def count_recent(window: Window, span_ms: float, now: Moment) -> int:
    """Return how many of its restarts are younger than ``span_ms``."""
    return sum(
        age_ms(Moment(wall_ms, boot_id, boottime_ms), now) < span_ms
        for boot_id, row in window.items()
        for wall_ms, boottime_ms in zip(row[1::3], row[2::3], strict=True)
    )


def put_in(window: Window, invocation: str, moment: Moment, most: int) -> Window:
    """Return the window with one more restart; the oldest goes if there are more than ``most``."""
    row = [*window.get(moment.boot_id, ()), invocation, moment.wall_ms, moment.boottime_ms]
    window = {**window, moment.boot_id: row}
    if sum(map(len, window.values())) > 3 * most:
        oldest = min(window, key=lambda boot_id: (boot_id == moment.boot_id, window[boot_id][1]))
        window = {**window, oldest: window[oldest][3:]}
    return {boot_id: row for boot_id, row in window.items() if row}


def take_out(window: Window, invocation: str) -> Window:
    """Return the window without the restart after this run."""
    rows = {}
    for boot_id, row in window.items():
        if invocation in row:
            place = row.index(invocation)
            row = [*row[:place], *row[place + 3 :]]
        if row:
            rows[boot_id] = row
    return rows
