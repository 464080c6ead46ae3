"""Ending a worker that is dead to us: by a pidfd, so that no other process can be hit.

Whom to end is asked of systemd, and asked again when the pidfd is open: what was true of the
number then is true of the process that the pidfd holds. Frames are never believed here.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from nomarr_systemd.supervisor.disagreement import Facts
from nomarr_systemd.supervisor.log import ERROR, NOTICE, WARNING, log
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.unit_queries import Answer

GRACE_S: Final = 10.0  # from SIGABRT to SIGKILL: stacks and cores take their time
RETRY_S: Final = 5.0
_LIVING: Final = ("active", "activating", "reloading")


class Target(NamedTuple):
    """One run of one unit. ``on_strike`` is called before the first signal is sent,
    ``on_answer`` with what systemd said."""

    unit: str
    invocation: str
    component_id: str
    on_strike: Callable[[], None]
    on_answer: Callable[[Facts], None]


def is_to_be_ended(facts: Facts, invocation: str) -> bool:
    """Whether this run still has a main process, and nobody is stopping it already."""
    return facts.pid > 1 and facts.invocation == invocation and facts.active in _LIVING


def open_process(pid: int) -> int | None:
    """A pidfd, or None when there is no such process any more."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def strike(pidfd: int, *signals: signal.Signals) -> bool:
    """Send signals; False when the process is gone. PermissionError is the caller's."""
    try:
        for number in signals:
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


class Killer:
    """``ask(unit, answer)`` gives systemd's facts; everything happens in the loop."""

    def __init__(
        self, loop: Loop, ask: Callable[[str, Answer], None], *, grace_s: float = GRACE_S
    ) -> None:
        self._loop = loop
        self._ask = ask
        self._grace_s = grace_s
        self._wanted: set[str] = set()  # invocations that are to end

    def condemn(self, target: Target) -> None:
        """SIGABRT, then SIGCONT in case it is stopped, then SIGKILL after a grace."""
        if target.invocation and target.invocation not in self._wanted:
            self._wanted.add(target.invocation)
            self._ask(target.unit, partial(self._aim, target))

    def pardon(self, invocation: str) -> None:
        """The run is over: nothing is left to end."""
        self._wanted.discard(invocation)

    def _aim(self, target: Target, facts: Facts | None) -> None:
        if target.invocation not in self._wanted:
            return
        if facts is None:
            self._ask_later(target)
            return
        target.on_answer(facts)
        if not is_to_be_ended(facts, target.invocation):
            self.pardon(target.invocation)
            return
        pidfd = open_process(facts.pid)
        if pidfd is None:
            self.pardon(target.invocation)
        else:
            self._ask(target.unit, partial(self._shoot, target, facts, pidfd))

    def _shoot(self, target: Target, before: Facts, pidfd: int, facts: Facts | None) -> None:
        if target.invocation not in self._wanted:
            os.close(pidfd)
            return
        if facts is None:
            os.close(pidfd)
            self._ask_later(target)
            return
        if facts.pid != before.pid or not is_to_be_ended(facts, target.invocation):
            os.close(pidfd)
            self.pardon(target.invocation)
            return
        target.on_strike()
        log(NOTICE, "sending SIGABRT", component=target.component_id, pid=facts.pid)
        try:
            alive = strike(pidfd, signal.SIGABRT, signal.SIGCONT)
        except PermissionError:
            log(
                ERROR,
                "may not signal the worker: does it run as another user?",
                component=target.component_id,
                pid=facts.pid,
            )
            alive = False
        if not alive:
            os.close(pidfd)
            return
        timer = self._loop.at(
            self._loop.now + self._grace_s, partial(self._finish, target, pidfd, facts.pid)
        )
        self._loop.watch(pidfd, select.EPOLLIN, partial(self._see_end, pidfd, timer))

    def _finish(self, target: Target, pidfd: int, pid: int) -> None:
        log(WARNING, "SIGABRT was not enough: SIGKILL", component=target.component_id, pid=pid)
        strike(pidfd, signal.SIGKILL)

    def _see_end(self, pidfd: int, timer: Timer, _events: int) -> None:
        timer.cancel()
        self._loop.forget(pidfd)
        os.close(pidfd)

    def _ask_later(self, target: Target) -> None:
        log(WARNING, "systemd does not say whom to end", component=target.component_id)

        def again() -> None:
            if target.invocation in self._wanted:
                self._ask(target.unit, partial(self._aim, target))

        self._loop.at(self._loop.now + RETRY_S, again)
