"""What the supervisor settled about the jobs of a dead run, and root's part of it (DESIGN §12).

A job that was at fault is no worker's: restarts are given back. A pool whose crash policy says so
fails as a whole: its workers are stopped and masked. Nothing else is taken from the supervisor's
word, and a pool is failed only where its own settings allow it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.errors import KeyExists, NoSuchWorker
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import escape
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.host import clock
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.live import client
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.systemd import journal
from nomarr_systemd.systemd.manager import Manager

RECENT_MS: Final = 600_000  # how far back the reconciler asks again
PATIENCE_S: Final = 30.0  # with a run that is not settled; then it is the reconciler's
QUARANTINES: Final = "job_crashes"  # those whose restarts were given back, by the last run
_KEPT_MS: Final = 30 * 86_400_000
_MAX_REFUNDS: Final = 100


class Awaited(NamedTuple):
    """A run that is not settled yet."""

    component: Component
    record: Record
    cause: str
    until: float


class Outcomes:
    """Asks what became of jobs until it is known, and acts on it. Everything may be done twice."""

    def __init__(
        self, paths: Paths, config: Config, manager: Manager, ledger: Ledger, store: Store
    ) -> None:
        self._paths = paths
        self._config = config
        self._manager = manager
        self._ledger = ledger
        self._store = store
        self.awaited: dict[str, Awaited] = {}  # by invocation

    def tell(self, deaths: Sequence[tuple[Component, Record, str]]) -> bool:
        """Report deaths, with their causes, and act on what became of their jobs. False if the
        supervisor does not answer."""
        request = {
            "op": "crashed",
            "deaths": [
                {
                    "component": component.component_id,
                    "invocation": record.invocation,
                    "cause": cause,
                    "decision": f"{record.action}: {record.text}",
                    "blamed": is_blamed(record),
                    "failed": False,
                }
                for component, record, cause in deaths
            ],
        }
        answer = client.ask(self._paths.live, request, timeout_s=2.0) if deaths else {}
        outcomes = answer.get("outcomes")
        if not isinstance(outcomes, dict):
            return False
        for component, record, cause in deaths:
            self._take(component, record, cause, outcomes.get(record.invocation) or {})
        return True

    def _take(
        self, component: Component, record: Record, cause: str, answer: Mapping[str, Any]
    ) -> None:
        """Act on an answer about a run, or remember to ask again."""
        invocation = record.invocation
        if answer.get("settled") is False:
            awaited = Awaited(component, record, cause, monotonic() + PATIENCE_S)
            self.awaited.setdefault(invocation, awaited)
            return
        self.awaited.pop(invocation, None)
        jobs = [escape(str(job)) for job in answer.get("quarantined") or ()][:_MAX_REFUNDS]
        if jobs:
            runs = [str(run) for run in answer.get("refund") or ()][:_MAX_REFUNDS]
            self._give_back(component, invocation, runs, jobs)
        reason = answer.get("fail_pool")
        if isinstance(reason, str) and reason:
            self._fail_pool(component, invocation, escape(reason)[:200])

    def ask_again(self) -> None:
        """About runs that were not settled when it was asked before."""
        now = monotonic()
        for invocation in [name for name, each in self.awaited.items() if each.until < now]:
            del self.awaited[invocation]
        self.tell([each[:3] for each in self.awaited.values()])

    def ask_all(self) -> None:
        """About every run of late that somebody was blamed for: its answer may have got lost."""
        now = clock.now()
        workers = {each.component_id: each for each in self._config.components()}
        deaths = []
        for account in self._ledger.accounts():
            component = workers.get(account.component_id)
            for record in reversed(account.records):
                if component is None or record.action == "reset":
                    break  # what was before does not matter any more
                if age_ms(record.moment, now) > RECENT_MS:
                    break
                if is_blamed(record) and record.invocation:
                    deaths.append((component, record, record.kind))
        self.tell(deaths[::-1])

    def _give_back(
        self, component: Component, invocation: str, runs: Sequence[str], jobs: Sequence[str]
    ) -> None:
        if self._store.get(QUARANTINES, invocation) is not None:
            return
        why = f"job {jobs[0]} was quarantined"
        for worker in self._workers_of(component.pool):
            rules = self._config.find_rules(worker)
            for run in runs:
                self._ledger.refund(worker.component_id, run, rules, why)
        # Told before it is noted: killed in between, it is told again, never not at all.
        journal.write_quarantine(component, jobs, user=self._paths.user)
        now_ms = clock.now().wall_ms
        names = {"job": jobs[0], "jobs": list(jobs), "component_id": component.component_id}
        with contextlib.suppress(KeyExists):
            self._store.insert(QUARANTINES, {"_key": invocation, "wall_ms": now_ms, **names})
        self._store.prune(QUARANTINES, "wall_ms", now_ms - _KEPT_MS)

    def _fail_pool(self, component: Component, invocation: str, reason: str) -> None:
        try:
            pool = self._config.pool_of(component)
        except NoSuchWorker:
            return
        if not _may_fail(pool):
            return
        now = clock.now()
        death = self._ledger.account(component.component_id).find(invocation)
        since_ms = age_ms(death.moment, now) if death else 0
        down = []
        for worker in self._workers_of(pool.name):
            account = self._ledger.account(worker.component_id)
            if account.failed_at_wall_ms is None and not _was_reset(account, since_ms, now):
                down.append(worker)
        if not down:
            return
        for worker in down:
            self._manager.cancel_timer(worker)
            # First the stop: a unit that is masked while it starts keeps its job for ever.
            self._manager.begin_stop(worker.unit)
        self._manager.mask([worker.unit for worker in down])
        journal.write_pool_failure(pool.name, reason)
        for worker in down:
            client.ask(self._paths.live, {"op": "set_failed", "component": worker.component_id})
        with self._store.batch():  # last: whatever is killed before this is done again
            for worker in down:
                text = f"{POOL_FAILED}{reason}"
                self._ledger.mark_failed_permanent(worker.component_id, text)

    def _workers_of(self, pool: str) -> list[Component]:
        return [each for each in self._config.components() if each.pool == pool]


def _was_reset(account: Account, since_ms: int, now: Moment) -> bool:
    """By a person, whose word is the last, after a death that is so long ago."""
    resets = (each for each in account.records if each.action == "reset")
    return any(age_ms(each.moment, now) < since_ms for each in resets)


def is_blamed(record: Record) -> bool:
    """Whether its end counts as a crash."""
    return record.action in ("restart", "fail")


def _may_fail(pool: Pool) -> bool:
    return pool.crash_policy == "fail-pool" or pool.crash_max_retries is not None
