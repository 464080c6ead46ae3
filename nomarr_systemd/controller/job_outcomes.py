"""Tells the supervisor of deaths, and reads from its answer what became of their jobs.

The answer is untrusted: it is bounded, and the plan uses it only to refund restarts, and to fail a
pool that has failed by the ledger's own count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import KeyExists, StoreError
from nomarr_systemd.core.ids import is_run
from nomarr_systemd.core.intents import Quarantine, Tell
from nomarr_systemd.core.plan import is_blamed
from nomarr_systemd.core.world import Outcome
from nomarr_systemd.host import clock
from nomarr_systemd.live.answers import parse_outcomes

QUARANTINES: Final = "job_crashes"  # runs whose jobs were quarantined and restarts refunded
TIMEOUT_S: Final = 2.0  # it answers within a second, settled or not
_KEPT_MS: Final = 30 * 86_400_000
_KEPT: Final = 1000  # notes, and names of jobs in each: 18 kB at most
_KEPT_JOBS: Final = 20


def tell_supervisor(site: Site, tells: Sequence[Tell]) -> tuple[list[Outcome], set[str]]:
    """Tell of deaths in one request; return what became of their jobs, and the invocations that
    there is no answer for yet."""
    if not tells:
        return [], set()
    deaths = [
        {
            "component": each.component.component_id,
            "invocation": each.record.invocation,
            "cause": each.death.line,
            "decision": f"{each.record.action}: {each.record.text}",
            "blamed": is_blamed(each.record),
            "failed": each.record.action == "fail",
        }
        for each in tells
    ]
    request = {"op": "crashed", "deaths": deaths}
    answer = site.live.ask(request, about=len(deaths), timeout_s=TIMEOUT_S)
    settled = parse_outcomes(answer)
    outcomes, unanswered = [], set()
    for each in tells:
        invocation = each.record.invocation
        if invocation in settled:
            name = each.component.component_id
            outcomes.append(Outcome(name, invocation, *settled[invocation]))
        elif is_run(invocation):  # a start that failed had no job
            unanswered.add(invocation)
    return [each for each in outcomes if each.quarantined or each.fail_pool], unanswered


def read_quarantines(site: Site, outcomes: Iterable[Outcome]) -> frozenset[str]:
    """Return the runs among these whose restarts were refunded already."""
    with contextlib.suppress(StoreError):
        return frozenset(
            each.invocation
            for each in outcomes
            if each.quarantined and site.store.get(QUARANTINES, each.invocation) is not None
        )
    return frozenset()


def note_quarantine(site: Site, intent: Quarantine) -> None:
    """Note that restarts were refunded for these jobs; remove old notes."""
    now_ms = clock.now().wall_ms
    document = {
        "_key": intent.invocation,
        "wall_ms": now_ms,
        "job": intent.jobs[0],
        "jobs": list(intent.jobs[:_KEPT_JOBS]),
        "component_id": intent.component.component_id,
    }
    with contextlib.suppress(KeyExists):
        site.store.insert(QUARANTINES, document)
    site.store.prune(QUARANTINES, "wall_ms", now_ms - _KEPT_MS)
    too_many = site.store.count(QUARANTINES, {}) - _KEPT
    if too_many > 0:
        for old in site.store.find(QUARANTINES, order="wall_ms", limit=too_many):
            site.store.delete(QUARANTINES, old["_key"])
