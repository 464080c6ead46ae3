"""The draft of a plan: the intents so far, and the world as it will be once they are carried out.

The parts of the plan write it one after the other.
"""

from __future__ import annotations

from typing import Final

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import EX_TEMPFAIL, Death, classify
from nomarr_systemd.core.ids import Component, next_start_job
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.start_table import Turn
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.world import Turns, Worker, World

MASKED: Final = "it is masked, by a decision before this or by hand"


class Draft:
    """Intents are added by ``do``; accounts, holds and incidents are changed with them."""

    def __init__(self, world: World, now: Moment) -> None:
        self.intents: list[Intent] = []
        self.world = world
        self.now = now
        self.workers = {worker.component.component_id: worker for worker in world.workers}
        self.accounts = {
            name: worker.account or Account(name) for name, worker in self.workers.items()
        }
        self.holds = {name: worker.hold for name, worker in self.workers.items()}
        self.incidents = dict(world.incidents)
        self.early: set[str] = set()  # workers whose backoff is cut short
        self.turns = dict(world.turns) if world.ledger == "sound" else {}
        self.started: set[str] = set()  # workers that this plan starts
        self.at_fault: dict[str, str] = {}  # runs whose death a job is blamed for, and the text

    def do(self, *intents: Intent) -> None:
        self.intents += intents

    def refund(self, worker: Worker, invocation: str, why: str) -> None:
        name = worker.component.component_id
        account, record = book_keeping.refund(self.accounts[name], invocation, self.now, why)
        if record is not None:
            self.accounts[name] = account
            self.do(do.Refund(worker.component, invocation, why))

    def excuse(self, worker: Worker, death: Death) -> Death:
        """Return the death with its excuse: a hold, or a mask, also one that is still owed. An
        absent supervisor excuses one death in a window: a worker could have killed it."""
        held = self.holds[death.component_id]
        if death.supervisor_away and self._was_excused(worker):
            death = death._replace(supervisor_away=False)
        if held and not held.startswith(INCIDENT):
            return death._replace(held=held)
        owed = self.accounts[death.component_id].unfinished()
        is_masked = worker.unit.masked or any(record.action == "fail" for record in owed)
        return death._replace(held=MASKED) if is_masked else death

    def _was_excused(self, worker: Worker) -> bool:
        """Return True if the supervisor's absence has excused a death of it within the window."""
        window_ms = worker.rules.window_s * 1000
        return any(
            record.action == "hold"
            and record.code == EX_TEMPFAIL
            and age_ms(record.moment, self.now) < window_ms
            for record in self.accounts[worker.component.component_id].records
        )

    def hold(self, worker: Worker, text: str) -> None:
        """Hold a member, unless a person holds it. The text changes with the incident."""
        held = self.holds[worker.component.component_id]
        if not held or (held.startswith(INCIDENT) and held != text):
            self.holds[worker.component.component_id] = text
            self.do(do.Hold(worker.component, text))

    def release(self, worker: Worker) -> None:
        self.holds[worker.component.component_id] = ""
        self.do(do.Release(worker.component))

    def note(self, component: Component, invocation: str, effect: str) -> None:
        if self.world.ledger == "sound":
            self.do(do.Note(component, invocation, effect))

    def turn_of(self, component: Component) -> Turn:
        """Return the worker's turn to start; restarts of a pool may have to wait for each other."""
        turns = self.turns.get(component.pool)
        if turns is None:
            return ""
        if component.component_id in turns.mine:
            return "held"
        return "free" if turns.free > 0 else "taken"

    def start(self, component: Component, run: str) -> None:
        """Start the worker; with a turn, if there is one."""
        if self.turn_of(component) == "free":
            turns = self.turns[component.pool]
            mine = turns.mine | {component.component_id}
            self.turns[component.pool] = Turns(turns.free - 1, mine)
            self.do(do.TakeTurn(component))
        self.started.add(component.component_id)
        self.do(do.Start(component, run))

    def pool(self, pool: str) -> list[Worker]:
        return [each for each in self.workers.values() if each.component.pool == pool]


def make_failed_start(worker: Worker, last: Record) -> Death:
    """Return the death for a start that was due and did not change the unit."""
    return classify(
        "",
        start_job=True,
        lacks=worker.unit.lacks,
        component_id=worker.component.component_id,
        invocation=next_start_job(last.invocation),
        at=last.due,
    )
