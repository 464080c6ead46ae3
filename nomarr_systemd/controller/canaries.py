"""Watches a few workers by a few questions: the canaries of open incidents, and those that start in
their turn. The controller observes more only if one of them has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.incident import Incident

Canaries = tuple[tuple[str | bool, ...], ...]
_CANARY_FACTS: Final = ("ActiveState", "LoadState", "InvocationID", "Job")


def is_watching(site: Site) -> bool:
    """Return True if an incident is open, or a worker starts in its turn, which others wait for."""
    try:
        return bool(site.in_turn) or any(not each.closed for each in site.incidents.incidents())
    except StoreError:
        return False


def observe_canaries(site: Site) -> Canaries:
    """Return the state of the workers that are watched; empty if there are none."""
    try:
        incidents = {each.pool: each for each in site.incidents.incidents() if not each.closed}
    except StoreError:
        return ()
    if not incidents and not site.in_turn:
        return ()
    site.ask_anew()
    healthy = find_healthy(site, incidents.values())
    canaries = [parse_component(each.canary) for each in incidents.values()]
    canaries += sorted(site.in_turn)
    questions: dict[str, Sequence[str]] = {}
    for each in canaries:
        questions |= {each.unit: _CANARY_FACTS, each.wanted_unit: ("ActiveState",)}
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


def find_healthy(site: Site, incidents: Iterable[Incident]) -> frozenset[str]:
    """Return the canaries that are healthy; without a supervisor all that are active."""
    canaries = {each.canary for each in incidents if not each.closed}
    if not canaries:
        return frozenset()
    from nomarr_systemd.live.answers import parse_workers

    answer = site.live.ask({"op": "snapshot"}, about=len(site.config.components()))
    workers = parse_workers(answer)
    if workers is None:
        return frozenset(canaries)
    return frozenset(
        each for each in canaries if each in workers and workers[each].status == "healthy"
    )
