"""Asking systemd about units without waiting for the answer: a thread asks all questions that
have gathered at once, and leaves when there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

from nomarr_systemd.supervisor.disagreement import PROPERTIES, Facts, read_facts
from nomarr_systemd.supervisor.loop import Loop

Answer = Callable[[Facts | None], None]  # None: systemd did not answer


class Inquiry:
    """``ask`` calls back in the loop."""

    def __init__(self, loop: Loop, *, user: bool) -> None:
        self._loop = loop
        self._user = user
        self._waiting: list[tuple[str, Answer]] = []
        self._busy = False
        self.error = ""

    def ask(self, unit: str, answer: Answer) -> None:
        self._waiting.append((unit, answer))
        if not self._busy:
            self._busy = True
            # Those who ask in the same turn are asked about together.
            self._loop.soon(self._start)

    def _start(self) -> None:
        questions, self._waiting = self._waiting, []
        threading.Thread(target=self._run, args=(questions,), daemon=True).start()

    def _run(self, questions: list[tuple[str, Answer]]) -> None:
        from nomarr_systemd.systemd.manager import Manager, ManagerError  # dear, and seldom needed

        units = sorted({unit for unit, _ in questions})
        shown: dict[str, dict[str, str]] = {}
        try:
            with closing(Manager(user=self._user)) as manager:
                shown = manager.show(units, PROPERTIES)
            self.error = ""
        except (ManagerError, ValueError) as error:
            self.error = str(error)
        self._loop.post(lambda: self._deliver(questions, shown))

    def _deliver(
        self, questions: list[tuple[str, Answer]], shown: dict[str, dict[str, str]]
    ) -> None:
        self._busy = False
        for unit, answer in questions:
            answer(read_facts(shown[unit]) if unit in shown else None)
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.soon(self._start)
