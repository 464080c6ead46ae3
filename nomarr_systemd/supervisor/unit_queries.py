"""Questions to systemd about units, without waiting for the answer: a thread asks all questions
that were collected, and ends when there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor.disagreement import PROPERTIES, Facts, read_facts
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.systemd.stop_intent import was_asked_before, was_asked_to_stop

Shown = dict[str, dict[str, str]]  # properties by unit
Questions = Mapping[str, Sequence[str]]  # names of properties by unit
_TIMES: Final = ("InactiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic")


class UnitQueries:
    """Ask from the loop; the answer comes in the loop. ``error`` says why the last questions were
    not answered; empty if they were."""

    def __init__(self, loop: Loop, *, user: bool) -> None:
        self.error = ""
        self._loop = loop
        self._user = user
        self._waiting: list[tuple[Questions, Callable[[Shown], None]]] = []
        self._busy = False

    def ask(self, unit: str, answer: Callable[[Facts | None], None]) -> None:
        """Ask about a unit; the answer is None if systemd gives none."""

        def read(shown: Shown) -> None:
            answer(read_facts(shown[unit]) if unit in shown else None)

        self._ask({unit: PROPERTIES}, read)

    def ask_if_stopped(
        self, component: Component, invocation: str, answer: Callable[[bool], None]
    ) -> None:
        """Ask if a stop or restart of this run of the worker was requested; the answer is False if
        systemd gives none."""
        questions: Questions = {
            component.unit: ("InvocationID", *_TIMES),
            component.wanted_unit: _TIMES,
        }

        def read(shown: Shown) -> None:
            answer(bool(shown) and _was_stopped(invocation, *map(shown.__getitem__, questions)))

        self._ask(questions, read)

    def _ask(self, questions: Questions, read: Callable[[Shown], None]) -> None:
        self._waiting.append((questions, read))
        if not self._busy:
            self._busy = True
            # All questions of one turn of the loop are asked together.
            self._loop.soon(self._start)

    def _start(self) -> None:
        asked, self._waiting = self._waiting, []
        merged: dict[str, dict[str, None]] = {}
        for questions, _ in asked:
            for unit, names in questions.items():
                merged.setdefault(unit, {}).update(dict.fromkeys(names))
        deliver = partial(self._deliver, [read for _, read in asked])
        wanted = {unit: tuple(names) for unit, names in merged.items()}
        run = partial(_show, self._loop, wanted, deliver, user=self._user)
        threading.Thread(target=run, daemon=True).start()

    def _deliver(self, readers: list[Callable[[Shown], None]], shown: Shown, error: str) -> None:
        self._busy = False
        self.error = error
        for read in readers:
            read(shown)
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.soon(self._start)


def _was_stopped(invocation: str, unit: dict[str, str], wanted: dict[str, str]) -> bool:
    if unit["InvocationID"] == invocation:
        return was_asked_to_stop(unit, wanted)
    return was_asked_before(time.monotonic_ns() // 1000, wanted)  # another run has begun


def _show(
    loop: Loop, questions: Questions, deliver: Callable[[Shown, str], None], *, user: bool
) -> None:
    """Ask systemd; called in the thread."""
    from nomarr_systemd.systemd.manager import Manager  # large, and seldom needed

    shown: Shown = {}
    error = ""
    try:
        with closing(Manager(user=user)) as manager:
            shown = manager.show_each(questions)
    except Exception as problem:  # the outermost of this thread: those who asked wait for an answer
        error = str(problem) or type(problem).__name__
    loop.post(partial(deliver, shown, error))
