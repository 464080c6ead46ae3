"""Questions to systemd about units, without waiting for the answer: a helper asks all questions
that were collected, and ends some seconds after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor.disagreement import PROPERTIES, Facts, read_facts
from nomarr_systemd.supervisor.helper import Channel, Helper
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.systemd.stop_intent import was_asked_before, was_asked_to_stop

Shown = dict[str, dict[str, str]]  # properties by unit
Questions = Mapping[str, Sequence[str]]  # names of properties by unit
LINGER_S: Final = 5.0  # the helper stays after an answer
PATIENCE_S: Final = 90.0  # longer than systemd may take; then the helper hangs
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
        self._asked: Questions = {}
        self._readers: list[Callable[[Shown], None]] = []
        self._tries = 0
        self._helper: Helper | None = None
        self._timer: Timer | None = None

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
        self._asked = {unit: tuple(names) for unit, names in merged.items()}
        self._readers = [read for _, read in asked]
        self._tries = 0
        self._send()

    def _send(self) -> None:
        self._tries += 1
        if self._helper is None:
            main = partial(_serve, user=self._user)
            try:
                self._helper = Helper(self._loop, main, self._take, self._lose)
            except OSError as error:
                self._deliver({}, str(error))
                return
        self._set_timer(PATIENCE_S, self._helper.give_up)
        self._helper.send([self._asked])

    def _take(self, message: list[Any], _body: bytes) -> None:
        self._set_timer(LINGER_S, self._rest)
        self._deliver(*message)

    def _lose(self) -> None:
        """Ask once more, in another helper."""
        self._helper = None
        if self._busy and self._tries < 2:
            self._send()
        elif self._busy:
            self._deliver({}, "the process that asks systemd was killed, or hung")

    def _rest(self) -> None:
        if self._helper is not None:
            self._helper.leave()
            self._helper = None

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.at(self._loop.now + delay_s, callback)

    def _deliver(self, shown: Shown, error: str) -> None:
        self._busy = False
        self.error = error
        readers, self._readers = self._readers, []
        for read in readers:
            read(shown)
        if self._waiting and not self._busy:
            self._busy = True
            self._loop.soon(self._start)


def _was_stopped(invocation: str, unit: dict[str, str], wanted: dict[str, str]) -> bool:
    if unit["InvocationID"] == invocation:
        return was_asked_to_stop(unit, wanted)
    return was_asked_before(time.monotonic_ns() // 1000, wanted)  # another run has begun


def _serve(channel: Channel, *, user: bool) -> None:
    """Ask systemd, in the helper."""
    from nomarr_systemd.systemd.manager import Manager  # for the helper only

    while (message := channel.read()) is not None:
        shown: Shown = {}
        error = ""
        try:
            with closing(Manager(user=user)) as manager:
                shown = manager.show_each(message[0])
        except Exception as problem:  # the outermost: those who asked wait for an answer
            error = str(problem) or type(problem).__name__
        channel.send([shown, error])
