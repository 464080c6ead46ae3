"""The part of the plan without a ledger that can be written: restart after the longest backoff,
never mask, and spool each death.
"""

from __future__ import annotations

from nomarr_systemd.core import intents as do
from nomarr_systemd.core.death import DEPENDENCY, Death
from nomarr_systemd.core.draft import Draft, make_failed_start
from nomarr_systemd.core.policy import decide_blind
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import Spooled, Worker


def plan_blind(draft: Draft) -> None:
    """Spool each new death; start or schedule what waits for a restart."""
    spooled = {entry.death.run: entry for entry in draft.world.spooled}
    for worker in draft.world.workers:
        # Deaths that only the supervisor has to be told are booked already.
        deaths = [each for each in worker.deaths if each.run not in draft.world.untold]
        for death in deaths:
            if death.run not in spooled or draft.accounts[death.component_id].find_last(death.run):
                _take(draft, worker, death)
        unit, held = worker.unit, draft.holds[worker.component.component_id]
        if not held and unit.is_still_failed(unit.invocation) and unit.wanted:
            entry = spooled.get(unit.invocation)
            if entry is not None and _is_to_be_started(entry):
                _restart(draft, worker, entry.at.later(entry.decision.delay_ms))
            elif not deaths and _was_decided(worker):
                draft.do(do.Start(worker.component, unit.invocation))


def _take(draft: Draft, worker: Worker, death: Death) -> None:
    """Spool the death; a second report of it means that a start failed, which is spooled instead.
    Clear what is booked."""
    last = draft.accounts[death.component_id].find_last(death.run)
    if last is None:
        spool(draft, worker, draft.excuse(worker, death))
    elif last.effect == "started" and worker.unit.is_still_failed(death.run):
        spool(draft, worker, draft.excuse(worker, make_failed_start(worker, last)))
    else:
        draft.do(do.Clear(worker.component, death.run))


def _was_decided(worker: Worker) -> bool:
    """Return True if its timer shows that its restart was booked before the ledger went away."""
    is_over = worker.rang or worker.unit.timer == "elapsed"
    return worker.account is None and is_over


def spool(draft: Draft, worker: Worker, death: Death) -> None:
    at = death.at or draft.now
    entry = Spooled(death, decide_blind(death, worker.rules), at)
    draft.do(do.Spool(worker.component, entry), do.Clear(worker.component, death.run))
    unit = worker.unit
    if _is_to_be_started(entry) and unit.is_still_failed(death.run) and unit.wanted:
        _restart(draft, worker, at.later(entry.decision.delay_ms), first=True)


def _is_to_be_started(entry: Spooled) -> bool:
    return entry.decision.action == "restart" or entry.death.kind == DEPENDENCY.kind


def _restart(draft: Draft, worker: Worker, due: Moment, *, first: bool = False) -> None:
    """Start the worker if that is due; if it was tried, try again after the longest backoff."""
    now, unit = draft.now, worker.unit
    if due.boot_id == now.boot_id and due.boottime_ms > now.boottime_ms:
        if unit.timer != "waiting":
            draft.do(do.Schedule(worker.component, due))
    elif first or unit.timer == "elapsed":
        draft.do(do.Start(worker.component, unit.invocation))
        if unit.timer != "none":
            draft.do(do.CancelTimer(worker.component))
    elif unit.timer == "none":
        longest_ms = max(1000, round(worker.rules.backoff_max_s * 1000))
        draft.do(do.Schedule(worker.component, now.later(longest_ms)))
