"""What follows from a change of a worker's health: log lines, kills, crash events, and questions to
systemd whether it agrees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from nomarr_systemd.core.death import LABELS
from nomarr_systemd.core.health import Transition
from nomarr_systemd.host.log import INFO, NOTICE, WARNING, RateLimit, log
from nomarr_systemd.supervisor import disagreement
from nomarr_systemd.supervisor.announcer import Announcer
from nomarr_systemd.supervisor.kill import Killer
from nomarr_systemd.supervisor.run_state import RunState
from nomarr_systemd.supervisor.unit_queries import UnitQueries
from nomarr_systemd.supervisor.workers import Crash, Deadlines, Worker


class HealthActions:
    """``follow`` is called with the transitions of each step."""

    def __init__(
        self,
        deadlines: Deadlines,
        queries: UnitQueries,
        killer: Killer,
        run_state: RunState,
        announcer: Announcer,
    ) -> None:
        self._deadlines = deadlines
        self._queries = queries
        self._killer = killer
        self._run_state = run_state
        self._announcer = announcer
        self._rate = RateLimit()

    def follow(self, worker: Worker, transitions: Sequence[Transition]) -> None:
        for old, new, context in transitions:
            fields = {"component": worker.component_id, "was": old}
            if new == "dead":
                log(NOTICE, "is dead", cause=context, **fields)
                self._follow_death(worker, context)
                continue
            # A worker can report unhealthy and healthy in turn as fast as it can write.
            self._rate.log(INFO if new != "failed" else NOTICE, f"is {new}", **fields)
            if new == "unhealthy" and worker.state.misses:
                self._ask_systemd(worker)
        # While a worker stays healthy, its deadline moves later only, and its timer finds that.
        if transitions or worker.armed is None or worker.state.status != "healthy":
            self._deadlines.arm(worker)

    def check_for_frames(self, worker: Worker, invocation: str) -> None:
        """If a run has not sent a frame yet, ask systemd about it."""
        if worker.invocation == invocation and not worker.frames:
            self._ask_systemd(worker)

    def note_crash(self, worker: Worker, run: str, cause: str) -> None:
        """Record and announce that a run of the worker has crashed."""
        text = LABELS[cause].line if cause in LABELS else "ended without notice: its pipe closed"
        worker.crash = Crash(time.time_ns() // 1_000_000, text, run)
        self._run_state.keep(worker)
        self._announcer.tell_crash(worker, cause)

    def _follow_death(self, worker: Worker, cause: str) -> None:
        run = worker.invocation or (worker.ended.invocation if worker.ended else "")
        self.note_crash(worker, run, cause)
        if cause in LABELS:
            # Its process is ended, so that systemd reports the death to the controller.
            self._ask_systemd(worker)
            self._killer.kill(worker, cause)

    def _ask_systemd(self, worker: Worker) -> None:
        compare = partial(self._compare, worker, worker.invocation)
        self._queries.ask(worker.component.unit, compare)

    def _compare(self, worker: Worker, invocation: str, facts: disagreement.Facts | None) -> None:
        if facts is None:
            self._rate.log(
                WARNING,
                "systemd did not answer a question about the worker",
                component=worker.component_id,
                error=self._queries.error,
            )
            return
        if worker.invocation != invocation:
            return
        is_silent = worker.state.misses or not worker.frames or worker.state.status == "dead"
        if is_silent and worker.disagreement != disagreement.HUNG:
            name = disagreement.compare(
                facts,
                worker.heard_at,
                frames=worker.frames,
                invocation=invocation,
                staleness_s=worker.rules.staleness_interval_s,
            )
            if name and name != worker.disagreement:
                log(NOTICE, f"systemd and the pipe disagree: {name}", component=worker.component_id)
            worker.disagreement = name
            self._announcer.tell_worker(worker)
