"""The controller's one plan: ``plan(world, now)`` returns what is to be done, as a list of intents.

Pure. A world is what ``controller.observe`` saw; ``controller.act`` carries the intents out. The
plan is level-triggered: it does not matter what woke the controller, whether an earlier run of it
was killed, or which of its intents were carried out. ``core.start_table`` is the only place that
says when a unit may start. When all intents have been carried out, the next plan is empty.
"""

from __future__ import annotations

from collections import defaultdict

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.blind_plan import plan_blind, spool
from nomarr_systemd.core.death import DEPENDENCY, Death, recall
from nomarr_systemd.core.draft import Draft, make_failed_start
from nomarr_systemd.core.ids import is_run, parse_component
from nomarr_systemd.core.incident_plan import find_outage, look_after_incidents, screen
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.job import (
    POOL_FAILED,
    describe_failed,
    describe_quarantine,
    find_failed,
)
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.start_table import Owed, due_in_ms, judge, retry_in_ms, turn_in_ms
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import RUNNING, Outcome, Worker, World


def plan(world: World, now: Moment) -> list[Intent]:
    """Return the intents to carry out; empty if all is done."""
    draft = Draft(world, now)
    _end_pauses(draft)
    if world.ledger == "sound":
        _take_outcomes(draft)
        _book_spooled(draft)
        look_after_incidents(draft)
        _book_deaths(draft)
    else:
        plan_blind(draft)
    if world.ledger != "away":
        _finish_all(draft)
        _give_turns_back(draft)
    return draft.intents


def is_blamed(record: Record) -> bool:
    """Return True if this decision counts the death against the worker."""
    return record.action in ("restart", "fail")


# Pauses that are over


def _end_pauses(draft: Draft) -> None:
    """Resume workers whose pause is over: they start although the pause had stopped them, and
    decisions that were owed before it count as done."""
    for worker in draft.world.workers:
        if worker.resumes:
            name, unit = worker.component.component_id, worker.unit
            draft.holds[name] = ""
            draft.do(do.Resume(worker.component, start=not unit.masked))
            if not unit.masked:
                draft.workers[name] = worker._replace(unit=unit._replace(has_job=True))


# Jobs: what the supervisor settled


def _take_outcomes(draft: Draft) -> None:
    for outcome in draft.world.outcomes:
        worker = draft.workers.get(outcome.component_id)
        if worker is None:
            continue
        jobs = outcome.quarantined or outcome.failed
        if jobs:
            describe = describe_quarantine if outcome.quarantined else describe_failed
            why = describe(jobs[0])
            draft.at_fault |= dict.fromkeys(outcome.refund, why)
        if jobs and outcome.invocation not in draft.world.refunded:
            for other in draft.pool(worker.component.pool):
                for run in outcome.refund:
                    draft.refund(other, run, why)
            is_set_aside = bool(outcome.quarantined)
            blame = (outcome.invocation, jobs, outcome.refund, is_set_aside)
            draft.do(do.BlameJobs(worker.component, *blame))
        if outcome.fail_pool:
            _fail_pool(draft, worker, outcome)
        draft.do(do.Clear(worker.component, outcome.invocation))


def _fail_pool(draft: Draft, worker: Worker, outcome: Outcome) -> None:
    """Mask all workers of the pool except those that were reset since. The supervisor only
    triggers this check: the crashes that count are those on record."""
    pool = worker.component.pool
    known = draft.world.pools.get(pool)
    death = draft.accounts[outcome.component_id].find(outcome.invocation)
    if known is None or known.fails_after is None or death is None or not is_blamed(death):
        return
    accounts = [draft.accounts[each.component.component_id] for each in draft.pool(pool)]
    crashes = sum(map(_count_crashes, accounts))
    if crashes <= known.fails_after:
        return
    down = []
    for other in draft.pool(pool):
        account = draft.accounts[other.component.component_id]
        is_reset = account.was_reset_since(death.moment, draft.now)
        if account.failed_at_wall_ms is None and not is_reset:
            down.append(other.component)
    died = f"{outcome.component_id} died ({recall(death.kind, death.code).line})"
    reason = f"{died}: {known.fails_by}, and its workers have crashed {crashes} times"
    if down:
        draft.do(do.FailPool(pool, reason, tuple(down)))
    why = f"{POOL_FAILED}{reason}"
    for component in down:
        draft.do(do.MarkFailed(component, outcome.invocation, why))
        name = component.component_id
        draft.accounts[name] = book_keeping.mark_failed(
            draft.accounts[name], why, draft.now, invocation=outcome.invocation
        )


def _count_crashes(account: Account) -> int:
    """Count the deaths since the last reset, also those for which a job failed; not those for which
    one was quarantined."""
    count = account.restart_count + (account.failure_reason is not None)
    for record in account.records:
        if record.action == "reset":
            count = account.restart_count + (account.failure_reason is not None)
        elif record.action == "refund" and find_failed(record.text):
            count += 1
    return count


# Deaths


def _book_spooled(draft: Draft) -> None:
    """Book what was decided while the ledger was away."""
    for entry in draft.world.spooled:
        name = entry.death.component_id
        worker = draft.workers.get(name)
        if worker is not None:
            draft.accounts[name], _ = book_keeping.book(
                draft.accounts[name], entry.death, entry.decision, worker.rules, entry.at
            )
            draft.do(do.BookSpooled(worker.component, entry, worker.rules))


def _book_deaths(draft: Draft) -> None:
    fresh: dict[str, list[tuple[Worker, Death]]] = defaultdict(list)
    for worker in draft.world.workers:
        for death in worker.deaths:
            found = _recognise(draft, worker, death)
            if found is not None:
                fresh[worker.component.pool].append((worker, draft.excuse(worker, found)))
    for pool, deaths in fresh.items():
        find_outage(draft, pool, deaths)
        for worker, death in deaths:
            _book(draft, worker, death)


def _recognise(draft: Draft, worker: Worker, death: Death) -> Death | None:
    """Return the death to book, or None: it is on record.

    A second report of a run after which the unit was started means that the start job failed.
    """
    last = draft.accounts[death.component_id].find_last(death.run)
    if last is None and death.run in draft.world.untold:
        draft.do(do.Clear(worker.component, death.run))  # booked so long ago that it was dropped
        return None
    if last is None:
        return death
    if last.effect == "started" and worker.unit.is_still_failed(death.run):
        if last.kind != DEPENDENCY.kind:
            return make_failed_start(worker, last)
        draft.do(do.Clear(worker.component, death.run))  # it is tried again
        return None
    told = death._replace(invocation=last.invocation)
    is_new = death.run not in draft.world.untold
    draft.do(do.Tell(worker.component, told, last, is_new), do.Clear(worker.component, death.run))
    return None


def _book(draft: Draft, worker: Worker, death: Death) -> None:
    """Decide and book. Only a death of the unit's present run leads to a restart or a mask."""
    component, name = worker.component, death.component_id
    death = screen(draft, worker, death)
    death = death._replace(job_at_fault=draft.at_fault.get(death.invocation, ""))
    current = worker.unit.invocation == death.run
    account, record = book_keeping.record_failure(
        draft.accounts[name], death, worker.rules, draft.now, current=current
    )
    if _is_to_consult(draft, worker, death, record):
        draft.do(do.Consult(component, death))
        return
    draft.accounts[name] = account
    if record.action == "restart" and record.effect == "scheduled":
        _schedule(draft, worker, due_in_ms(record, draft.now))
    elif record.kind == DEPENDENCY.kind and record.effect == "pending" and not draft.holds[name]:
        _schedule(draft, worker, retry_in_ms(record, worker.rules, draft.now))
    draft.do(
        do.Book(component, death, worker.rules, current, record),
        do.Tell(component, death, record, is_new=True),
        do.Clear(component, death.run),
    )
    if death.job_at_fault:
        draft.refund(worker, death.invocation, death.job_at_fault)


def _is_to_consult(draft: Draft, worker: Worker, death: Death, record: Record) -> bool:
    """Return True if this death would mask its worker for too many restarts, and the supervisor was
    not asked yet whether the job in hand is to blame."""
    return (
        record.action == "fail"
        and death.code not in worker.rules.never_restart
        and draft.world.supervisor_active
        and is_run(death.invocation)
        and death.run not in draft.world.asked
    )


def _schedule(draft: Draft, worker: Worker, left_ms: int) -> None:
    """Plan the timer of a backoff, which is made before the restart is booked."""
    unit = worker.unit
    if left_ms > 0 and unit.wanted and not unit.has_job and not unit.masked:
        draft.do(do.Schedule(worker.component, draft.now.later(left_ms)))
        name = worker.component.component_id
        draft.workers[name] = worker._replace(unit=unit._replace(timer="waiting"))


# Decisions that are not done


def _finish_all(draft: Draft) -> None:
    for name in list(draft.workers):
        _finish_worker(draft, name)


def _finish_worker(draft: Draft, name: str) -> None:
    worker, owed = draft.workers[name], draft.accounts[name].unfinished()
    is_failed = any(record.action == "fail" for record in owed)
    for record in owed:
        if record.action == "fail":
            _mask(draft, worker, record)
        elif is_failed:
            draft.note(worker.component, record.invocation, "done")
        else:
            _finish(draft, worker, record)


def _mask(draft: Draft, worker: Worker, record: Record) -> None:
    component, unit = worker.component, worker.unit
    if draft.world.ledger != "sound":
        return  # nothing is masked while that cannot be noted
    if unit.timer != "none":
        draft.do(do.CancelTimer(component))
    if not unit.masked:
        if unit.state in RUNNING or unit.has_job:
            # A boot may have started it before the mask. First the stop: a unit that is
            # masked while it starts keeps its start job, and with it the boot, for ever.
            draft.do(do.Stop(component))
        draft.do(do.Mask(component))
    draft.note(component, record.invocation, "done")


def _finish(draft: Draft, worker: Worker, record: Record) -> None:
    component, unit = worker.component, worker.unit
    name = component.component_id
    is_active = draft.world.supervisor_active
    early = name in draft.early
    turn = draft.turn_of(component)
    verdict, _why = judge(Owed(record, unit, draft.holds[name], is_active, early, draft.now, turn))
    if verdict == "schedule":
        due = draft.now.later(due_in_ms(record, draft.now))
        draft.do(do.Schedule(component, due))
    elif verdict == "retry":
        due = draft.now.later(retry_in_ms(record, worker.rules, draft.now))
        draft.do(do.Schedule(component, due))
    elif verdict == "turn":
        if unit.timer != "waiting":
            due = draft.now.later(turn_in_ms(record, worker.rules, draft.now))
            draft.do(do.Schedule(component, due))
    elif verdict == "start-job-failed":
        _take_failed_start(draft, worker, record)
    elif verdict != "wait":
        is_started = verdict == "start"
        if is_started:
            draft.start(component, unit.invocation)
        # A decision that cannot be noted may have been replaced by one of plan_blind.
        if unit.timer != "none" and (is_started or draft.world.ledger == "sound"):
            draft.do(do.CancelTimer(component))
        draft.note(component, record.invocation, "started" if is_started else "done")


def _give_turns_back(draft: Draft) -> None:
    """End the turns of workers that run, or do not start any more: others can have them."""
    for turns in draft.turns.values():
        for name in sorted(turns.mine - draft.started):
            if not _is_starting(draft, name):
                draft.do(do.GiveTurn(parse_component(name)))


def _is_starting(draft: Draft, name: str) -> bool:
    """Return True if a start was requested and its result is not known yet. A worker that is held,
    or waits for a timer or for a unit that it needs, is not starting."""
    worker = draft.workers.get(name)
    if worker is None:
        return False
    unit = worker.unit
    was_started = (
        unit.state == "failed"
        and unit.timer != "waiting"
        and not draft.holds[name]
        and any(
            each.effect == "started" and each.kind != DEPENDENCY.kind
            for each in draft.accounts[name].unfinished()
        )
    )
    return unit.has_job or unit.state == "activating" or was_started


def _take_failed_start(draft: Draft, worker: Worker, record: Record) -> None:
    death = make_failed_start(worker, record)
    if draft.world.ledger == "sound":
        _book(draft, worker, draft.excuse(worker, death))
        _finish_worker(draft, death.component_id)
    elif all(entry.death.invocation != death.invocation for entry in draft.world.spooled):
        spool(draft, worker, death)
