"""Tells the supervisor of deaths, and reads from its answer what became of their jobs.

The answer is untrusted: it is bounded, and the plan uses it only to refund restarts, and to fail a
pool that has failed by the ledger's own count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import KeyExists, StoreError
from nomarr_systemd.core.ids import is_run
from nomarr_systemd.core.intents import BlameJobs, Consult, Tell
from nomarr_systemd.core.plan import is_blamed
from nomarr_systemd.core.world import Outcome
from nomarr_systemd.host import clock

BLAMED: Final = "job_crashes"  # runs whose jobs were blamed and restarts refunded
TIMEOUT_S: Final = 2.0  # it answers within a second, settled or not
_KEPT_MS: Final = 30 * 86_400_000
_KEPT: Final = 1000  # notes, and names of jobs in each: 18 kB at most
_KEPT_JOBS: Final = 20


def tell_supervisor(
    site: Site, tells: Sequence[Tell], consults: Sequence[Consult] = ()
) -> tuple[list[Outcome], set[str]]:
    """Tell of deaths in one request; return what became of their jobs, and the told invocations
    that there is no answer for yet."""
    deaths = [*map(_describe_tell, tells), *map(_describe_consult, consults)]
    if not deaths:
        return [], set()
    from nomarr_systemd.live.answers import parse_outcomes

    request = {"op": "crashed", "deaths": deaths}
    settled = parse_outcomes(site.live.ask(request, about=len(deaths), timeout_s=TIMEOUT_S))
    outcomes = [
        Outcome(each["component"], each["invocation"], *settled[each["invocation"]])
        for each in deaths
        if each["invocation"] in settled
    ]
    told = {each.record.invocation for each in tells}
    unanswered = {each for each in told if each not in settled and is_run(each)}
    return [each for each in outcomes if each.refund or each.fail_pool], unanswered


def _describe_tell(tell: Tell) -> Mapping[str, Any]:
    return {
        "component": tell.component.component_id,
        "invocation": tell.record.invocation,
        "cause": tell.death.line,
        "decision": f"{tell.record.action}: {tell.record.text}",
        "blamed": is_blamed(tell.record),
        "failed": tell.record.action == "fail",
    }


def _describe_consult(consult: Consult) -> Mapping[str, Any]:
    """Return a death that is not decided about yet, as a request has it."""
    return {
        "component": consult.component.component_id,
        "invocation": consult.death.invocation,
        "cause": consult.death.line,
        "decision": "",
        "blamed": True,
        "failed": False,
    }


def read_refunded(site: Site, outcomes: Iterable[Outcome]) -> frozenset[str]:
    """Return the runs among these whose restarts were refunded already."""
    with contextlib.suppress(StoreError):
        return frozenset(
            each.invocation
            for each in outcomes
            if each.refund and site.store.get(BLAMED, each.invocation) is not None
        )
    return frozenset()


def note_blame(site: Site, intent: BlameJobs) -> None:
    """Note that restarts were refunded for these jobs; remove old notes."""
    now_ms = clock.now().wall_ms
    document = {
        "_key": intent.invocation,
        "wall_ms": now_ms,
        "job": intent.jobs[0],
        "jobs": list(intent.jobs[:_KEPT_JOBS]),
        "component_id": intent.component.component_id,
        "host": site.host,
    }
    with contextlib.suppress(KeyExists):
        site.store.insert(BLAMED, document)
    site.store.prune(BLAMED, "wall_ms", now_ms - _KEPT_MS)
    # Where hosts share the store, one must not remove the notes of another.
    too_many = 0 if site.host else site.store.count(BLAMED, {}) - _KEPT
    if too_many > 0:
        for old in site.store.find(BLAMED, order="wall_ms", limit=too_many):
            site.store.delete(BLAMED, old["_key"])
