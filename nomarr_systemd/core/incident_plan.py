"""The part of the plan about incidents: one is opened, has members and a canary, and is closed.

``core.incident`` says which deaths make one; docs/policy.md tells the whole story.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.draft import Draft
from nomarr_systemd.core.incident import INCIDENT, LEAST, SPAN_MS, Incident, open_incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.time import age_ms
from nomarr_systemd.core.world import Worker

HYPOTHETICAL: Final = "0" * 32  # the invocation of a death that is only imagined


def look_after_incidents(draft: Draft) -> None:
    """Advance every open incident, then end the holds of closed ones."""
    for incident in list(draft.incidents.values()):
        if not incident.closed and incident.pool in draft.world.resumed:
            _close(draft, incident, draft.world.resumed[incident.pool])
        elif not incident.closed:
            _settle_incident(draft, incident)
            _look_after(draft, incident)
    for worker in draft.world.workers:
        incident_or_none = draft.incidents.get(worker.component.pool)
        is_open = incident_or_none is not None and not incident_or_none.closed
        if not is_open and draft.holds[worker.component.component_id].startswith(INCIDENT):
            draft.release(worker)


def _settle_incident(draft: Draft, incident: Incident) -> None:
    """Refund the restarts of the first deaths; hold the members that wait for a restart."""
    for name, invocation in incident.refunds:
        if name in draft.workers:
            draft.refund(draft.workers[name], invocation, incident.text)
    for worker in _members(draft, incident):
        account, unit = draft.accounts[worker.component.component_id], worker.unit
        last = account.find_last(unit.invocation) if unit.state == "failed" else None
        if last is not None and last.effect != "done" and last.action in ("restart", "hold"):
            draft.hold(worker, incident.text)


def _look_after(draft: Draft, incident: Incident) -> None:
    """Close the incident if the canary is healthy; elect another one if nothing will start
    this one; close it if there is none."""
    canary = draft.workers.get(incident.canary)  # None: it is no longer configured
    if canary and draft.holds[incident.canary].startswith(INCIDENT):
        draft.release(canary)  # an election was cut off
    elif canary and not _is_out(draft, canary):
        if canary.unit.state == "active" and incident.canary in draft.world.healthy:
            _close(draft, incident, f"{incident.canary} is healthy")
    elif others := [each for each in _members(draft, incident) if _is_electable(draft, each)]:
        _elect(draft, incident, others[0])
    else:
        _close(draft, incident, "no worker is left to try")


def _is_out(draft: Draft, canary: Worker) -> bool:
    """Return True if nothing will start it: masked, stopped, paused, or its decision is done."""
    unit, name = canary.unit, canary.component.component_id
    if unit.masked or (unit.state == "inactive" and not unit.has_job):
        return True
    if unit.state != "failed" or unit.has_job:
        return False
    if draft.holds[name] or not unit.wanted:
        return True
    last = draft.accounts[name].find_last(unit.invocation)
    return not canary.deaths and last is not None and last.effect == "done"


def _close(draft: Draft, incident: Incident, why: str) -> None:
    """Close it. Its members start at once, also those whose backoff began before it."""
    draft.incidents[incident.pool] = incident._replace(closed=why)
    draft.do(do.Close(incident.pool, why, _count_deaths(draft, incident)))
    draft.early |= {incident.canary, *(name for name, _ in incident.refunds)}


def _count_deaths(draft: Draft, incident: Incident) -> int:
    """Count the deaths of its members since those that opened it; each has died once at least."""
    since_ms = age_ms(incident.opened, draft.now) + SPAN_MS
    total = 0
    for name in incident.members:
        rows = draft.accounts[name].rows if name in draft.accounts else ()
        deaths = 0
        for record in map(Record.read, reversed(rows)):
            if age_ms(record.moment, draft.now) >= since_ms:
                break
            deaths += bool(record.kind) and record.action in ("restart", "fail", "hold")
        total += max(1, deaths)
    return total


def find_outage(draft: Draft, pool: str, deaths: Iterable[tuple[Worker, Death]]) -> None:
    """Open an incident if these deaths, with recent ones, make one."""
    known, last = draft.world.pools.get(pool), draft.incidents.get(pool)
    fresh = [death._replace(at=draft.now) for worker, death in deaths if _is_loss(worker, death)]
    if not fresh or known is None or known.workers < LEAST:
        return
    if last is not None and (
        not last.closed or age_ms(last.opened, draft.now) < known.window_s * 1000
    ):
        return
    booked = draft.world.recent.get(pool, ())
    incident = open_incident(booked, fresh, pool, known.workers, draft.now)
    if incident is not None:
        draft.incidents[pool] = incident
        draft.do(do.OpenIncident(incident))
        _settle_incident(draft, incident)


def _is_loss(worker: Worker, death: Death) -> bool:
    """True unless the death is excused, or its exit status is never restarted."""
    return not death.is_excused and death.code not in worker.rules.never_restart


def screen(draft: Draft, worker: Worker, death: Death) -> Death:
    """Return the death; if it is part of an incident, mark it so and hold its worker."""
    component, name = worker.component, death.component_id
    incident = draft.incidents.get(component.pool)
    if incident is None or incident.closed or not _is_loss(worker, death):
        return death
    if name == incident.canary:
        incident = _succeed(draft, incident, worker, death)
        if name == incident.canary:
            return death
    if name not in incident.members:
        incident = incident._replace(members=(*incident.members, name))
        draft.incidents[incident.pool] = incident
        draft.do(do.Join(incident.pool, name))
    draft.hold(worker, incident.text)
    return death._replace(incident=incident.text.removeprefix(f"{INCIDENT} "))


def _succeed(draft: Draft, incident: Incident, worker: Worker, death: Death) -> Incident:
    """Elect another canary if this one would not be restarted any more and another would be.

    Each canary uses its own restarts, so that this ends.
    """
    if _would_restart(draft, worker, death):
        return incident
    for other in _members(draft, incident):
        thought = Death(other.component.component_id, HYPOTHETICAL, incident.kind, incident.code)
        if _is_electable(draft, other) and _would_restart(draft, other, thought):
            return _elect(draft, incident, other)
    return incident


def _would_restart(draft: Draft, worker: Worker, death: Death) -> bool:
    account = draft.accounts[worker.component.component_id]
    record = book_keeping.record_failure(account, death, worker.rules, draft.now)[1]
    return record.action == "restart"


def _is_electable(draft: Draft, worker: Worker) -> bool:
    held = draft.holds[worker.component.component_id]
    return held.startswith(INCIDENT) and not worker.unit.masked and worker.unit.wanted


def _elect(draft: Draft, incident: Incident, worker: Worker) -> Incident:
    tried = (*incident.tried, incident.canary)
    incident = incident._replace(canary=worker.component.component_id, tried=tried)
    draft.incidents[incident.pool] = incident
    draft.do(do.Elect(incident.pool, incident.canary))
    draft.release(worker)
    return incident


def _members(draft: Draft, incident: Incident) -> list[Worker]:
    """Return all members but the canary."""
    names = (name for name in incident.members if name != incident.canary)
    return [draft.workers[name] for name in names if name in draft.workers]
