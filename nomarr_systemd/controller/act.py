"""``act(site, intents)``: the only part of the controller that changes anything.

The order makes a kill after any step harmless: the next plan finds the rest, because a report is
cleared last:

1. timers: one that elapses without a record starts nothing;
2. incidents, elections, then holds: a death that is booked as held must find its hold;
3. one commit of the ledger: deaths, refunds, marks. From here on each death is counted, once;
   the spool's files are removed after it, never before (many are booked in portions); then jobs
   to blame are logged and noted;
4. the spool, if the ledger cannot be written: durable before anything is restarted;
5. ends of holds, stops, then masks (a unit that is masked while it starts keeps its start job),
   ends of pauses, then starts (systemd is asked again first if it took a while), each with its
   turn, where restarts wait for each other; their timers stop after that;
6. how far each decision got, in one commit. If that is lost, the next plan does it again. The
   accounts of workers that were started are published only now; so are incidents;
7. the journal, then the supervisor. After a kill before this they are told again. Deaths that
   would mask their workers are not booked yet: first the supervisor is asked about their jobs;
8. reports are cleared, or kept for the supervisor alone if it did not answer.

If systemd refuses something for one worker, the others are still handled, and it is retried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from nomarr_systemd.controller.job_outcomes import note_blame, tell_supervisor
from nomarr_systemd.controller.reports import clear_report, keep_untold
from nomarr_systemd.controller.site import Site
from nomarr_systemd.controller.starts import (
    give_turns,
    log_refusals,
    start_all,
    stop_all,
    take_turns,
)
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.errors import NomarrError, StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.plan import is_blamed
from nomarr_systemd.core.world import Outcome
from nomarr_systemd.host import clock
from nomarr_systemd.host.log import ERROR, log, log_error
from nomarr_systemd.systemd.manager import monotonic_ms
from nomarr_systemd.systemd.notify import feed_watchdog
from nomarr_systemd.systemd.systemctl import Refused
from nomarr_systemd.systemd.timers import timer_of

MAX_REPORTS: Final = 100  # of a worker, while neither the ledger nor the spool can be written
_PORTION: Final = 50  # spooled deaths in a commit: after a kill the ledger still knows all of them
_Kind = TypeVar("_Kind")


class LedgerUnwritable(NomarrError):
    """The ledger takes no bookings: plan again without it."""

    code = "ledger-unwritable"


class Done(NamedTuple):
    """The result of ``act``."""

    outcomes: tuple[Outcome, ...] = ()  # of jobs, for the next plan
    asked: frozenset[str] = frozenset()  # runs about which the supervisor was asked before a mask
    owes: bool = False  # something has to be retried, and no report will trigger that
    untold: bool = False  # the supervisor has not answered
    changed_incidents: bool = False  # more workers may be concerned than were observed


def act(site: Site, intents: Sequence[Intent]) -> Done:
    """Carry intents out; LedgerUnwritable before any effect if they cannot be booked."""
    # Workers wait for their start, so files are published later, unless one is masked as well.
    is_late = _pick(intents, do.Start) and not _pick(intents, do.Mask)
    with site.publisher.late() if is_late else contextlib.nullcontext():
        refused = _schedule(site, _pick(intents, do.Schedule))
        changed = _change_incidents(site, intents)
        _hold(site, _pick(intents, do.Hold))
        _book(site, intents)
        feed_watchdog()
        _blame_jobs(site, _pick(intents, do.BlameJobs))
        kept, crowded = _spool(site, _pick(intents, do.Spool))
        refused |= crowded
        refused |= _release(site, _pick(intents, do.Release))
        stop_all(site, [each.component.unit for each in _pick(intents, do.Stop)])
        unmasked = _mask(site, [each.component for each in _pick(intents, do.Mask)])
        refused |= unmasked
        refused |= _resume(site, _pick(intents, do.Resume))
        feed_watchdog()
        refused |= take_turns(site, _pick(intents, do.TakeTurn))
        timers = [
            timer_of(each.component)
            for each in _pick(intents, do.CancelTimer)
            if each.component not in refused
        ]
        starts = [each for each in _pick(intents, do.Start) if each.component not in refused]
        started, unwanted = start_all(site, starts, timers)
        refused |= started
        _note(site, _pick(intents, do.Note), refused, unwanted)
        give_turns(site, _pick(intents, do.GiveTurn))
    if changed or any(isinstance(each, do.Close | do.Join) for each in intents):
        site.publish_incidents()
    outcomes, unanswered = _tell(site, intents, unmasked)
    # The next plan handles what the supervisor answered; until then it can be asked again.
    untold = unanswered | {each.invocation for each in outcomes}
    for clear in _pick(intents, do.Clear):
        if clear.invocation in untold:
            keep_untold(site.paths, clear.invocation)
        elif clear.invocation not in kept:
            clear_report(site.paths, clear.invocation)
    is_begun = any(each.effect == "started" for each in _pick(intents, do.Note))
    asked = frozenset(each.death.run for each in _pick(intents, do.Consult))
    owes = bool(refused or kept or is_begun)
    return Done(tuple(outcomes), asked, owes, bool(unanswered), changed)


def _pick(intents: Iterable[Intent], kind: type[_Kind]) -> list[_Kind]:
    return [each for each in intents if isinstance(each, kind)]


def _schedule(site: Site, intents: Sequence[do.Schedule]) -> set[Component]:
    now, clock_ms = clock.now(), monotonic_ms()
    due = {each.component: clock_ms + each.due.boottime_ms - now.boottime_ms for each in intents}
    return log_refusals(site.manager.schedule_all(due))


def _change_incidents(site: Site, intents: Sequence[Intent]) -> bool:
    """Open, join and elect; closing waits for the commit. True if an incident changed."""
    changed = False
    try:
        for each in intents:
            if isinstance(each, do.OpenIncident):
                changed = True
                if site.incidents.open(each.incident) == each.incident:
                    text = f"{each.incident.text}, the others wait and are not blamed"
                    site.journal.write_incident(each.incident.pool, text, opened=True)
            elif isinstance(each, do.Join):
                site.incidents.add(each.pool, each.member)
            elif isinstance(each, do.Elect):
                changed = True
                site.incidents.elect(each.pool, each.canary)
    except StoreError as error:
        raise LedgerUnwritable(str(error), hint=error.hint) from error
    return changed


def _hold(site: Site, intents: Sequence[do.Hold]) -> None:
    for each in intents:
        try:
            site.holds.hold(each.component, each.why)
        except OSError as error:  # a full disk: it is retried; without a hold the worker starts
            log_error(error, component=each.component.component_id)


def _release(site: Site, intents: Sequence[do.Release]) -> set[Component]:
    """Return the workers whose holds could not be ended."""
    kept = set()
    for each in intents:
        try:
            site.holds.release(each.component)
        except OSError as error:
            log_error(error, component=each.component.component_id)
            kept.add(each.component)
    return kept


def _book(site: Site, intents: Sequence[Intent]) -> None:
    """Write all bookings to the ledger in one commit, unless many were spooled."""
    booking = (do.Book, do.BookSpooled, do.Refund, do.MarkFailed, do.Close)
    wanted = [each for each in intents if isinstance(each, booking)]
    if not wanted:
        return
    for failed in _pick(intents, do.FailPool):
        site.journal.write_pool_failure(failed.pool, failed.reason, failed.workers)
    spooled = _pick(wanted, do.BookSpooled)
    while len(spooled) > _PORTION:
        _commit(site, spooled[:_PORTION])
        spooled = spooled[_PORTION:]
        feed_watchdog()
    _commit(site, [*spooled, *(each for each in wanted if not isinstance(each, do.BookSpooled))])
    for close in _pick(intents, do.Close):
        text = f"incident of {close.pool} is closed: {close.why}"
        site.journal.write_incident(close.pool, text, opened=False)
    for book in _pick(intents, do.Book):
        if is_blamed(book.record) and book.component.pool in site.recent:
            site.recent[book.component.pool].append(book.death._replace(at=book.record.moment))


def _commit(site: Site, intents: Sequence[Intent]) -> None:
    """Book in one commit; then remove what was spooled."""
    try:
        with site.store.batch():
            for each in intents:
                _book_one(site, each)
    except StoreError as error:
        raise LedgerUnwritable(str(error), hint=error.hint) from error
    site.spool.remove(each.entry.death.invocation for each in _pick(intents, do.BookSpooled))


def _book_one(site: Site, each: Intent) -> None:
    ledger = site.ledger
    match each:
        case do.Book(_, death, rules, current, record):
            ledger.record_failure(death, rules, at=record.moment, current=current)
        case do.BookSpooled(_, entry, rules):
            ledger.book(entry.death, entry.decision, rules, entry.at)
        case do.Refund(component, invocation, why):
            ledger.refund(component.component_id, invocation, why)
        case do.MarkFailed(component, invocation, why):
            ledger.mark_failed(component.component_id, why, invocation)
        case do.Close(pool, why, deaths):
            site.incidents.close(pool, why, clock.now(), deaths)


def _blame_jobs(site: Site, intents: Sequence[do.BlameJobs]) -> None:
    """Log jobs to the workers that died of them, then note it: after a kill in between it is logged
    again, not lost. How many were refunded to each is read from the ledger."""
    for each in intents:
        try:
            for component in site.config.components():
                if component.pool != each.component.pool:
                    continue
                if not each.quarantined and component != each.component:
                    continue
                account = site.ledger.account(component.component_id)
                back = sum(account.find(run, ("refund",)) is not None for run in each.refund)
                if back or component == each.component:
                    site.journal.write_blame(component, each, back)
            note_blame(site, each)
        except StoreError as error:
            log_error(error, component=each.component.component_id)


def _spool(site: Site, intents: Sequence[do.Spool]) -> tuple[set[str], set[Component]]:
    """Spool deaths; return the runs that could not be spooled, whose reports stay, and the workers
    that have so many of them that they are not started: the reports are in memory."""
    kept: dict[str, Component] = {}
    for each in intents:
        try:
            site.spool.write(each.entry)
        except StoreError as error:
            if each.component not in kept.values():  # it may have a hundred
                log_error(error, component=each.component.component_id)
            kept[each.entry.death.run] = each.component
    workers = list(kept.values())
    return set(kept), {each for each in set(workers) if workers.count(each) >= MAX_REPORTS}


def _mask(site: Site, components: Sequence[Component]) -> set[Component]:
    """Mask all with one reload, or else one by one; return those that could not be masked. What was
    started since it was observed is stopped."""
    if not components:
        return set()
    refused = set()
    try:
        site.manager.mask([each.unit for each in components])
    except Refused:
        for component in components:
            feed_watchdog()
            try:
                site.manager.mask([component.unit])
            except Refused as error:
                log_error(error, component=component.component_id)
                refused.add(component)
    masked = {each.unit: each for each in components if each not in refused}
    shown = site.manager.show(list(masked), ("ActiveState", "Job"))
    stops = []
    for unit, each in masked.items():
        if shown[unit]["ActiveState"] != "failed" or shown[unit]["Job"]:
            # Both: systemd 257 drops the start job of a unit that is masked, and stops nothing.
            stops += [unit, each.wanted_unit]
    stop_all(site, stops)
    return refused


def _resume(site: Site, intents: Sequence[do.Resume]) -> set[Component]:
    """End pauses; return the workers that were refused: the file that is left resumes them."""
    for each in intents:
        site.holds.begin_resume(each.component)
    wanted = {each.component.unit: each.component for each in intents if each.start}
    answers = site.manager.queue_all(start=wanted)
    refused = log_refusals({each: answers[unit] for unit, each in wanted.items()})
    done = [each.component for each in intents if each.component not in refused]
    for component in done:
        site.holds.end_resume(component)
        site.journal.write_act(component, "resumed", "the end of its pause")
    if done:
        with contextlib.suppress(StoreError):
            names = [each.component_id for each in done]
            site.ledger.note(names, "resume", "nomarr-controller", "its pause was over")
    return refused


def _note(
    site: Site, intents: Sequence[do.Note], refused: set[Component], unwanted: set[Component]
) -> None:
    """Record how far each decision was carried out; what was refused is still owed."""
    effects = [
        (
            each.component.component_id,
            each.invocation,
            "done" if each.component in unwanted else each.effect,
        )
        for each in intents
        if each.component not in refused
    ]
    if not effects:
        return
    try:
        site.ledger.set_effects(effects)
    except StoreError as error:
        # Effects are idempotent: the next plan finds them done.
        log(ERROR, "effects of decisions cannot be recorded", error=error, hint=error.hint)
        site.forget_store()


def _tell(
    site: Site, intents: Sequence[Intent], unmasked: set[Component]
) -> tuple[list[Outcome], set[str]]:
    """Tell the journal, then the supervisor; return its outcomes, and the runs without one.

    ``unmasked``: workers whose mask systemd refused. When one is masked later, that is told.
    """
    tells = _pick(intents, do.Tell)
    told = {component for each in _pick(intents, do.FailPool) for component in each.workers}
    for each in tells:
        if each.is_new:
            told.add(each.component)
            is_masked = each.component not in unmasked
            line = each.death.line
            site.journal.write_decision(each.component, each.record, line, is_masked=is_masked)
    for mask in _pick(intents, do.Mask):
        if mask.component not in unmasked and mask.component not in told:
            _tell_mask(site, mask.component)
    return tell_supervisor(site, tells, _pick(intents, do.Consult))


def _tell_mask(site: Site, component: Component) -> None:
    """Tell that a worker is masked whose decision was told before."""
    try:
        records = site.ledger.account(component.component_id).records
    except StoreError as error:
        log_error(error, component=component.component_id)
        return
    for record in [each for each in records if each.action == "fail"][-1:]:
        site.journal.write_decision(component, record, "systemd accepts its mask now")
