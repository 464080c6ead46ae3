"""Moments and ages: one instant on three clocks, so that no clock step changes a decision."""

from __future__ import annotations

from nomarr_systemd.core.named_tuple import NamedTuple


class Moment(NamedTuple):
    """One instant on three clocks: wall time, which boot, and time since that boot."""

    wall_ms: int
    boot_id: str
    boottime_ms: int

    def later(self, delay_ms: int) -> Moment:
        return Moment(self.wall_ms + delay_ms, self.boot_id, self.boottime_ms + delay_ms)


def age_ms(then: Moment, now: Moment) -> int:
    """Return how long ago ``then`` was: by boottime within one boot, else by wall time; never
    negative."""
    if then.boot_id == now.boot_id:
        return max(0, now.boottime_ms - then.boottime_ms)
    return max(0, now.wall_ms - then.wall_ms)
