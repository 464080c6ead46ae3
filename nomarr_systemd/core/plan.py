"""The controller's one plan: ``plan(world, now)`` returns what is to be done, as a list of intents.

Pure. A world is what ``controller.observe`` saw; ``controller.act`` carries the intents out. The
plan is level-triggered: it does not matter what woke the controller, whether an earlier run of it
was killed, or which of its intents were carried out. ``_TABLE`` is the only place that says when a
unit may start. When all intents have been carried out, the next plan is empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import EX_TEMPFAIL, Death, classify, recall
from nomarr_systemd.core.ids import Component, next_start_job
from nomarr_systemd.core.incident import INCIDENT, LEAST, Incident, open_incident
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.policy import decide_blind
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.world import Outcome, Spooled, Unit, Worker, World

START_JOB_GRACE_MS: Final = 10_000
MASKED: Final = "it is masked, by a decision before this or by hand"
RUNNING: Final = ("active", "activating", "reloading", "deactivating", "maintenance")
NOBODY: Final = "0" * 32  # the invocation of a hypothetical death


# When a unit may start


class Owed(NamedTuple):
    """A restart or a hold on record that is not done, and all that decides about it."""

    record: Record
    unit: Unit
    hold: str
    supervisor_active: bool
    early: bool  # its incident is over, or has elected it: the backoff is cut short
    now: Moment

    @property
    def is_as_left(self) -> bool:
        """True if the unit is still failed in the run that was decided about."""
        run = self.record.invocation.partition("#")[0]
        return self.unit.state == "failed" and self.unit.invocation == run

    @property
    def is_due(self) -> bool:
        return self.early or due_in_ms(self.record, self.now) <= 0


Verdict = Literal["wait", "done", "schedule", "start", "start-job-failed"]
# The first row that is true decides. After a start the next plan finds out whether it succeeded.
_TABLE: Final[tuple[tuple[str, Callable[[Owed], bool], Verdict], ...]] = (
    ("a job of it is queued", lambda owed: owed.unit.has_job, "wait"),
    ("it is masked", lambda owed: owed.unit.masked, "done"),
    ("it is held", lambda owed: bool(owed.hold), "wait"),
    ("it runs", lambda owed: owed.unit.state in RUNNING, "done"),
    ("a person stopped it", lambda owed: not owed.unit.wanted, "done"),
    ("a hold met its last start", lambda owed: owed.unit.kept_down, "start"),
    ("it has moved on since", lambda owed: not owed.is_as_left, "done"),
    (
        "it was started, and did not begin",
        lambda owed: (
            owed.record.effect == "started"
            and age_ms(owed.record.due, owed.now) > START_JOB_GRACE_MS
        ),
        "start-job-failed",
    ),
    ("it was started", lambda owed: owed.record.effect == "started", "wait"),
    (
        "its supervisor is away",
        lambda owed: owed.record.code == EX_TEMPFAIL and not owed.supervisor_active,
        "wait",
    ),
    ("its hold is over", lambda owed: owed.record.action == "hold", "start"),
    ("its backoff is over", lambda owed: owed.is_due, "start"),
    ("its backoff has a timer", lambda owed: owed.unit.timer == "waiting", "wait"),
    ("its backoff has no timer", lambda _owed: True, "schedule"),
)


def judge(owed: Owed) -> tuple[Verdict, str]:
    """Return what to do about a decision that is not done, and why."""
    for why, is_so, verdict in _TABLE:
        if is_so(owed):
            return verdict, why
    raise AssertionError(owed)  # the last line is always true


def due_in_ms(record: Record, now: Moment) -> int:
    """Return what is left of a backoff; across a boot by wall time, and never more than it was."""
    due = record.due
    if due.boot_id == now.boot_id:
        return due.boottime_ms - now.boottime_ms
    return min(due.wall_ms - now.wall_ms, record.delay_ms)


def plan(world: World, now: Moment) -> list[Intent]:
    """Return the intents to carry out; empty if all is done."""
    draft = _Draft(world, now)
    if world.ledger == "sound":
        draft.take_outcomes()
        draft.book_spooled()
        draft.look_after_incidents()
        draft.book_deaths()
    else:
        draft.decide_blind()
    if world.ledger != "away":
        draft.finish_all()
    return draft.intents


def is_blamed(record: Record) -> bool:
    """True if this decision counts the death against the worker."""
    return record.action in ("restart", "fail")


class _Draft:
    """The world as it will be once the intents so far are carried out."""

    def __init__(self, world: World, now: Moment) -> None:
        self.intents: list[Intent] = []
        self._world = world
        self._now = now
        self._workers = {worker.component.component_id: worker for worker in world.workers}
        self._accounts = {
            name: worker.account or Account(name) for name, worker in self._workers.items()
        }
        self._holds = {name: worker.hold for name, worker in self._workers.items()}
        self._incidents = dict(world.incidents)
        self._early: set[str] = set()  # workers whose backoff is cut short

    def _do(self, *intents: Intent) -> None:
        self.intents += intents

    # Jobs: what the supervisor settled

    def take_outcomes(self) -> None:
        for outcome in self._world.outcomes:
            worker = self._workers.get(outcome.component_id)
            if worker is None:
                continue
            if outcome.quarantined and outcome.invocation not in self._world.quarantines:
                why = f"job {outcome.quarantined[0]} was quarantined"
                for other in self._pool(worker.component.pool):
                    for run in outcome.refund:
                        self._refund(other, run, why)
                jobs = outcome.quarantined
                self._do(do.Quarantine(worker.component, outcome.invocation, jobs))
            if outcome.fail_pool:
                self._fail_pool(worker, outcome)
            self._do(do.Clear(worker.component, outcome.invocation))

    def _fail_pool(self, worker: Worker, outcome: Outcome) -> None:
        """Mask all workers of the pool except those that were reset since. The supervisor only
        triggers this check: the crashes that count are those on record."""
        pool = worker.component.pool
        known = self._world.pools.get(pool)
        death = self._accounts[outcome.component_id].find(outcome.invocation)
        if known is None or known.fails_after is None or death is None or not is_blamed(death):
            return
        accounts = [self._accounts[each.component.component_id] for each in self._pool(pool)]
        crashes = sum(each.restart_count + (each.failure_reason is not None) for each in accounts)
        if crashes <= known.fails_after:
            return
        down = []
        for other in self._pool(pool):
            account = self._accounts[other.component.component_id]
            is_reset = _was_reset_since(account, death.moment, self._now)
            if account.failed_at_wall_ms is None and not is_reset:
                down.append(other.component)
        died = f"{outcome.component_id} died ({recall(death.kind, death.code).line})"
        reason = f"{died}: {known.fails_by}, and its workers have crashed {crashes} times"
        if down:
            self._do(do.FailPool(pool, reason))
        why = f"{POOL_FAILED}{reason}"
        for component in down:
            self._do(do.MarkFailed(component, outcome.invocation, why))
            name = component.component_id
            self._accounts[name] = book_keeping.mark_failed(
                self._accounts[name], why, self._now, invocation=outcome.invocation
            )

    def _refund(self, worker: Worker, invocation: str, why: str) -> None:
        name = worker.component.component_id
        account, record = book_keeping.refund(
            self._accounts[name], invocation, worker.rules, self._now, why
        )
        if record is not None:
            self._accounts[name] = account
            self._do(do.Refund(worker.component, invocation, worker.rules, why))

    # Deaths

    def book_spooled(self) -> None:
        """Book what was decided while the ledger was away."""
        for entry in self._world.spooled:
            name = entry.death.component_id
            worker = self._workers.get(name)
            if worker is not None:
                self._accounts[name], _ = book_keeping.book(
                    self._accounts[name], entry.death, entry.decision, worker.rules, entry.at
                )
                self._do(do.BookSpooled(worker.component, entry, worker.rules))

    def book_deaths(self) -> None:
        fresh: dict[str, list[tuple[Worker, Death]]] = defaultdict(list)
        for worker in self._world.workers:
            for death in worker.deaths:
                found = self._recognise(worker, death)
                if found is not None:
                    fresh[worker.component.pool].append((worker, self._excuse(worker, found)))
        for pool, deaths in fresh.items():
            self._find_outage(pool, deaths)
            for worker, death in deaths:
                self._book(worker, death)

    def _recognise(self, worker: Worker, death: Death) -> Death | None:
        """Return the death to book, or None: it is on record.

        A second report of a run after which the unit was started means that the start job failed.
        """
        last = self._accounts[death.component_id].find_last(death.run)
        if last is None:
            return death
        if last.effect == "started" and _is_still_failed(worker.unit, death.run):
            return _start_job(worker, last)
        told = death._replace(invocation=last.invocation)
        is_new = death.run not in self._world.untold
        self._do(
            do.Tell(worker.component, told, last, is_new), do.Clear(worker.component, death.run)
        )
        return None

    def _excuse(self, worker: Worker, death: Death) -> Death:
        """Return the death with its excuse: a hold, or a mask, also one that is still owed. An
        absent supervisor excuses one death in a window: a worker could have killed it."""
        held = self._holds[death.component_id]
        if death.supervisor_away and self._was_excused(worker):
            death = death._replace(supervisor_away=False)
        if held and not held.startswith(INCIDENT):
            return death._replace(held=held)
        owed = self._accounts[death.component_id].unfinished()
        is_masked = worker.unit.masked or any(record.action == "fail" for record in owed)
        return death._replace(held=MASKED) if is_masked else death

    def _was_excused(self, worker: Worker) -> bool:
        """True if the supervisor's absence has excused a death of it within the window."""
        window_ms = worker.rules.window_s * 1000
        return any(
            record.action == "hold"
            and record.code == EX_TEMPFAIL
            and age_ms(record.moment, self._now) < window_ms
            for record in self._accounts[worker.component.component_id].records
        )

    def _book(self, worker: Worker, death: Death) -> None:
        """Decide and book. Only a death of the unit's present run leads to a restart or a mask."""
        component, name = worker.component, death.component_id
        death = self._screen(worker, death)
        current = worker.unit.invocation == death.run
        self._accounts[name], record = book_keeping.record_failure(
            self._accounts[name], death, worker.rules, self._now, current=current
        )
        if record.action == "restart" and record.effect == "scheduled":
            self._schedule(worker, record)
        self._do(
            do.Book(component, death, worker.rules, current, record),
            do.Tell(component, death, record, is_new=True),
            do.Clear(component, death.run),
        )

    def _schedule(self, worker: Worker, record: Record) -> None:
        """A backoff gets its timer before it is booked."""
        left_ms, unit = due_in_ms(record, self._now), worker.unit
        if left_ms > 0 and unit.wanted and not unit.has_job and not unit.masked:
            self._do(do.Schedule(worker.component, self._now.later(left_ms)))
            name = worker.component.component_id
            self._workers[name] = worker._replace(unit=unit._replace(timer="waiting"))

    # Incidents

    def _is_loss(self, worker: Worker, death: Death) -> bool:
        """True unless the death is excused, or its exit status is never restarted."""
        return not death.is_excused and death.code not in worker.rules.never_restart

    def _find_outage(self, pool: str, deaths: Iterable[tuple[Worker, Death]]) -> None:
        """Open an incident if these deaths, with recent ones, make one."""
        known, last = self._world.pools.get(pool), self._incidents.get(pool)
        fresh = [
            death._replace(at=self._now) for worker, death in deaths if self._is_loss(worker, death)
        ]
        if not fresh or known is None or known.workers < LEAST:
            return
        if last is not None and (
            not last.closed or age_ms(last.opened, self._now) < known.window_s * 1000
        ):
            return
        booked = self._world.recent.get(pool, ())
        incident = open_incident(booked, fresh, pool, known.workers, self._now)
        if incident is not None:
            self._incidents[pool] = incident
            self._do(do.OpenIncident(incident))
            self._settle_incident(incident)

    def _screen(self, worker: Worker, death: Death) -> Death:
        """Return the death; if it is part of an incident, mark it so and hold its worker."""
        component, name = worker.component, death.component_id
        incident = self._incidents.get(component.pool)
        if incident is None or incident.closed or not self._is_loss(worker, death):
            return death
        if name == incident.canary:
            incident = self._succeed(incident, worker, death)
            if name == incident.canary:
                return death
        if name not in incident.members:
            incident = incident._replace(members=(*incident.members, name))
            self._incidents[incident.pool] = incident
            self._do(do.Join(incident.pool, name))
        self._hold(worker, incident.text)
        return death._replace(incident=incident.text.removeprefix(f"{INCIDENT} "))

    def _succeed(self, incident: Incident, worker: Worker, death: Death) -> Incident:
        """Elect another canary if this one would not be restarted any more and another would be.

        Each canary uses its own restarts, so that this ends.
        """
        if self._would_restart(worker, death):
            return incident
        for other in self._members(incident):
            thought = Death(other.component.component_id, NOBODY, incident.kind, incident.code)
            if self._is_electable(other) and self._would_restart(other, thought):
                return self._elect(incident, other)
        return incident

    def _would_restart(self, worker: Worker, death: Death) -> bool:
        account = self._accounts[worker.component.component_id]
        record = book_keeping.record_failure(account, death, worker.rules, self._now)[1]
        return record.action == "restart"

    def _is_electable(self, worker: Worker) -> bool:
        held = self._holds[worker.component.component_id]
        return held.startswith(INCIDENT) and not worker.unit.masked and worker.unit.wanted

    def _elect(self, incident: Incident, worker: Worker) -> Incident:
        incident = incident._replace(canary=worker.component.component_id)
        self._incidents[incident.pool] = incident
        self._do(do.Elect(incident.pool, incident.canary))
        self._release(worker)
        return incident

    def _members(self, incident: Incident) -> list[Worker]:
        """All members but the canary."""
        names = (name for name in incident.members if name != incident.canary)
        return [self._workers[name] for name in names if name in self._workers]

    def look_after_incidents(self) -> None:
        """Advance every open incident, then end the holds of closed ones."""
        for incident in list(self._incidents.values()):
            if not incident.closed and incident.pool in self._world.resumed:
                self._close(incident, self._world.resumed[incident.pool])
            elif not incident.closed:
                self._settle_incident(incident)
                self._look_after(incident)
        for worker in self._world.workers:
            incident_or_none = self._incidents.get(worker.component.pool)
            is_open = incident_or_none is not None and not incident_or_none.closed
            if not is_open and self._holds[worker.component.component_id].startswith(INCIDENT):
                self._release(worker)

    def _settle_incident(self, incident: Incident) -> None:
        """Refund the restarts of the first deaths; hold the members that wait for a restart."""
        for name, invocation in incident.refunds:
            if name in self._workers:
                self._refund(self._workers[name], invocation, incident.text)
        for worker in self._members(incident):
            account, unit = self._accounts[worker.component.component_id], worker.unit
            last = account.find_last(unit.invocation) if unit.state == "failed" else None
            if last is not None and last.effect != "done" and last.action in ("restart", "hold"):
                self._hold(worker, incident.text)

    def _look_after(self, incident: Incident) -> None:
        """Close the incident if the canary is healthy; elect another one if nothing will start
        this one; close it if there is none."""
        canary = self._workers.get(incident.canary)  # None: it is no longer configured
        if canary and self._holds[incident.canary].startswith(INCIDENT):
            self._release(canary)  # an election was cut off
        elif canary and not self._is_out(canary):
            if canary.unit.state == "active" and incident.canary in self._world.healthy:
                self._close(incident, f"{incident.canary} is healthy")
        elif others := [each for each in self._members(incident) if self._is_electable(each)]:
            self._elect(incident, others[0])
        else:
            self._close(incident, "no worker is left to try")

    def _is_out(self, canary: Worker) -> bool:
        """True if nothing will start it: masked, stopped, paused, or its decision is done."""
        unit, name = canary.unit, canary.component.component_id
        if unit.masked or (unit.state == "inactive" and not unit.has_job):
            return True
        if unit.state != "failed" or unit.has_job:
            return False
        if self._holds[name] or not unit.wanted:
            return True
        last = self._accounts[name].find_last(unit.invocation)
        return not canary.deaths and last is not None and last.effect == "done"

    def _close(self, incident: Incident, why: str) -> None:
        """Close it. Its members start at once, also those whose backoff began before it."""
        self._incidents[incident.pool] = incident._replace(closed=why)
        self._do(do.Close(incident.pool, why))
        self._early |= {incident.canary, *(name for name, _ in incident.refunds)}

    def _hold(self, worker: Worker, text: str) -> None:
        """Hold a member, unless a person holds it. The text changes with the incident."""
        held = self._holds[worker.component.component_id]
        if not held or (held.startswith(INCIDENT) and held != text):
            self._holds[worker.component.component_id] = text
            self._do(do.Hold(worker.component, text))

    def _release(self, worker: Worker) -> None:
        self._holds[worker.component.component_id] = ""
        self._do(do.Release(worker.component))

    # Decisions that are not done

    def finish_all(self) -> None:
        for name in list(self._workers):
            self._finish_worker(name)

    def _finish_worker(self, name: str) -> None:
        worker, owed = self._workers[name], self._accounts[name].unfinished()
        is_failed = any(record.action == "fail" for record in owed)
        for record in owed:
            if record.action == "fail":
                self._mask(worker, record)
            elif is_failed:
                self._note(worker.component, record.invocation, "done")
            else:
                self._finish(worker, record)

    def _mask(self, worker: Worker, record: Record) -> None:
        component, unit = worker.component, worker.unit
        if self._world.ledger != "sound":
            return  # nothing is masked while that cannot be noted
        if unit.timer != "none":
            self._do(do.CancelTimer(component))
        if not unit.masked:
            if unit.state in RUNNING or unit.has_job:
                # A boot may have started it before the mask. First the stop: a unit that is
                # masked while it starts keeps its start job, and with it the boot, for ever.
                self._do(do.Stop(component))
            self._do(do.Mask(component))
        self._note(component, record.invocation, "done")

    def _finish(self, worker: Worker, record: Record) -> None:
        component, unit = worker.component, worker.unit
        name = component.component_id
        is_active = self._world.supervisor_active
        early = name in self._early
        verdict, _why = judge(Owed(record, unit, self._holds[name], is_active, early, self._now))
        if verdict == "schedule":
            due = self._now.later(due_in_ms(record, self._now))
            self._do(do.Schedule(component, due))
        elif verdict == "start-job-failed":
            self._take_failed_start(worker, record)
        elif verdict != "wait":
            is_started = verdict == "start"
            if is_started:
                self._do(do.Start(component, unit.invocation))
            # A decision that cannot be noted may have been replaced by one of decide_blind.
            if unit.timer != "none" and (is_started or self._world.ledger == "sound"):
                self._do(do.CancelTimer(component))
            self._note(component, record.invocation, "started" if is_started else "done")

    def _take_failed_start(self, worker: Worker, record: Record) -> None:
        death = _start_job(worker, record)
        if self._world.ledger == "sound":
            self._book(worker, self._excuse(worker, death))
            self._finish_worker(death.component_id)
        elif all(entry.death.invocation != death.invocation for entry in self._world.spooled):
            self._spool(worker, death)

    def _note(self, component: Component, invocation: str, effect: str) -> None:
        if self._world.ledger == "sound":
            self._do(do.Note(component, invocation, effect))

    # Without a ledger that can be written

    def decide_blind(self) -> None:
        """Restart after the longest backoff, never mask, and spool each death."""
        spooled = {entry.death.run: entry for entry in self._world.spooled}
        for worker in self._world.workers:
            # Deaths that only the supervisor has to be told are booked already.
            deaths = [each for each in worker.deaths if each.run not in self._world.untold]
            for death in deaths:
                last = self._accounts[death.component_id].find_last(death.run)
                if last and last.effect == "started" and _is_still_failed(worker.unit, death.run):
                    self._spool(worker, self._excuse(worker, _start_job(worker, last)))
                elif last:
                    self._do(do.Clear(worker.component, death.run))
                elif death.run not in spooled:
                    self._spool(worker, self._excuse(worker, death))
            unit, held = worker.unit, self._holds[worker.component.component_id]
            entry = spooled.get(unit.invocation)
            if held or not _is_still_failed(unit, unit.invocation) or not unit.wanted:
                continue
            if entry is not None and entry.decision.action == "restart":
                self._restart_blind(worker, entry.at.later(entry.decision.delay_ms))
            elif worker.account is None and not deaths and (worker.rang or unit.timer == "elapsed"):
                # Its timer shows that its restart was booked before the ledger went away.
                self._do(do.Start(worker.component, unit.invocation))

    def _spool(self, worker: Worker, death: Death) -> None:
        at = death.at or self._now
        entry = Spooled(death, decide_blind(death, worker.rules), at)
        self._do(do.Spool(worker.component, entry), do.Clear(worker.component, death.run))
        unit = worker.unit
        if entry.decision.action == "restart" and _is_still_failed(unit, death.run) and unit.wanted:
            self._restart_blind(worker, at.later(entry.decision.delay_ms))

    def _restart_blind(self, worker: Worker, due: Moment) -> None:
        left_ms = due.boottime_ms - self._now.boottime_ms
        if due.boot_id != self._now.boot_id or left_ms <= 0:
            self._do(do.Start(worker.component, worker.unit.invocation))
        elif worker.unit.timer != "waiting":
            self._do(do.Schedule(worker.component, due))

    def _pool(self, pool: str) -> list[Worker]:
        return [each for each in self._workers.values() if each.component.pool == pool]


def _is_still_failed(unit: Unit, run: str) -> bool:
    """True if the unit is still failed in this run, not masked, and has no job queued."""
    return (
        unit.state == "failed" and unit.invocation == run and not unit.masked and not unit.has_job
    )


def _start_job(worker: Worker, last: Record) -> Death:
    """Return the death for a start that was due and did not change the unit."""
    return classify(
        "",
        start_job=True,
        component_id=worker.component.component_id,
        invocation=next_start_job(last.invocation),
        at=last.due,
    )


def _was_reset_since(account: Account, then: Moment, now: Moment) -> bool:
    """True if a person reset the worker after that moment."""
    since_ms = age_ms(then, now)
    return any(
        each.action == "reset" and age_ms(each.moment, now) < since_ms for each in account.records
    )
