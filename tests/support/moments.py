"""Moments and runs by number."""

from __future__ import annotations

from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment

BOOT = "b" * 32


PLAIN = Rules(backoff_jitter=0)


def at(seconds: float, boot_id: str = BOOT) -> Moment:
    ms = round(seconds * 1000)
    return Moment(1_700_000_000_000 + ms, boot_id, ms)


def run(number: int) -> str:
    return f"{number:032x}"
