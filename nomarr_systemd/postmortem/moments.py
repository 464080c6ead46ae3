"""Wall time as people read it: in this machine's time zone."""

from __future__ import annotations

import datetime


def show_moment(wall_ms: int) -> str:
    """Return wall time as local time, to the second."""
    return _local(wall_ms).strftime("%Y-%m-%d %H:%M:%S")


def show_clock(wall_us: int) -> str:
    """Return wall time as local time of day, to the millisecond."""
    return _local(wall_us // 1000).strftime("%H:%M:%S.%f")[:-3]


def show_zone(wall_ms: int) -> str:
    """Return the name of the time zone at that time, and its distance from UTC."""
    local = _local(wall_ms)
    return f"{local.tzname()}, UTC{local.strftime('%z')}"


def _local(wall_ms: int) -> datetime.datetime:
    bounded = min(max(wall_ms, 0), 253_000_000_000_000)  # a clock may have been set to anything
    return datetime.datetime.fromtimestamp(bounded / 1000).astimezone()
