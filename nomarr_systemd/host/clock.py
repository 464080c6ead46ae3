"""The machine's clocks: wall time, and time since boot with the id of the boot."""

from __future__ import annotations

import os
import re
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
    """Return the random id of this boot, 32 hex digits, as systemd has it. A unit's own /proc may
    have another one: in a container of systemd-nspawn, that of the host."""
    told = os.environ.get("NOMARR_BOOT_ID", "")
    if re.fullmatch("[0-9a-f]{32}", told):
        return told
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip().replace("-", "")
