"""Outages of a whole pool: its workers are held and not blamed, one canary is tried, and all follow
when that is healthy (DESIGN §12).

Everything an incident asks for is derived from its document, so it may be done again by whoever
comes next. A hold is the file that pauses use, with other words in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.death import Death
from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.death import Failure
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.incident import LEAST, SPAN_MS, Incident, Loss, find_outage
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.host import clock
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.incidents import Breaker
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.live import client
from nomarr_systemd.systemd import journal
from nomarr_systemd.systemd.manager import Manager

INCIDENT: Final = "incident:"


class Incidents:
    """Those of one installation. Every method may be called by any number of processes."""

    def __init__(
        self, paths: Paths, config: Config, manager: Manager, ledger: Ledger, breaker: Breaker
    ) -> None:
        self._paths = paths
        self._holds = Holds(paths.hold)
        self._config = config
        self._manager = manager
        self._ledger = ledger
        self._breaker = breaker
        self._losses: dict[str, list[Loss]] = {}  # of each pool that had any, the latest

    def screen(self, deaths: Sequence[Death]) -> list[Death]:
        """The same deaths; those that belong to an outage say so, and its members are held."""
        pools = {death.component.pool for death in deaths if self._is_loss(death)}
        incidents = {pool: self._find_or_open(pool, deaths) for pool in sorted(pools)}
        screened = []
        for death in deaths:
            incident = incidents.get(death.component.pool)
            name = death.component.component_id
            if incident is not None and name == incident.canary and self._is_loss(death):
                incident = incidents[incident.pool] = self._succeed(incident, death)
            if incident is None or not self._is_loss(death) or name == incident.canary:
                screened.append(death)
                continue
            if name not in incident.members:
                incident = self._breaker.add(incident.pool, name) or incident
            self._hold(death.component, incident.text)
            failure = death.failure._replace(incident=incident.text.removeprefix(f"{INCIDENT} "))
            screened.append(death._replace(failure=failure))
        return screened

    def _succeed(self, incident: Incident, death: Death) -> Incident:
        """Before the outage costs the canary all it has, another one is tried, if one can be.

        Each pays for its own tries, so that this ends.
        """
        if self._may_restart(incident.canary, death.failure):
            return incident
        for name in incident.members:
            component = parse_component(name)
            could_be = Failure("0" * 32, incident.kind, incident.code)
            if name == incident.canary or not self._is_held(component):
                continue
            if self._may_restart(name, could_be):
                return self._breaker.elect(incident.pool, name) or incident
        return incident

    def _may_restart(self, name: str, failure: Failure) -> bool:
        """What the policy would say; nothing is put on record."""
        account, now = self._ledger.account(name), clock.now()
        rules = self._config.find_rules(parse_component(name))
        return book_keeping.record_failure(account, failure, rules, now)[1].action == "restart"

    def _is_loss(self, death: Death) -> bool:
        """Neither excused nor final by its own word, as a mistake in the configuration is."""
        rules = self._config.find_rules(death.component)
        return death.is_to_blame and death.failure.code not in rules.never_restart

    def were_open(self) -> bool:
        """Whether there is one to look after."""
        return any(not incident.closed for incident in self._breaker.incidents())

    def look_after(self) -> bool:
        """See every incident through; whether one is still open."""
        still_open = False
        open_pools = set()
        for incident in self._breaker.incidents():
            if incident.closed:
                continue
            self._settle(incident)
            if self._has_ended(incident):
                continue
            open_pools.add(incident.pool)
            still_open = True
        self._release(open_pools)
        return still_open

    def close(self, pool: str, why: str) -> bool:
        """A person's word, or the canary's: the pool runs. False if there was no incident."""
        incident = self._breaker.get(pool)
        if incident is None or not self._breaker.close(pool, why, clock.now()):
            return False
        journal.write_incident(pool, f"incident of {pool} is closed: {why}", opened=False)
        self._let_go(incident)
        return True

    def _let_go(self, incident: Incident) -> None:
        """Start its members now, also those whose backoff began before it was an incident.

        Cut short, the rest lose their holds at the next look and start when they are due.
        """
        members = [parse_component(name) for name in incident.members]
        asked = ["ActiveState", "LoadState", "InvocationID"]
        shown = self._manager.show([each.unit for each in members], asked)
        for component in members:
            if self._is_held(component):
                self._holds.release(component)
            unit, name = shown[component.unit], component.component_id
            is_down = unit["ActiveState"] == "failed" and unit["LoadState"] != "masked"
            last = self._ledger.account(name).find_last(unit["InvocationID"])
            if not is_down or self._holds.read(component):
                continue
            if last is None or last.effect == "done":
                continue  # somebody has cancelled it
            self._manager.start(component.unit)
            self._manager.cancel_timer(component)
            effect = "done" if last.action == "hold" else "started"
            self._ledger.set_effect(name, last.invocation, effect)

    def _find_or_open(self, pool: str, deaths: Iterable[Death]) -> Incident | None:
        """The pool's open incident, or one that these deaths make."""
        last = self._breaker.get(pool)
        if last is not None and not last.closed:
            return last
        workers = [each for each in self._config.components() if each.pool == pool]
        now = clock.now()
        if len(workers) < LEAST or (
            last is not None
            and age_ms(last.opened, now) < self._config.find_rules(workers[0]).window_s * 1000
        ):
            return None
        booked = self._recall(workers, now)
        fresh = [
            Loss(death.component.component_id, death.failure.invocation, *death.failure[1:3], now)
            for death in deaths
            if death.component.pool == pool and self._is_loss(death)
        ]
        self._losses[pool] = [*booked, *fresh]
        outage = find_outage(self._losses[pool], len(workers), now)
        if not outage:
            return None
        first = outage[0]
        members = tuple(loss.component_id for loss in outage)
        refunds = tuple(
            (loss.component_id, loss.invocation)
            for loss in booked
            if loss.component_id in members[1:] and loss[2:4] == first[2:4]
        )
        made = Incident(pool, first.kind, first.code, now, first.component_id, members, refunds)
        incident = self._breaker.open(made)
        if incident == made:
            text = f"{made.text}, the others wait and are not blamed"
            journal.write_incident(pool, text, opened=True)
        self._settle(incident)
        return incident

    def _recall(self, workers: Sequence[Component], now: Moment) -> list[Loss]:
        """The deaths of late that these workers of a pool were blamed for.

        By heart; at first from the ledger, since a controller before this one may have been
        killed a moment ago.
        """
        pool = workers[0].pool
        if pool in self._losses:
            return [loss for loss in self._losses[pool] if age_ms(loss.moment, now) < SPAN_MS]
        names = {worker.component_id for worker in workers}
        return [
            Loss(account.component_id, record.invocation, record.kind, record.code, record.moment)
            for account in self._ledger.accounts()
            if account.component_id in names
            for record in map(Record.read, account.rows[-3:])
            if record.action in ("restart", "fail") and age_ms(record.moment, now) < SPAN_MS
        ]

    def _settle(self, incident: Incident) -> None:
        """Give back what the first deaths cost, and hold what is down."""
        for name, invocation in incident.refunds:
            component = parse_component(name)
            rules = self._config.find_rules(component)
            self._ledger.refund(name, invocation, rules, incident.text)
        members = [parse_component(name) for name in incident.members if name != incident.canary]
        shown = self._manager.show([each.unit for each in members], ["ActiveState", "LoadState"])
        for component in members:
            unit = shown[component.unit]
            if unit["ActiveState"] == "failed" and unit["LoadState"] != "masked":
                self._hold(component, incident.text)

    def _has_ended(self, incident: Incident) -> bool:
        """Close it if the canary lives or none is left; elect another if this one is out."""
        canary = parse_component(incident.canary)
        if self._is_held(canary):  # elected by somebody who was cut off
            self._holds.release(canary)
            return False
        facts = ["ActiveState", "LoadState", "InvocationID"]
        unit = self._manager.show([canary.unit], facts)[canary.unit]
        if not self._is_out(canary, unit):
            if unit["ActiveState"] != "active" or not self._is_healthy(canary):
                return False
            return self.close(incident.pool, f"{incident.canary} is healthy")
        others = [parse_component(name) for name in incident.members if name != incident.canary]
        shown = self._manager.show([each.unit for each in others], ["LoadState"])
        for other in others:
            if shown[other.unit]["LoadState"] != "masked" and self._is_held(other):
                if self._breaker.elect(incident.pool, other.component_id) is None:
                    return True
                self._holds.release(other)  # the hold on record is then finished
                return False
        return self.close(incident.pool, "no worker is left to try")

    def _is_out(self, canary: Component, unit: Mapping[str, str]) -> bool:
        """Whether nothing will start it: masked, stopped, paused, or its backoff was cancelled."""
        if unit["LoadState"] == "masked" or unit["ActiveState"] == "inactive":
            return True
        if unit["ActiveState"] != "failed":
            return False
        last = self._ledger.account(canary.component_id).find_last(unit["InvocationID"])
        return bool(self._holds.read(canary)) or (last is not None and last.effect == "done")

    def _is_healthy(self, canary: Component) -> bool:
        """By the supervisor; without one, systemd's word that it runs must do."""
        answer = client.ask(self._paths.live, {"op": "snapshot"})
        if not answer:
            return True
        return any(
            each.get("component") == canary.component_id and each.get("status") == "healthy"
            for each in answer.get("workers", [])
        )

    def _release(self, open_pools: set[str]) -> None:
        """Take away the holds of incidents that are over; the reconciler starts what they held."""
        for name in self._holds.instances():
            try:
                component = parse_component(name)
            except BadName:
                continue
            if component.pool not in open_pools and self._is_held(component):
                self._holds.release(component)

    def _hold(self, component: Component, text: str) -> None:
        """Unless a person holds it, whose word is the stronger. The words change with the
        incident: more die of it, another canary is tried."""
        held = self._holds.read(component)
        if not held or (held.startswith(INCIDENT) and held != text):
            self._holds.hold(component, text)

    def _is_held(self, component: Component) -> bool:
        return self._holds.read(component).startswith(INCIDENT)
