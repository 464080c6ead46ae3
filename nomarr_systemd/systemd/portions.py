"""Portions of workers: where there are many, systemd loads and starts one after the other, and
answers in between. A portion is a number of slices; its unit wants their workers, and each of the
slices, which stay active, names that unit: so systemd keeps loaded what has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from nomarr_systemd.core.ids import Component

PREFIX: Final = "nomarr-portion@"
STARTER: Final = "nomarr-portions.service"  # starts one after the other
_MANY: Final = 64  # workers of a portion: systemd loads and starts them in a fifth of a second


class Portion(NamedTuple):
    """Some slices with their workers, by the name of the first: ``tag-0``."""

    name: str
    slices: list[str]
    workers: list[Component]

    @property
    def unit(self) -> str:
        return f"{PREFIX}{self.name}.target"


def split(components: Iterable[Component]) -> list[Portion]:
    """Return the workers in portions, of which each but the last has _MANY or a little more. If one
    holds all, none is needed, and there is none. Another worker in a pool changes no other portion
    than that of its slice, unless pools are small."""
    found: list[Portion] = []
    for name, workers in groupby(components, key=lambda each: each.slice):
        if not found or len(found[-1].workers) >= _MANY:
            short = name.removeprefix("nomarr-").removesuffix(".slice")
            found.append(Portion(short, [], []))
        found[-1].slices.append(name)
        found[-1].workers.extend(workers)
    return found if len(found) > 1 else []


def render(portions: Sequence[Portion]) -> dict[str, str]:
    """Return what is said of portions, by unit, in the syntax of a unit file."""
    texts = {}
    for each in portions:
        wants = "".join(f"Wants={worker.unit}\n" for worker in each.workers)
        texts[each.unit] = f"[Unit]\n{wants}"
        texts |= dict.fromkeys(each.slices, f"[Unit]\nBefore={each.unit}\n")
    if texts:
        names = " ".join(each.name for each in portions)
        texts[STARTER] = f'[Service]\nEnvironment="NOMARR_PORTIONS={names}"\n'
    return texts
