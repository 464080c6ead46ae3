"""Ends the process of a worker whose health is dead, by a pidfd, so that no other is signalled.

systemd is asked for the main process, and asked again when the pidfd is open: if it still names
the same pid, the pidfd holds that process. Pids in frames are never used.
"""

from __future__ import annotations

import os
import select
import signal
from functools import partial
from typing import Final

from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.host.log import ERROR, NOTICE, WARNING, log
from nomarr_systemd.supervisor.disagreement import Facts
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.run_state import RunState
from nomarr_systemd.supervisor.unit_queries import UnitQueries
from nomarr_systemd.supervisor.workers import Worker

GRACE_S: Final = 10.0  # from SIGABRT to SIGKILL: stack traces and core dumps take time
RETRY_S: Final = 5.0
_LIVING: Final = ("active", "activating", "reloading")


class Target(NamedTuple):
    """One run of a worker, and why it is ended."""

    worker: Worker
    invocation: str
    cause: str


def is_running(facts: Facts, invocation: str) -> bool:
    """Whether this run still has a main process and is not being stopped."""
    return facts.pid > 1 and facts.invocation == invocation and facts.active in _LIVING


def open_process(pid: int) -> int | None:
    """A pidfd; None if the process is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def send_signals(pidfd: int, *signals: signal.Signals) -> bool:
    """Send signals; False if the process is gone. May raise PermissionError."""
    try:
        for number in signals:
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


class Killer:
    """Everything happens in the loop. Before the first signal the run gets its label, which is
    written to the run state: the controller may ask for it right after the death."""

    def __init__(
        self, loop: Loop, queries: UnitQueries, run_state: RunState, *, grace_s: float = GRACE_S
    ) -> None:
        self._loop = loop
        self._queries = queries
        self._run_state = run_state
        self._grace_s = grace_s
        self._wanted: set[str] = set()  # invocations that are to end

    def kill(self, worker: Worker, cause: str) -> None:
        """Send SIGABRT, then SIGCONT in case it is stopped, then SIGKILL after ``grace_s``."""
        target = Target(worker, worker.invocation, cause)
        if target.invocation and target.invocation not in self._wanted:
            self._wanted.add(target.invocation)
            self._ask(target)

    def forget(self, invocation: str) -> None:
        """Forget a run that has ended: there is nothing left to kill."""
        self._wanted.discard(invocation)

    def _ask(self, target: Target) -> None:
        if target.invocation in self._wanted:
            self._queries.ask(target.worker.component.unit, partial(self._aim, target))

    def _aim(self, target: Target, facts: Facts | None) -> None:
        if target.invocation not in self._wanted:
            return
        if facts is None:
            self._ask_later(target)
            return
        pidfd = open_process(facts.pid) if is_running(facts, target.invocation) else None
        if pidfd is None:
            self.forget(target.invocation)
            return
        unit = target.worker.component.unit
        self._queries.ask(unit, partial(self._strike, target, facts.pid, pidfd))

    def _strike(self, target: Target, pid: int, pidfd: int, facts: Facts | None) -> None:
        if not self._is_confirmed(target, pid, facts):
            os.close(pidfd)
            return
        target.worker.label = target.cause
        self._run_state.keep(target.worker)
        component = target.worker.component_id
        log(NOTICE, "sending SIGABRT", component=component, pid=pid, cause=target.cause)
        try:
            is_alive = send_signals(pidfd, signal.SIGABRT, signal.SIGCONT)
        except PermissionError as error:
            log(ERROR, "cannot signal the worker", component=component, pid=pid, error=error)
            is_alive = False
        if not is_alive:
            os.close(pidfd)
            return
        finish = partial(self._finish, component, pidfd, pid)
        timer = self._loop.at(self._loop.now + self._grace_s, finish)
        self._loop.watch(pidfd, select.EPOLLIN, partial(self._see_end, pidfd, timer))

    def _is_confirmed(self, target: Target, pid: int, facts: Facts | None) -> bool:
        if target.invocation not in self._wanted:
            return False
        if facts is None:
            self._ask_later(target)
            return False
        if facts.pid != pid or not is_running(facts, target.invocation):
            self.forget(target.invocation)
            return False
        return target.worker.invocation == target.invocation

    def _finish(self, component: str, pidfd: int, pid: int) -> None:
        log(WARNING, "SIGABRT was not enough: sending SIGKILL", component=component, pid=pid)
        send_signals(pidfd, signal.SIGKILL)

    def _see_end(self, pidfd: int, timer: Timer, _events: int) -> None:
        timer.cancel()
        self._loop.forget(pidfd)
        os.close(pidfd)

    def _ask_later(self, target: Target) -> None:
        log(
            WARNING,
            "systemd did not name the process to end; retrying",
            component=target.worker.component_id,
            error=self._queries.error,
        )
        self._loop.at(self._loop.now + RETRY_S, partial(self._ask, target))
