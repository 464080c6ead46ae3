"""What the supervisor settled about the jobs of a dead run, and root's part of it (DESIGN §12).

A job that was at fault is no worker's: restarts are given back. A pool whose crash policy says so
fails as a whole: its workers are stopped and masked. Nothing else is taken from the supervisor's
word, and a pool is failed only where its own settings allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nomarr_systemd.core.config import Config, Pool
from nomarr_systemd.core.errors import NoSuchWorker
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.model import age_ms
from nomarr_systemd.core.quoting import escape
from nomarr_systemd.host import clock, control, journal
from nomarr_systemd.host.manager import Manager
from nomarr_systemd.host.paths import Paths
from nomarr_systemd.ledger import Ledger

RECENT_MS: Final = 600_000  # how far back the reconciler asks again
_MAX_REFUNDS: Final = 100


class Outcomes:
    """Asks what became of jobs until it is known, and acts on it. Everything may be done twice."""

    def __init__(self, paths: Paths, config: Config, manager: Manager, ledger: Ledger) -> None:
        self._paths = paths
        self._config = config
        self._manager = manager
        self._ledger = ledger
        self.awaited: dict[str, Component] = {}  # by invocation

    def take(self, component: Component, invocation: str, answer: Mapping[str, Any]) -> None:
        """Act on an answer about a run, or remember to ask again."""
        if answer.get("settled") is False:
            self.awaited[invocation] = component
            return
        self.awaited.pop(invocation, None)
        jobs = [escape(str(job)) for job in answer.get("quarantined") or ()][:_MAX_REFUNDS]
        if jobs:
            self._give_back(component, answer.get("refund") or (), jobs)
        reason = answer.get("fail_pool")
        if isinstance(reason, str) and reason:
            self._fail_pool(component, invocation, escape(reason)[:200])

    def ask_again(self) -> None:
        """About runs that were not settled when it was asked before."""
        for invocation, component in list(self.awaited.items()):
            self._ask(component, invocation)

    def ask_all(self) -> None:
        """About every run of late that somebody was blamed for: its answer may have got lost."""
        now = clock.now()
        for account in self._ledger.accounts():
            component = self._find(account.component_id)
            for record in reversed(account.records):
                if component is None or record.action == "reset":
                    break  # what was before does not matter any more
                if age_ms(record.moment, now) > RECENT_MS:
                    break
                if record.action in ("restart", "fail") and record.invocation:
                    self._ask(component, record.invocation)

    def _ask(self, component: Component, invocation: str) -> None:
        request = {
            "op": "settlement",
            "component": component.component_id,
            "invocation": invocation.partition("#")[0],
        }
        answer = control.ask(self._paths.live, request)
        if answer:
            self.take(component, invocation, answer)
        else:
            self.awaited.pop(invocation, None)  # nobody there; the reconciler asks again

    def _find(self, component_id: str) -> Component | None:
        wanted = (each for each in self._config.components() if each.component_id == component_id)
        return next(wanted, None)

    def _give_back(self, component: Component, invocations: Any, jobs: list[str]) -> None:
        workers = [each for each in self._config.components() if each.pool == component.pool]
        why = f"job {jobs[0]} was quarantined"
        given = False
        for invocation in list(invocations)[:_MAX_REFUNDS]:
            for worker in workers:
                rules = self._config.find_rules(worker)
                name = worker.component_id
                given |= self._ledger.refund(name, str(invocation), rules, why) is not None
        if given:
            journal.write_quarantine(component, jobs, user=self._paths.user)

    def _fail_pool(self, component: Component, invocation: str, reason: str) -> None:
        try:
            pool = self._config.pool_of(component)
        except NoSuchWorker:
            return
        if not _may_fail(pool):
            return
        workers = [each for each in self._config.components() if each.pool == pool.name]
        down = [
            worker
            for worker in workers
            if self._ledger.account(worker.component_id).failed_at_wall_ms is None
        ]
        if not down:
            return
        for worker in down:
            self._manager.cancel_timer(worker)
            # First the stop: a unit that is masked while it starts keeps its job for ever.
            self._manager.begin_stop(worker.unit)
        self._manager.mask([worker.unit for worker in down])
        for worker in down:
            self._ledger.mark_failed_permanent(worker.component_id, f"its pool failed: {reason}")
            request = {"op": "set_failed", "component": worker.component_id}
            control.ask(self._paths.live, request)
        self._ledger.set_effect(component.component_id, invocation, "done")
        journal.write_pool_failure(pool.name, reason)


def _may_fail(pool: Pool) -> bool:
    return pool.crash_policy == "fail-pool" or pool.crash_max_retries is not None
