"""Deaths that systemd shows: by units that are failed, and by units that ended and were started
again before the controller looked. For each a report is written: from then on it is known, whatever
becomes of the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nomarr_systemd.controller.reports import OVERTAKEN, Report, write_report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import exit_words
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import (
    UNIT_PREFIX,
    UNIT_SUFFIX,
    Component,
    find_instance,
    parse_component,
)
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.systemd.manager import monotonic_ms
from nomarr_systemd.systemd.stop_intent import WANTED_FACTS, was_restarted
from nomarr_systemd.systemd.timers import NO_TIMER, read_timer, timer_of

Facts = Mapping[str, str]
EXIT_FACTS: Final = (
    *("InvocationID", "ActiveState", "Result", "ExecMainCode", "ExecMainStatus"),
    "InactiveEnterTimestampMonotonic",
)
_ENDED, _BEGAN = "InactiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic"
_FEW: Final = 8  # units that are asked about everything at once
_NEAR_MS: Final = 1000  # clocks are not read at one moment


def find_idle(site: Site) -> dict[Component, str]:
    """Return the workers whose unit is failed or inactive, with that state."""
    found, is_over = site.manager.list_idle(f"{UNIT_PREFIX}*{UNIT_SUFFIX}")
    site.hook_runs = not is_over
    idle = {}
    for name, state in found.items():
        component = find_instance(name.removeprefix(UNIT_PREFIX).removesuffix(UNIT_SUFFIX))
        if component is not None:  # the template can be started with any name
            idle[component] = state
    return idle


def find_failed(
    site: Site, idle: Mapping[Component, str], reports: Sequence[Report]
) -> tuple[list[Report], list[Component]]:
    """Report failed units whose death was not reported and is not on record; and return those that
    are on record, and that were started or failed since they were last returned."""
    known = {each.invocation for each in reports}
    failed = [each for each, state in idle.items() if state == "failed"]
    if len(failed) > _FEW and site.looked_at:  # nearly all are as they were, as a rule
        runs = _ask_runs(site, failed, ("InvocationID",))
        site.looked_at &= {_pair(each, runs) for each in failed}
        failed = [each for each in failed if _pair(each, runs) not in site.looked_at]
    shown = _ask_runs(site, failed, EXIT_FACTS)
    found, others = [], []
    is_away = False  # one that hangs is asked once
    for component in failed:
        facts = shown[component.unit]
        run = facts["InvocationID"]
        if not run or run in known or facts["ActiveState"] != "failed":
            continue
        try:
            is_known = not is_away and _is_on_record(site, component, run)
        except StoreError:
            is_away = True
        if is_away:
            is_known = is_decided_blindly(site, component, run)
        if is_known:
            if _pair(component, shown) not in site.looked_at:
                site.looked_at.add(_pair(component, shown))
                others.append(component)
            continue
        words = exit_words(facts["ExecMainCode"], facts["ExecMainStatus"])
        died_ms = int(facts["InactiveEnterTimestampMonotonic"] or 0) // 1000
        age_ms = max(0, monotonic_ms() - died_ms) if died_ms else 0
        report = Report(component, run, facts["Result"], *words, age_ms)
        found.append(report)
        write_report(site.paths, report)
    return found, others


def _ask_runs(
    site: Site, workers: Iterable[Component], facts: Sequence[str]
) -> dict[str, dict[str, str]]:
    questions: dict[str, Sequence[str]] = {}
    for each in workers:
        questions |= {each.unit: facts, each.wanted_unit: ("InvocationID",)}
    return site.manager.show_each(questions) if questions else {}


def _pair(component: Component, shown: Mapping[str, Facts]) -> tuple[str, str]:
    """Return the unit's last run, and since when it is wanted, as an invocation."""
    names = (component.unit, component.wanted_unit)
    run, wanted = (shown[name]["InvocationID"] for name in names)
    return run, wanted


def _is_on_record(site: Site, component: Component, run: str) -> bool:
    """Return True if the death of this run is in the ledger."""
    return bool(site.ledger.account(component.component_id).find_last(run))


def is_decided_blindly(site: Site, component: Component, run: str) -> bool:
    """Return True if the death of this run is spooled, or its restart is scheduled. An elapsed
    timer may be that of an earlier death; what is spooled twice is booked once."""
    timer = timer_of(component)
    return site.spool.has(run) or (
        read_timer(site.manager.list_loaded(timer).get(timer, NO_TIMER)) == "waiting"
    )


def find_overtaken(
    site: Site, idle: Mapping[Component, str], reports: Sequence[Report]
) -> list[Report]:
    """Report the last end of each running worker that nobody asked for and that was not decided
    about: a person started the worker before the controller looked. systemd shows only when that
    was, so it is named by that time. What ended before the first record of the ledger may have been
    on record in one that was lost."""
    waiting = {each.component for each in reports}
    waiting |= {parse_component(each.death.component_id) for each in site.spool.read()[0]}
    apart = {*idle, *waiting}
    running = [
        each
        for each in site.config.components()
        if each not in apart and site.config.find_rules(each).on_clean_exit != "stay"
    ]
    shown = site.manager.show([each.unit for each in running], [_ENDED])
    ended = [each for each in running if int(shown[each.unit][_ENDED] or 0)]
    questions: dict[str, Sequence[str]] = {}
    for each in ended:
        questions |= {each.unit: (_ENDED, _BEGAN), each.wanted_unit: WANTED_FACTS}
    shown = site.manager.show_each(questions)
    ends = {}
    for each in ended:
        unit, wanted = shown[each.unit], shown[each.wanted_unit]
        died_us, since_us = int(unit[_ENDED] or 0), int(wanted[_BEGAN] or 0)
        runs_again = died_us < int(unit[_BEGAN] or 0)
        if runs_again and 0 < since_us < died_us and not was_restarted(wanted):
            ends[each] = died_us // 1000
    accounts = {each.component_id: each for each in site.ledger.accounts()} if ends else {}
    rows = [each.rows[0] for each in accounts.values() if each.rows]
    first_ms = min((Record.read(row).wall_ms for row in rows), default=0)
    now, now_ms = clock.now(), monotonic_ms()
    slept_ms = max(0, now.boottime_ms - now_ms)  # perhaps since then
    found = []
    for each, died_ms in ends.items():
        account = accounts.get(each.component_id) or Account(each.component_id)
        died = now.later(died_ms - now_ms - slept_ms)
        if 0 < first_ms < died.wall_ms and not _has_decided_since(account, died):
            report = Report(each, f"{died_ms:032x}", OVERTAKEN, age_ms=now_ms - died_ms)
            found.append(report)
            write_report(site.paths, report)
    return found


def _has_decided_since(account: Account, died: Moment) -> bool:
    """Return True if a death was decided about since this moment, by one of both clocks: one of
    them may be set."""
    return any(
        each.wall_ms >= died.wall_ms - _NEAR_MS
        or (each.boot_id == died.boot_id and each.boottime_ms >= died.boottime_ms - _NEAR_MS)
        for each in account.records
        if each.action in DECISIONS
    )
