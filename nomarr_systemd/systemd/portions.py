"""Portions of workers: at a boot, with the target, systemd starts one after the other, and answers
in between. A portion is a number of slices, which wait for a unit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from nomarr_systemd.core.ids import Component

_MANY: Final = 64  # workers of a portion: systemd starts them in a fifth of a second


def split(components: Iterable[Component]) -> list[list[str]]:
    """Return the slices of the workers in portions, of which each but the last has _MANY workers or
    a little more."""
    portions: list[list[str]] = []
    room = 0
    for name, workers in groupby(components, key=lambda each: each.slice):
        if room <= 0:
            portions.append([])
            room = _MANY
        portions[-1].append(name)
        room -= len(list(workers))
    return portions


def unit_of(portion: int) -> str:
    """Return the unit that a portion waits for. There is none of the first, 0."""
    return f"nomarr-portion@{portion}.service"
