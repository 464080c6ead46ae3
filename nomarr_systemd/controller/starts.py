"""Starts that were planned, each with its turn where restarts wait for each other, and none of a
worker that a person has stopped meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nomarr_systemd.controller.site import Site
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.log import log_error
from nomarr_systemd.systemd.manager import monotonic_ms
from nomarr_systemd.systemd.stop_intent import UNIT_FACTS, WANTED_FACTS, find_run, is_wanted
from nomarr_systemd.systemd.systemctl import ManagerError

FRESH_MS: Final = 50  # for so long what systemd has said is taken for the present
GRACE_MS: Final = 10_000  # that a turn lasts longer than a start may take


def take_turns(site: Site, intents: Sequence[do.TakeTurn]) -> set[Component]:
    """Take turns; return the workers that got none: another host was faster, or the store is away.
    They are retried, at the latest after the longest backoff: then restarts do not wait for a store
    that is away."""
    refused = {}
    for component in (each.component for each in intents):
        pool = site.config.pool_of(component)
        wait_s = 1.0
        try:
            if site.turns.take(component, round(pool.health.startup_timeout_s * 1000) + GRACE_MS):
                site.in_turn.add(component)
                continue
        except StoreError as error:
            log_error(error, component=component.component_id)
            site.forget_store()
            wait_s = site.config.find_rules(component).backoff_max_s
        refused[component] = monotonic_ms() + round(wait_s * 1000)
    if refused:
        log_refusals(site.manager.schedule_all(refused))
    return set(refused)


def give_turns(site: Site, intents: Sequence[do.GiveTurn]) -> None:
    """Give turns back, for others."""
    for each in intents:
        try:
            site.turns.give(each.component)
        except StoreError as error:
            log_error(error, component=each.component.component_id)  # it ends by itself
        site.in_turn.discard(each.component)


def start_all(
    site: Site, intents: Sequence[do.Start], timers: Sequence[str]
) -> tuple[set[Component], set[Component]]:
    """Start units, then stop the timers, in the same trip. If it is a while since systemd was
    asked, as with many deaths at once, ask again: a person may have stopped one meanwhile.

    Return the workers whose start was refused, and those that are no longer wanted.
    """
    if not intents:
        stop_all(site, timers)
        return set(), set()
    is_fresh = monotonic_ms() - site.observed_ms < FRESH_MS
    unwanted = set() if is_fresh else _find_unwanted(site, intents)
    wanted = {each.component.unit: each.component for each in intents}
    wanted = {unit: each for unit, each in wanted.items() if each not in unwanted}
    answers = site.manager.queue_all(start=wanted, stop=timers)
    refused = log_refusals({each: answers[unit] for unit, each in wanted.items()})
    site.started |= dict.fromkeys(set(wanted.values()) - refused, monotonic_ms())
    return refused, unwanted


def _find_unwanted(site: Site, intents: Sequence[do.Start]) -> set[Component]:
    """Return the workers that are no longer as they were observed, or no longer wanted."""
    units = [each.component.unit for each in intents]
    wanted = [each.component.wanted_unit for each in intents]
    states = site.manager.show([*units, *wanted], ("ActiveState", "Job"))
    # Those that are down and wanted may have been started since, and have failed again.
    shown = site.manager.show(units, ("InvocationID",))
    unsure = []
    for each in intents:
        unit, wish = states[each.component.unit], states[each.component.wanted_unit]
        is_down = unit["ActiveState"] in ("failed", "inactive") and not unit["Job"]
        is_same = shown[each.component.unit]["InvocationID"] == each.run
        if not is_down or not is_same or wish["ActiveState"] != "active" or wish["Job"]:
            unsure.append(each)
    return _find_unwanted_among(site, unsure)


def _find_unwanted_among(site: Site, intents: Sequence[do.Start]) -> set[Component]:
    """Return the same, by all facts: to show each takes systemd a while."""
    questions: dict[str, Sequence[str]] = {}
    for each in intents:
        questions[each.component.unit] = UNIT_FACTS
        questions[each.component.wanted_unit] = WANTED_FACTS
    shown = site.manager.show_each(questions)
    unwanted = set()
    for each in intents:
        unit, wanted = shown[each.component.unit], shown[each.component.wanted_unit]
        is_same = unit["ActiveState"] in ("failed", "inactive") and each.run in (
            unit["InvocationID"],
            find_run(unit, wanted),
        )
        if not is_same or not is_wanted(wanted):
            unwanted.add(each.component)
    return unwanted


def stop_all(site: Site, units: Sequence[str]) -> None:
    """Stop units, in one trip; log what is refused."""
    for unit, error in site.manager.queue_all(stop=units).items():
        if error is not None:
            log_error(error, unit=unit)


def log_refusals(answers: dict[Component, ManagerError | None]) -> set[Component]:
    """Log each refusal; return the workers that were refused."""
    refused = {each: answer for each, answer in answers.items() if answer is not None}
    for component, error in refused.items():
        log_error(error, component=component.component_id)
    return set(refused)
