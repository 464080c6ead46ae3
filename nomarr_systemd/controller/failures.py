"""Failures in, decisions and effects out: each is examined, booked, and its decision carried out.

Nothing here sleeps a backoff or judges anybody's health. When it is called is ``main``'s matter;
what got lost on the way is found by ``reconcile``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.complaints import apart, complain
from nomarr_systemd.controller.death import Death
from nomarr_systemd.controller.incidents import Incidents
from nomarr_systemd.controller.outcomes import Outcomes
from nomarr_systemd.controller.pending import Pending, Waiting, due_file
from nomarr_systemd.controller.stops import Facts, find_stopped, has_mark
from nomarr_systemd.core.death import EX_TEMPFAIL, Failure, classify
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component, next_start_job
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.policy import decide_blind
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.host.files import locked, remove
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.incidents import Breaker
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.spool import Spool, Spooled
from nomarr_systemd.live import client
from nomarr_systemd.store.open import open_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.systemd import journal
from nomarr_systemd.systemd.manager import (
    SHUTDOWN,
    SUPERVISOR,
    Manager,
    Masked,
    Refused,
    monotonic_ms,
)

# The supervisor kills by these, and has a word for why.
_OWN_SIGNALS: Final = frozenset((-6, -9))
RUN_FACTS: Final = (
    "ActiveState",
    "LoadState",
    "InvocationID",
    "Job",
    "ActiveEnterTimestampMonotonic",
    "ExecMainStartTimestampMonotonic",
    "ExecMainExitTimestampMonotonic",
)
MASKED: Final = "it is masked, by a decision before this or by hand"
Effect = tuple[str, str, str]  # the component, the invocation, how far its decision has got


class Controller:
    """One installation's failures. Its methods may be called by any number of processes."""

    def __init__(self, paths: Paths, config: Config, manager: Manager) -> None:
        self.paths = paths
        self.config = config
        self.manager = manager
        self.spool = Spool(paths.spool)
        self._host = host_of(config.store.url)
        self._store: Store | None = None
        self._incidents: Incidents | None = None
        self._outcomes: Outcomes | None = None

    @property
    def store(self) -> Store:
        """Opened when it is needed: a store that is away must not keep the controller away."""
        if self._store is None:
            settings = self.config.store
            self._store = open_store(
                settings.url,
                "policy",
                password_file=settings.password_file,
                ca_file=settings.ca_file,
                public_directory=self.paths.public,
                public_host=self._host,
            )
        return self._store

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store, host=self._host)

    @property
    def incidents(self) -> Incidents:
        if self._incidents is None:
            known = (self.paths, self.config, self.manager)
            self._incidents = Incidents(*known, self.ledger, Breaker(self.store, self._host))
        return self._incidents

    @property
    def outcomes(self) -> Outcomes:
        if self._outcomes is None:
            known = (self.paths, self.config, self.manager)
            self._outcomes = Outcomes(*known, self.ledger, self.store)
        return self._outcomes

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        self.manager.close()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time: what is done twice does no harm, but is told twice."""
        with locked(os.path.join(os.path.dirname(self.paths.pending), "lock")):
            yield

    def handle(self, waiting: Waiting) -> None:
        """Book failures, carry out what was decided, finish backoffs, and clear it all away."""
        kept = self.book(self.examine(waiting.failures))
        for each in waiting.failures:
            if each.invocation not in kept:
                remove(os.path.join(self.paths.pending, each.invocation))
        for component in waiting.due:
            with apart(component):
                self.finish_backoff(component)
            remove(due_file(self.paths.pending, component))

    def examine(self, pending: Sequence[Pending]) -> list[Death]:
        """What systemd and the supervisor know about each; one question for all of them."""
        if not pending:
            return []
        units = sorted({each.component.unit for each in pending})
        facts = self.manager.show(units, RUN_FACTS)
        shutdown = self.manager.show([SHUTDOWN], ["Job", "ActiveState"])[SHUTDOWN]
        ending = bool(shutdown["Job"]) or shutdown["ActiveState"] == "active"
        stopped = find_stopped(self.paths, pending, facts)
        configured = set(self.config.components())
        deaths = []
        for each in pending:
            shown = facts[each.component.unit]
            running = shown["ActiveState"] in ("active", "activating", "reloading")
            if each.result == "success" or (running and shown["InvocationID"] == each.invocation):
                continue  # a hook that ran again and saw a newer run
            if each.component not in configured:
                continue  # started by hand; a mask would outlast that, and nobody look for it
            deaths.append(self._judge(each, shown, each.invocation in stopped, ending))
        return deaths

    def _judge(self, each: Pending, unit: Facts, stop_asked: bool, shutting_down: bool) -> Death:
        component, invocation = each.component, each.invocation
        run_ms = _run_ms(unit) if unit["InvocationID"] == invocation else None
        death = classify(
            each.result, each.exit_code, each.exit_status, stop_asked=stop_asked, run_ms=run_ms
        )
        if death.code in _OWN_SIGNALS and not stop_asked:
            request = {
                "op": "label",
                "component": component.component_id,
                "invocation": invocation,
            }
            label = client.ask(self.paths.live, request).get("label")
            if isinstance(label, str) and label:
                death = classify(
                    each.result, each.exit_code, each.exit_status, label=label, run_ms=run_ms
                )
        failure = Failure(
            invocation,
            death.kind,
            death.code,
            run_ms,
            stop_asked,
            shutting_down,
            self.read_hold(component) or (MASKED if unit["LoadState"] == "masked" else ""),
            death.code == EX_TEMPFAIL and self._was_away(unit),
        )
        is_same = unit["InvocationID"] == invocation and unit["ActiveState"] == "failed"
        return Death(component, failure, death, is_same and not unit["Job"])

    def _was_away(self, unit: Facts) -> bool:
        """Whether the supervisor is not there, or is newer than the run that missed it."""
        asked = ["ActiveState", "ActiveEnterTimestampMonotonic"]
        shown = self.manager.show([SUPERVISOR], asked)[SUPERVISOR]
        since = int(shown["ActiveEnterTimestampMonotonic"] or 0)
        started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
        return shown["ActiveState"] != "active" or since > started

    def read_hold(self, component: Component) -> str:
        return Holds(self.paths.hold).read(component)

    def book(self, deaths: Sequence[Death]) -> set[str]:
        """Put them on record in one go, then carry the decisions out.

        Returns what could be put on record nowhere, and is to be looked at again.
        """
        if not deaths:
            return set()
        try:
            deaths = [self._as_start_job(death) for death in deaths]
            deaths = self.incidents.screen(deaths)
            booked = self.ledger.record_failures(
                (
                    death.component.component_id,
                    death.failure,
                    self.config.find_rules(death.component),
                )
                for death in deaths
            )
        except StoreError as error:
            complain(f"the store is away ({error}): {len(deaths)} failures are spooled")
            return self._spool(deaths)
        results = list(zip(deaths, booked, strict=True))
        told = [(death, record) for death, (record, fresh) in results if fresh or _is_new(record)]
        effects = self._act([(death.component, record) for death, (record, _) in results])
        # Told before the effects are noted: killed in between, it is told again, never not at all.
        for death, record in told:
            journal.write_decision(death.component, record, death.exit.line, user=self.paths.user)
        self.ledger.set_effects(effects)
        for death, record in told:
            self._tell_supervisor(death, record)
        return set()

    def _as_start_job(self, death: Death) -> Death:
        """A second report of a run whose restart was due: the start job itself has failed.

        Unless the unit has moved on: then it is the first report, left by a controller that was
        killed before it cleared it away.
        """
        if not death.unmoved:
            return death
        account = self.ledger.account(death.component.component_id)
        last = account.find_last(death.failure.invocation)
        if last is None or last.action != "restart" or last.effect != "started":
            return death
        job = classify("", start_job=True)
        name = next_start_job(last.invocation)
        failure = death.failure._replace(invocation=name, kind=job.kind, code=job.code, run_ms=None)
        return Death(death.component, failure, job)

    def carry_out(self, decisions: Iterable[tuple[Component, Record]]) -> None:
        """Do what was decided and is not done, and note how far it got."""
        self.ledger.set_effects(self._act(decisions))

    def _act(self, decisions: Iterable[tuple[Component, Record]]) -> list[Effect]:
        """Carry decisions out, many masks with one reload; what each has come to."""
        effects = []
        masks = []
        for component, record in decisions:
            if record.effect == "done":
                continue
            if record.action == "fail":
                masks.append((component, record))
            elif record.action == "restart" and record.effect == "pending":
                with apart(component):
                    effect = self._schedule(component, record)
                    effects.append((component.component_id, record.invocation, effect))
        for component, record in self._mask(masks):
            request = {"op": "set_failed", "component": component.component_id}
            client.ask(self.paths.live, request)
            effects.append((component.component_id, record.invocation, "done"))
        return effects

    def _mask(self, decisions: list[tuple[Component, Record]]) -> list[tuple[Component, Record]]:
        """Those of them that could be masked: all with one reload, or else one by one."""
        if not decisions:
            return []
        try:
            self.manager.mask([component.unit for component, _ in decisions])
        except Refused:
            masked = []
            for component, record in decisions:
                with apart(component):
                    self.manager.mask([component.unit])
                    masked.append((component, record))
            return masked
        return decisions

    def _schedule(self, component: Component, record: Record) -> str:
        due_in_ms = _due_in_ms(record, clock.now())
        if due_in_ms <= 0:
            return self._restart(component, record)
        self.manager.schedule_restart(component, monotonic_ms() + due_in_ms)
        return "scheduled"

    def _restart(self, component: Component, record: Record) -> str:
        """Start the unit, if that is still wanted; if not, it is no longer owed."""
        if self.read_hold(component):
            return record.effect
        return "started" if self.start_failed(component, record.invocation) else "done"

    def finish_backoff(self, component: Component) -> None:
        """Start a worker whose backoff is over, if that is still wanted.

        Nothing is done about one that is held: its timer stays as it is, elapsed, and the
        reconciler comes back to it when the hold is gone.
        """
        if self.read_hold(component):
            return
        try:
            records = self.ledger.account(component.component_id).records
        except StoreError:
            self._start_blind(component)
            return
        for record in reversed(records):
            if record.action == "restart" and record.effect != "done":
                early = _due_in_ms(record, clock.now()) > 0
                if early and self._is_as_left(component, record.invocation):
                    return  # the word is of an earlier backoff; this one has a timer of its own
                effect = self._restart(component, record)
                self.manager.cancel_timer(component)
                self.ledger.set_effects([(component.component_id, record.invocation, effect)])
                return
        entries, _ = self.spool.read()
        for entry in reversed(entries):
            if entry.component_id == component.component_id and entry.decision.action == "restart":
                self.start_failed(component, entry.failure.invocation)
                return

    def _start_blind(self, component: Component) -> None:
        """While the store is away: the timer was made for a restart, and its end says so."""
        shown = self.manager.show([component.unit], ["InvocationID"])[component.unit]
        if not has_mark(self.paths, shown["InvocationID"]):
            self.start_failed(component, shown["InvocationID"])

    def start_failed(self, component: Component, invocation: str) -> bool:
        """Start the unit if it still is as that failure left it.

        Somebody may have started, stopped, masked or reset it meanwhile: theirs is the last word.
        """
        if not self._is_as_left(component, invocation):
            return False
        try:
            # Of a failed unit the start is the restart; systemctl restart would re-arm the timer.
            self.manager.start(component.unit)
        except Masked:
            return False
        return True

    def _is_as_left(self, component: Component, invocation: str) -> bool:
        asked = ["ActiveState", "LoadState", "InvocationID"]
        shown = self.manager.show([component.unit], asked)[component.unit]
        run = invocation.partition("#")[0]
        is_failed = shown["ActiveState"] == "failed" and shown["InvocationID"] == run
        return is_failed and shown["LoadState"] != "masked"

    def _spool(self, deaths: Iterable[Death]) -> set[str]:
        """Decide without the ledger; what cannot even be spooled, the disk being full, is kept."""
        now = clock.now()
        kept = set()
        for death in deaths:
            component, failure = death.component, death.failure
            decision = decide_blind(failure, self.config.find_rules(component))
            try:
                self.spool.write(Spooled(component.component_id, failure, decision, now))
            except StoreError as error:
                complain(f"{component.instance}: {error}")
                kept.add(failure.invocation)
            with apart(component):
                if decision.action == "restart" and self._is_unscheduled(death):
                    self.manager.schedule_restart(component, monotonic_ms() + decision.delay_ms)
        return kept

    def _is_unscheduled(self, death: Death) -> bool:
        """Whether it lies where it fell: what is kept is looked at again and again."""
        state = self.manager.timer_state(death.component)
        return death.unmoved and state not in ("waiting", "running")

    def _tell_supervisor(self, death: Death, record: Record) -> None:
        self.outcomes.tell([(death.component, record, death.exit.line)])


def _is_new(record: Record) -> bool:
    """Booked by a controller that was killed before it did anything about it."""
    return record.effect == "pending" and record.action in ("restart", "fail")


def _run_ms(unit: Facts) -> int | None:
    """How long the last run of the unit was, by systemd's own clock."""
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    ended = int(unit["ExecMainExitTimestampMonotonic"] or 0)
    return (ended - started) // 1000 if ended >= started > 0 else None


def _due_in_ms(record: Record, now: Moment) -> int:
    """What is left of a backoff; a record of an earlier boot goes by wall time."""
    due = record.due
    if due.boot_id == now.boot_id:
        return due.boottime_ms - now.boottime_ms
    return min(due.wall_ms - now.wall_ms, record.delay_ms)
