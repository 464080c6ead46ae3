"""The plan itself, not a model of it, explored: every world that a few workers, deaths, people,
reboots and kills of the controller can lead to, breadth first, and beyond that at random.

The test prints how many distinct worlds it visited; ``make test-deep`` visits two million.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nomarr_systemd.core.policy import Rules
from tests.support import model_machine as model
from tests.support.depth import IS_DEEP, times
from tests.support.model_machine import Broken, Machine

MOST = times(10_000)
# A short window and two restarts: limits are met within a few deaths.
RULES = Rules(max_restarts=2, window_s=60, backoff_base_s=1, backoff_jitter=0)
AT_ONCE = RULES._replace(backoff_base_s=0, max_lifetime_restarts=3)
STAY = RULES._replace(on_clean_exit="stay")


def explore(machine: Machine, rules: Rules, most: int) -> int:
    """Visit worlds breadth first; return how many, or raise Broken with the way to a bad one."""
    key = model.freeze(machine)
    seen: dict[int, tuple[int, str]] = {key: (0, "")}
    todo = deque([machine])
    while todo and len(seen) < most:
        machine = todo.popleft()
        came_from = model.freeze(machine)
        try:
            for what, after in [*model.happenings(machine), *model.passes(machine, rules)]:
                key = model.freeze(after)
                if key in seen:
                    continue
                seen[key] = (came_from, what)
                model.check(after, rules)
                if what == "pass":
                    model.check_settled(model.run_pass(after, rules), rules)
                todo.append(after)
        except Broken as error:
            raise Broken(f"{error}; after {', '.join(_way(seen, key))}") from error
    return len(seen)


def _way(seen: dict[int, tuple[int, str]], key: int) -> list[str]:
    way: list[str] = []
    while key in seen and seen[key][1]:
        key, what = seen[key]
        way.insert(0, what)
    return way


@pytest.mark.parametrize(
    ("workers", "rules", "turns"),
    [(1, RULES, 0), (1, AT_ONCE, 0), (1, STAY, 0), (2, RULES, 0), (3, RULES, 0), (1, AT_ONCE, 1),
     (2, AT_ONCE, 1)],
    ids=["one", "one-at-once", "one-that-finishes", "two", "three-and-incidents", "in-turn",
         "two-in-turn"],
)  # fmt: skip
def test_every_world_that_can_be_reached(workers: int, rules: Rules, turns: int) -> None:
    visited = explore(model.make_machine(workers, turns), rules, MOST)
    print(f"{visited} distinct worlds of {workers} workers")
    assert visited >= MOST


def test_a_restart_that_waits_for_its_timer_keeps_no_turn() -> None:
    """Its start failed while the ledger was away: then it was scheduled, blindly."""
    machine = model.make_machine(1, 1)
    for event in ("die 0", "lack 0", "", "fail start 0", "away", "", "sound", ""):
        if event in ("away", "sound"):
            machine = machine._replace(ledger=event)
        elif event:
            machine = dict(model.happenings(machine))[event]
        else:
            machine = model.run_pass(machine, AT_ONCE)
            model.check_settled(machine, AT_ONCE)
    assert machine.workers[0].due_ms > 0
    assert not machine.turns


class PlanMachine(RuleBasedStateMachine):
    """Long ways at random, also without a ledger."""

    @initialize(
        workers=st.integers(1, 4),
        rules=st.sampled_from([RULES, AT_ONCE, STAY]),
        turns=st.integers(0, 2),
    )
    def begin(self, workers: int, rules: Rules, turns: int) -> None:
        self.machine = model.make_machine(workers, turns)
        self.policy = rules

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        ways = dict(model.happenings(self.machine))
        self.machine = ways[data.draw(st.sampled_from(sorted(ways)))]
        model.check(self.machine, self.policy)

    @rule(data=st.data())
    def the_controller_is_killed(self, data: st.DataObject) -> None:
        ways = [after for _, after in model.passes(self.machine, self.policy)]
        self.machine = data.draw(st.sampled_from(ways))
        model.check(self.machine, self.policy)

    @rule()
    def the_controller_runs(self) -> None:
        self.machine = model.run_pass(self.machine, self.policy)
        model.check(self.machine, self.policy)
        model.check_settled(self.machine, self.policy)

    @rule(ledger=st.sampled_from(["sound", "read-only", "away"]))
    def the_ledger_changes(self, ledger: str) -> None:
        self.machine = self.machine._replace(ledger=ledger)

    @precondition(lambda self: hasattr(self, "machine") and self.machine.ledger != "sound")
    @rule()
    def the_ledger_is_back(self) -> None:
        self.machine = self.machine._replace(ledger="sound")
        self.the_controller_runs()


TestPlanAtRandom = PlanMachine.TestCase
TestPlanAtRandom.settings = settings(
    max_examples=times(100),
    phases=[Phase.generate] if IS_DEEP else tuple(Phase),  # deep ways are not made shorter
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
