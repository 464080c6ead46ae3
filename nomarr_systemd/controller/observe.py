"""Reads everything that a plan depends on: ``observe(site, …)`` returns a World.

systemd is asked once for all workers that matter, the supervisor at most twice. Nothing is changed
here, but for the report of a failure whose hook was lost, which is written as the hook would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.job_outcomes import read_quarantines
from nomarr_systemd.controller.log import ERROR, log
from nomarr_systemd.controller.reports import Report, write_report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import EX_TEMPFAIL, Death, classify, exit_words
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import (
    UNIT_PREFIX,
    UNIT_SUFFIX,
    Component,
    find_instance,
    parse_component,
)
from nomarr_systemd.core.incident import INCIDENT, LEAST, SPAN_MS, Incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.plan import is_blamed
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.world import Outcome, Pool, Spooled, Unit, Worker, World
from nomarr_systemd.host import clock
from nomarr_systemd.ledger.spool import SUFFIX
from nomarr_systemd.live.answers import parse_labels, parse_workers
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.manager import (
    SHUTDOWN,
    SUPERVISOR,
    monotonic_ms,
    read_timer,
    timer_of,
)
from nomarr_systemd.systemd.stop_intent import (
    WANTED_FACTS,
    is_wanted,
    was_asked_before,
    was_asked_to_stop,
)

Facts = Mapping[str, str]
Canaries = tuple[tuple[str | bool, ...], ...]
_OWN_SIGNALS: Final = frozenset((-6, -9))  # the supervisor's, which knows why it sent them
UNIT_FACTS: Final = (
    *("ActiveState", "LoadState", "InvocationID", "Job", "ConditionResult"),
    *("ConditionTimestampMonotonic", "ExecMainStartTimestampMonotonic"),
    *("ExecMainExitTimestampMonotonic", *stop_intent.UNIT_FACTS),
)
_TIMER: Final = ("Job", "SubState")
EXIT_FACTS: Final = ("InvocationID", "Result", "ExecMainCode", "ExecMainStatus")
_CANARY: Final = ("ActiveState", "LoadState", "InvocationID", "Job")
_FEW: Final = 8  # at most so many accounts are read one by one
_RUNNING: Final = ("active", "activating", "reloading")


class Seen(NamedTuple):
    """The accounts and incidents that were read."""

    accounts: Mapping[str, Account] | None  # None: the ledger is away
    incidents: Mapping[str, Incident]


def observe(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    *,
    due: Sequence[Component] = (),
    outcomes: Sequence[Outcome] = (),
    resumed: Mapping[str, str] | None = None,
) -> World:
    """Observe these workers, or all (None), and those that their incidents concern.

    If the store becomes unavailable meanwhile, observe again without it.
    """
    everybody = site.config.components()
    try:
        seen = _read_books(site, everybody if who is None else who, outcomes)
        return _observe(site, reports, who, seen, due, outcomes, resumed or {})
    except StoreError as error:
        log(ERROR, "the store is away", error=error, hint=error.hint)
        site.forget_store()
        return _observe(site, reports, who, Seen(None, {}), due, (), {})


def _observe(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    seen: Seen,
    due: Sequence[Component],
    outcomes: Sequence[Outcome],
    resumed: Mapping[str, str],
) -> World:
    now = clock.now()
    configured = set(site.config.components())
    spooled = _read_spool(site)
    chosen = _choose(site, reports, who, seen, spooled, outcomes)
    workers = [each for each in chosen if each in configured]
    shown = _ask_systemd(site, workers)
    reports = [each for each in reports if each.component in configured]
    deaths = _make_deaths(site, reports, shown, now)
    return World(
        tuple(
            _make_worker(site, each, shown, seen, deaths.get(each, []))._replace(rang=each in due)
            for each in workers
        ),
        {pool.name: _make_pool(site.config, pool.name) for pool in site.config.pools},
        seen.incidents,
        {pool: tuple(found) for pool, found in _recall(site, reports, seen, now).items()},
        frozenset(each.invocation for each in reports if each.is_untold),
        spooled,
        resumed,
        tuple(outcomes),
        read_quarantines(site, outcomes),
        "away" if seen.accounts is None else "sound",
        shown[SUPERVISOR]["ActiveState"] == "active",
        _find_healthy(site, seen),
    )


# The workers to observe


def _choose(
    site: Site,
    reports: Sequence[Report],
    who: Iterable[Component] | None,
    seen: Seen,
    spooled: Sequence[Spooled],
    outcomes: Sequence[Outcome],
) -> list[Component]:
    """Return the workers for which something may have to be done."""
    chosen = {each.component: None for each in reports} | dict.fromkeys(who or ())
    pools = {name for name, incident in seen.incidents.items() if not incident.closed}
    pools |= {outcome.component_id.split(":")[1] for outcome in outcomes}
    for component in site.config.components():
        account = (seen.accounts or {}).get(component.component_id)
        is_unfinished = who is None and account is not None and bool(account.unfinished())
        if component.pool in pools or is_unfinished:
            chosen[component] = None
    names = {entry.death.component_id for entry in spooled}
    held = site.holds.instances() if who is None else ()
    for component in site.config.components():
        is_held = component.instance in held and site.holds.read(component).startswith(INCIDENT)
        if component.component_id in names or is_held:
            chosen[component] = None
    return sorted(chosen)


def find_unheard(site: Site, reports: Sequence[Report]) -> list[Report]:
    """Report failed units whose death was not reported and is not on record."""
    known = {each.invocation for each in reports}
    found = []
    failed = {}
    for name in site.manager.list_failed(f"{UNIT_PREFIX}*{UNIT_SUFFIX}"):
        component = find_instance(name.removeprefix(UNIT_PREFIX).removesuffix(UNIT_SUFFIX))
        if component is not None:  # the template can be started with any name
            failed[component] = name
    questions = dict.fromkeys(failed.values(), EXIT_FACTS)
    shown = site.manager.show_each(questions | {timer_of(each): _TIMER for each in failed})
    is_away = False
    for component, name in failed.items():
        facts = shown[name]
        run = facts["InvocationID"]
        if not run or run in known:
            continue
        try:
            if not is_away and site.ledger.account(component.component_id).find_last(run):
                continue
        except StoreError:
            is_away = True
        if is_away and read_timer(shown[timer_of(component)]) != "none":
            continue  # its restart was decided before the ledger went away
        words = exit_words(facts["ExecMainCode"], facts["ExecMainStatus"])
        report = Report(component, run, facts["Result"], *words)
        found.append(report)
        with contextlib.suppress(OSError):  # a full /run: it is found again
            write_report(site.paths, report)
    return found


# Accounts, incidents and the spool


def _read_books(site: Site, who: Iterable[Component], outcomes: Sequence[Outcome]) -> Seen:
    """Read the accounts of these workers, and of the pools that an incident or a job concerns."""
    incidents = {each.pool: each for each in site.incidents.incidents()}
    pools = {pool for pool, incident in incidents.items() if not incident.closed}
    pools |= {each.component_id.split(":")[1] for each in outcomes}
    names = {each.component_id for each in who}
    names |= {each.component_id for each in site.config.components() if each.pool in pools}
    if len(names) > _FEW:
        every = {each.component_id: each for each in site.ledger.accounts()}
        return Seen({name: every.get(name) or Account(name) for name in names}, incidents)
    return Seen({name: site.ledger.account(name) for name in names}, incidents)


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
        questions |= {each.unit: UNIT_FACTS, each.wanted_unit: WANTED_FACTS, timer_of(each): _TIMER}
    shown = site.manager.show_each(questions)
    site.observed_ms = monotonic_ms()
    return shown


def _make_worker(
    site: Site,
    component: Component,
    shown: Mapping[str, Facts],
    seen: Seen,
    deaths: Sequence[Death],
) -> Worker:
    facts = shown[component.unit]
    met_hold = (
        facts["ActiveState"] == "inactive"
        and int(facts["ConditionTimestampMonotonic"] or 0) > 0
        and facts["ConditionResult"] == "no"
    )
    unit = Unit(
        facts["ActiveState"],
        facts["InvocationID"],
        facts["LoadState"] == "masked",
        bool(facts["Job"]),
        is_wanted(shown[component.wanted_unit]),
        met_hold,
        read_timer(shown[timer_of(component)]),
    )
    account = None
    if seen.accounts is not None:
        name = component.component_id
        account = seen.accounts.get(name) or site.ledger.account(name)
    rules = site.config.find_rules(component)
    return Worker(component, rules, unit, account, site.holds.read(component), tuple(deaths))


def _make_deaths(
    site: Site, reports: Sequence[Report], shown: Mapping[str, Facts], now: Moment
) -> dict[Component, list[Death]]:
    """Make a Death of each report; by time, the one of the unit's present run last."""
    shutdown = shown[SHUTDOWN]
    ending = bool(shutdown["Job"]) or shutdown["ActiveState"] == "active"
    found: dict[Component, list[tuple[bool, int, Death]]] = {}
    labels = _ask_labels(site, reports, shown)
    for each in reports:
        unit = shown[each.component.unit]
        is_own = unit["InvocationID"] == each.invocation
        runs = is_own and unit["ActiveState"] in _RUNNING
        if runs or each.result == "success":
            continue  # a hook that ran again and saw a newer run
        death = _make_death(each, unit, shown, labels.get(each.invocation, ""), now)
        death = death._replace(shutting_down=ending)
        if death.code == EX_TEMPFAIL:
            death = death._replace(supervisor_away=_was_away(unit, shown[SUPERVISOR]))
        found.setdefault(each.component, []).append((is_own, -each.age_ms, death))
    return {
        component: [death for _, _, death in sorted(deaths, key=lambda row: row[:2])]
        for component, deaths in found.items()
    }


def _make_death(
    each: Report, unit: Facts, shown: Mapping[str, Facts], label: str, now: Moment
) -> Death:
    wanted = shown[each.component.wanted_unit]
    is_own = unit["InvocationID"] == each.invocation
    if is_own:
        asked = was_asked_to_stop(unit, wanted)
    else:
        asked = was_asked_before((monotonic_ms() - each.age_ms) * 1000, wanted)
    return classify(
        each.result,
        each.exit_code,
        each.exit_status,
        component_id=each.component.component_id,
        invocation=each.invocation,
        label=label,
        stop_asked=asked,
        run_ms=_run_ms(unit) if is_own else None,
        at=now.later(-each.age_ms),
    )


def _run_ms(unit: Facts) -> int | None:
    """Return how long the last run of the unit was, by systemd's own clock."""
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    ended = int(unit["ExecMainExitTimestampMonotonic"] or 0)
    return (ended - started) // 1000 if ended >= started > 0 else None


def _was_away(unit: Facts, supervisor: Facts) -> bool:
    """True if the supervisor is not active, or was started after the run that missed it."""
    since = int(supervisor["ActiveEnterTimestampMonotonic"] or 0)
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    return supervisor["ActiveState"] != "active" or since > started


# The supervisor, whose answers are not trusted


def _ask_labels(
    site: Site, reports: Sequence[Report], shown: Mapping[str, Facts]
) -> dict[str, str]:
    """Ask why the supervisor ended these runs, if it did; one question for all."""
    if shown[SUPERVISOR]["ActiveState"] != "active":
        return {}
    runs = [
        {"component": each.component.component_id, "invocation": each.invocation}
        for each in reports
        if not each.is_untold
        and classify(each.result, each.exit_code, each.exit_status).code in _OWN_SIGNALS
    ]
    if not runs:
        return {}
    return parse_labels(site.live.ask({"op": "labels", "runs": runs}, about=len(runs)))


def has_open_incident(site: Site) -> bool:
    try:
        return any(not each.closed for each in site.incidents.incidents())
    except StoreError:
        return False


def observe_canaries(site: Site) -> Canaries:
    """Return the state of the canaries of open incidents, by a few questions: only if it changes,
    the whole pool is observed. Empty: no incident is open."""
    try:
        incidents = {each.pool: each for each in site.incidents.incidents() if not each.closed}
    except StoreError:
        return ()
    if not incidents:
        return ()
    site.ask_anew()
    healthy = _find_healthy(site, Seen(None, incidents))
    canaries = [parse_component(each.canary) for each in incidents.values()]
    questions: dict[str, Sequence[str]] = {}
    for each in canaries:
        questions |= {each.unit: _CANARY, each.wanted_unit: ("ActiveState",)}
    shown = site.manager.show_each(questions)
    return tuple(
        (
            each.component_id,
            site.holds.read(each),
            each.component_id in healthy,
            *shown[each.unit].values(),
            *shown[each.wanted_unit].values(),
        )
        for each in canaries
    )


def _find_healthy(site: Site, seen: Seen) -> frozenset[str]:
    """Return the canaries that are healthy; without a supervisor all that are active."""
    canaries = {each.canary for each in seen.incidents.values() if not each.closed}
    if not canaries:
        return frozenset()
    answer = site.live.ask({"op": "snapshot"}, about=len(site.config.components()))
    workers = parse_workers(answer)
    if workers is None:
        return frozenset(canaries)
    return frozenset(
        each for each in canaries if each in workers and workers[each].status == "healthy"
    )
