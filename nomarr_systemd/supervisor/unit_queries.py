"""Questions to systemd about units, without waiting for the answer: a thread asks all questions
that were collected, and ends when there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial

from nomarr_systemd.supervisor.disagreement import PROPERTIES, Facts, read_facts
from nomarr_systemd.supervisor.loop import Loop

Answer = Callable[[Facts | None], None]  # None: systemd did not answer
Shown = dict[str, dict[str, str]]  # properties by unit


class UnitQueries:
    """``ask`` from the loop; the answer comes in the loop. ``error`` says why the last questions
    were not answered; empty if they were."""

    def __init__(self, loop: Loop, *, user: bool) -> None:
        self.error = ""
        self._loop = loop
        self._user = user
        self._waiting: list[tuple[str, Answer]] = []
        self._busy = False

    def ask(self, unit: str, answer: Answer) -> None:
        self._waiting.append((unit, answer))
        if not self._busy:
            self._busy = True
            # All questions of one turn of the loop are asked together.
            self._loop.soon(self._start)

    def _start(self) -> None:
        questions, self._waiting = self._waiting, []
        units = sorted({unit for unit, _ in questions})
        deliver = partial(self._deliver, questions)
        run = partial(_show, self._loop, units, deliver, user=self._user)
        threading.Thread(target=run, daemon=True).start()

    def _deliver(self, questions: list[tuple[str, Answer]], shown: Shown, error: str) -> None:
        self._busy = False
        self.error = error
        for unit, answer in questions:
            answer(read_facts(shown[unit]) if unit in shown else None)
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.soon(self._start)


def _show(
    loop: Loop, units: list[str], deliver: Callable[[Shown, str], None], *, user: bool
) -> None:
    """Ask systemd; called in the thread."""
    from nomarr_systemd.systemd.manager import Manager  # large, and seldom needed
    from nomarr_systemd.systemd.systemctl import ManagerError

    shown: Shown = {}
    error = ""
    try:
        with closing(Manager(user=user)) as manager:
            shown = manager.show(units, PROPERTIES)
    except (ManagerError, ValueError) as problem:
        error = str(problem) or type(problem).__name__
    loop.post(partial(deliver, shown, error))
