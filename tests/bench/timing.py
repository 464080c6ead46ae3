"""How a figure is taken: many rounds, the contenders in turn, the median of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def compare(contenders: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each. In turn, so that a busy moment hits all of them."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, taken in zip(contenders, times, strict=True):
            started = time.perf_counter()
            contender()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def repeat(function: Callable[[], object], times: int) -> Callable[[], None]:
    """One call of this is so many of that, for what is too quick for the clock."""

    def loop() -> None:
        for _ in range(times):
            function()

    return loop


def report(name: str, figure: str, bar: str = "") -> None:
    print(f"{name:<46} {figure:>22}   {bar}", flush=True)
