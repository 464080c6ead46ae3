"""Workers that do not run although they are wanted, other than by a failure that systemd shows: one
that ended well and unasked, one that could not be started at all, and one that failed as soon as it
was started. For each a report is written: it is booked, carried out and told like each other death.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nomarr_systemd.controller.ended_units import is_decided_blindly
from nomarr_systemd.controller.reports import ENDED_UNASKED, NOT_BEGUN, Report, write_report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import exit_words
from nomarr_systemd.core.ids import Component
from nomarr_systemd.systemd.needs import find_lacking
from nomarr_systemd.systemd.stop_intent import (
    find_run,
    has_begun,
    is_down,
    was_asked_to_stop,
)

Facts = Mapping[str, str]
Accounts = Mapping[str, Account] | None  # None: the ledger is away
_EXIT_FACTS: Final = ("Result", "ExecMainCode", "ExecMainStatus")
_CONDITIONS: Final = "its own start conditions, which are not met"


def find_down(site: Site, idle: Mapping[Component, str]) -> list[Component]:
    """Return the workers whose unit is inactive and whose wanted unit is active."""
    configured = set(site.config.components())
    asked = [each for each, state in idle.items() if state == "inactive" and each in configured]
    shown = site.manager.show([each.wanted_unit for each in asked], ["ActiveState"])
    return [each for each in asked if shown[each.wanted_unit]["ActiveState"] == "active"]


def find_lapses(
    site: Site,
    workers: Iterable[Component],
    shown: Mapping[str, Facts],
    reports: Sequence[Report],
    accounts: Accounts,
) -> list[Report]:
    """Report workers that ended unasked, failed or could not be started, unless that is known."""
    known = {each.invocation for each in reports}
    ended, found = [], []
    for each in workers:
        unit, wanted = shown[each.unit], shown[each.wanted_unit]
        run = find_run(unit, wanted)
        if not run or run in known or unit["LoadState"] == "masked" or not is_down(unit, wanted):
            continue
        if _is_decided(site, each, run, accounts):
            continue
        if not has_begun(unit, wanted):
            if not site.holds.read(each):
                found.append(Report(each, run, NOT_BEGUN))
        elif not was_asked_to_stop(unit, wanted) and (
            unit["ActiveState"] == "inactive" or _is_unheard(each, run, accounts)
        ):
            ended.append(each)
    exits = site.manager.show_each({each.unit: _EXIT_FACTS for each in ended})
    for each in ended:
        facts = exits[each.unit]
        words = exit_words(facts["ExecMainCode"], facts["ExecMainStatus"])
        is_end = shown[each.unit]["ActiveState"] == "inactive"
        run = shown[each.unit]["InvocationID"]
        found.append(Report(each, run, ENDED_UNASKED if is_end else facts["Result"], *words))
    for report in found:
        write_report(site.paths, report)
    return found


def _is_decided(site: Site, component: Component, run: str, accounts: Accounts) -> bool:
    """Return True if it is on record, and no start since then has failed. Without a ledger it is in
    the spool, or its timer waits."""
    if accounts is None:
        return is_decided_blindly(site, component, run)
    account = accounts.get(component.component_id)
    last = account.find_last(run) if account else None
    return last is not None and last.effect != "started"


def _is_unheard(component: Component, run: str, accounts: Accounts) -> bool:
    """Return True if the ledger has no record of this run, or is away."""
    if accounts is None:
        return True
    account = accounts.get(component.component_id)
    return account is not None and account.find_last(run) is None


def find_lacks(
    site: Site, workers: Iterable[Component], shown: Mapping[str, Facts], accounts: Accounts
) -> dict[Component, str]:
    """Return what workers need that could not be started: a unit that is not active, and its
    state. Few workers are asked about: those whose last start did not lead to a run."""
    asked = []
    for each in workers:
        unit, wanted = shown[each.unit], shown[each.wanted_unit]
        if is_down(unit, wanted) and (
            not has_begun(unit, wanted) or _was_started(each, unit["InvocationID"], accounts)
        ):
            asked.append(each)
    lacking = find_lacking(site.manager, [each.unit for each in asked])
    found = {}
    for each in asked:
        if each.unit in lacking:
            found[each] = lacking[each.unit]
        elif shown[each.unit]["ConditionResult"] == "no":
            found[each] = _CONDITIONS
    return found


def _was_started(component: Component, run: str, accounts: Accounts) -> bool:
    account = (accounts or {}).get(component.component_id)
    last = account.find_last(run) if account else None
    return last is not None and last.effect == "started"
