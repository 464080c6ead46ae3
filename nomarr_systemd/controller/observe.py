"""Reads everything that a plan depends on: ``observe(site, …)`` returns a World.

systemd is asked once for all workers that matter, the supervisor at most twice. Nothing is changed
here, but for the report of each failure that is found: from then on that is known, whatever becomes
of the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.canaries import find_healthy
from nomarr_systemd.controller.deaths import make_deaths
from nomarr_systemd.controller.job_outcomes import read_refunded
from nomarr_systemd.controller.lapses import find_lacks, find_lapses
from nomarr_systemd.controller.reports import Report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import INCIDENT, LEAST, SPAN_MS, Incident, find_outage
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.plan import is_blamed
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.world import Outcome, Pool, Spooled, Turns, Unit, Worker, World
from nomarr_systemd.host import clock
from nomarr_systemd.host.log import ERROR, log
from nomarr_systemd.ledger.spool import SUFFIX
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.manager import SHUTDOWN, SUPERVISOR, monotonic_ms
from nomarr_systemd.systemd.stop_intent import (
    WANTED_FACTS,
    find_run,
    has_begun,
    is_down,
    is_wanted,
)
from nomarr_systemd.systemd.timers import NO_TIMER, RESTART_TIMERS, read_timer, timer_of

Facts = Mapping[str, str]
UNIT_FACTS: Final = (
    *stop_intent.UNIT_FACTS,
    *("ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic"),
)
_FEW: Final = 8  # the most accounts that are read one by one


class Seen(NamedTuple):
    """The accounts and incidents that were read."""

    accounts: Mapping[str, Account] | None  # None: the ledger is away
    incidents: Mapping[str, Incident]
    turns: Mapping[str, Turns] = {}


def observe(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    *,
    down: Iterable[Component] = (),
    due: Sequence[Component] = (),
    outcomes: Sequence[Outcome] = (),
    asked: frozenset[str] = frozenset(),
    resumed: Mapping[str, str] | None = None,
) -> World:
    """Observe these workers, or all (None), and those that their incidents concern. ``down``: the
    workers that are wanted and inactive.

    If the store becomes unavailable meanwhile, observe again without it.
    """
    everybody = site.config.components()
    try:
        seen = _read_books(site, everybody if who is None else who, outcomes)
        return _observe(site, reports, who, seen, down, due, outcomes, asked, resumed or {})
    except StoreError as error:
        log(ERROR, "the store is away", error=error, hint=error.hint)
        site.forget_store()
        site.in_turn.clear()
        return _observe(site, reports, who, Seen(None, {}), down, due, (), asked, {})


def _observe(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    seen: Seen,
    down: Iterable[Component],
    due: Sequence[Component],
    outcomes: Sequence[Outcome],
    asked: frozenset[str],
    resumed: Mapping[str, str],
) -> World:
    now = clock.now()
    configured = set(site.config.components())
    spooled = _read_spool(site)
    chosen = _choose(site, reports, who, seen, down, spooled, outcomes)
    workers = [each for each in chosen if each in configured]
    shown = _ask_systemd(site, workers)
    reports = [each for each in reports if each.component in configured]
    reports += find_lapses(site, workers, shown, reports, seen.accounts)
    lacks = find_lacks(site, workers, shown, seen.accounts)
    deaths = make_deaths(site, reports, shown, lacks, now)
    recent = _recall(site, reports, seen, now)
    _forget_reset(site, recent, deaths, now)
    return World(
        tuple(
            _make_worker(site, each, shown, seen, lacks.get(each, ""))._replace(
                deaths=tuple(deaths.get(each, ())),
                rang=each in due,
                resumes=site.holds.is_over(each, now.wall_ms),
            )
            for each in workers
        ),
        {pool.name: _make_pool(site.config, pool.name) for pool in site.config.pools},
        seen.incidents,
        {pool: tuple(found) for pool, found in recent.items()},
        frozenset(each.invocation for each in reports if each.is_untold),
        spooled,
        resumed,
        tuple(outcomes),
        read_refunded(site, outcomes),
        asked,
        "away" if seen.accounts is None else "sound",
        shown[SUPERVISOR]["ActiveState"] == "active",
        find_healthy(site, seen.incidents.values()),
        seen.turns,
    )


# The workers to observe


def _choose(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    seen: Seen,
    down: Iterable[Component],
    spooled: Sequence[Spooled],
    outcomes: Sequence[Outcome],
) -> list[Component]:
    """Return the workers for which something may have to be done."""
    chosen = {each.component: None for each in reports} | dict.fromkeys((*(who or ()), *down))
    pools = {name for name, incident in seen.incidents.items() if not incident.closed}
    pools |= {outcome.component_id.split(":")[1] for outcome in outcomes}
    for component in site.config.components():
        account = (seen.accounts or {}).get(component.component_id)
        is_unfinished = who is None and account is not None and bool(account.unfinished())
        if component.pool in pools or is_unfinished:
            chosen[component] = None
    names = {entry.death.component_id for entry in spooled}
    names |= {name for turns in seen.turns.values() for name in turns.mine}
    held = site.holds.instances() if who is None else ()
    for component in site.config.components():
        is_held = component.instance in held and (
            site.holds.read(component).startswith(INCIDENT)
            or site.holds.is_over(component, clock.now().wall_ms)
        )
        if component.component_id in names or is_held:
            chosen[component] = None
    return sorted(chosen)


# Accounts, incidents and the spool


def _read_books(site: Site, who: Iterable[Component], outcomes: Sequence[Outcome]) -> Seen:
    """Read the accounts of these workers, and of the pools that an incident or a job concerns."""
    incidents = {each.pool: each for each in site.incidents.incidents()}
    pools = {pool for pool, incident in incidents.items() if not incident.closed}
    pools |= {each.component_id.split(":")[1] for each in outcomes}
    names = {each.component_id for each in who}
    names |= {each.component_id for each in site.config.components() if each.pool in pools}
    turns = site.turns.read(pool.name for pool in site.config.pools)
    mine = {name for each in turns.values() for name in each.mine}
    site.in_turn = {each for each in site.in_turn if each.component_id in mine}
    names |= mine
    if len(names) > _FEW:
        every = {each.component_id: each for each in site.ledger.accounts()}
        return Seen({name: every.get(name) or Account(name) for name in names}, incidents, turns)
    return Seen({name: site.ledger.account(name) for name in names}, incidents, turns)


def _read_spool(site: Site) -> tuple[Spooled, ...]:
    entries, bad = site.spool.read()
    configured = {each.component_id for each in site.config.components()}
    known = [each for each in entries if each.death.component_id in configured]
    gone = [each.death.invocation + SUFFIX for each in entries if each not in known]
    for name in (*bad, *gone):
        log(ERROR, "a spooled failure is damaged, or of no configured worker: set aside", file=name)
        site.spool.set_aside(name)
    return tuple(known)


def _recall(
    site: Site, reports: Sequence[Report], seen: Seen, now: Moment
) -> dict[str, list[Death]]:
    """Return the recent deaths, by pool, that workers were blamed for.

    From memory; at first from the ledger, since a controller before this one may have been killed
    a moment ago.
    """
    if seen.accounts is None:
        return {}
    found = {}
    for pool in {each.component.pool for each in reports if not each.is_untold}:
        workers = [each for each in site.config.components() if each.pool == pool]
        if len(workers) < LEAST:
            continue
        if pool not in site.recent:
            names = {each.component_id for each in workers}
            site.recent[pool] = [
                record.death(account.component_id)
                for account in site.ledger.accounts()
                if account.component_id in names
                for record in map(Record.read, account.rows[-3:])
                if is_blamed(record) and record.kind  # the mark of a failed pool is no death
            ]
        site.recent[pool] = [
            each for each in site.recent[pool] if each.at and age_ms(each.at, now) < SPAN_MS
        ]
        found[pool] = site.recent[pool]
    return found


def _forget_reset(
    site: Site,
    recent: dict[str, list[Death]],
    deaths: Mapping[Component, Sequence[Death]],
    now: Moment,
) -> None:
    """Forget recent deaths of workers that a person has reset since: they make no incident. It is
    looked up only if an incident would be opened."""
    for pool, booked in recent.items():
        fresh = [
            death._replace(at=now)
            for component, found in deaths.items()
            if component.pool == pool
            for death in found
        ]
        if find_outage([*booked, *fresh], _make_pool(site.config, pool).workers, now):
            site.recent[pool] = recent[pool] = [
                each
                for each in booked
                if each.at
                and not site.ledger.account(each.component_id).was_reset_since(each.at, now)
            ]


def _make_pool(config: Config, name: str) -> Pool:
    pool = next(each for each in config.pools if each.name == name)
    window_s = config.find_rules(Component(name, 0)).window_s
    if pool.crash_policy == "fail-pool":
        return Pool(pool.workers, window_s, 0, "crash_policy is fail-pool")
    most = pool.crash_max_retries
    return Pool(pool.workers, window_s, most, f"crash_max_retries is {most}")


# systemd


def _ask_systemd(site: Site, workers: Sequence[Component]) -> dict[str, dict[str, str]]:
    questions: dict[str, Sequence[str]] = {
        SHUTDOWN: ("Job", "ActiveState"),
        SUPERVISOR: ("ActiveState", "ActiveEnterTimestampMonotonic"),
    }
    for each in workers:
        questions |= {each.unit: UNIT_FACTS, each.wanted_unit: WANTED_FACTS}
    shown = _ask_timers(site, workers) | site.manager.show_each(questions)
    site.observed_ms = monotonic_ms()
    return shown


def _ask_timers(site: Site, workers: Sequence[Component]) -> dict[str, dict[str, str]]:
    """Ask about the timers of restarts; systemd has not loaded those of workers that wait for
    none, and need not do so in order to say that there are none."""
    names = [timer_of(each) for each in workers]
    if not names:
        return {}
    loaded = site.manager.list_loaded(*(names if len(names) <= _FEW else [RESTART_TIMERS]))
    return {name: loaded.get(name, NO_TIMER) for name in names}


def _make_worker(
    site: Site,
    component: Component,
    shown: Mapping[str, Facts],
    seen: Seen,
    lacks: str,
) -> Worker:
    facts, wanted = shown[component.unit], shown[component.wanted_unit]
    held = site.holds.read(component)
    is_lapsed = is_down(facts, wanted) and (has_begun(facts, wanted) or not held)
    met_hold = (
        facts["ActiveState"] == "inactive"
        and int(facts["ConditionTimestampMonotonic"] or 0) > 0
        and facts["ConditionResult"] == "no"
    )
    unit = Unit(
        "failed" if is_lapsed else facts["ActiveState"],
        find_run(facts, wanted) if is_lapsed else facts["InvocationID"],
        facts["LoadState"] == "masked",
        bool(facts["Job"]),
        is_wanted(wanted),
        met_hold,
        read_timer(shown[timer_of(component)]),
        lacks,
    )
    account = None
    if seen.accounts is not None:
        name = component.component_id
        account = seen.accounts.get(name) or site.ledger.account(name)
    rules = site.config.find_rules(component)
    return Worker(component, rules, unit, account, held)
