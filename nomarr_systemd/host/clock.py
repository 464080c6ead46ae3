"""The machine's clocks: wall time, and time since boot with the id of the boot."""

from __future__ import annotations

import time
from functools import cache

from nomarr_systemd.core.time import Moment


def wall_ms() -> int:
    """Return the milliseconds since 1970, by the system clock."""
    return time.time_ns() // 1_000_000


def now() -> Moment:
    """Return the present moment by wall time and by time since boot, suspend included."""
    return Moment(
        wall_ms(),
        read_boot_id(),
        time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000,
    )


@cache
def read_boot_id() -> str:
    """Return the kernel's random id of this boot, 32 hex digits."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip().replace("-", "")
