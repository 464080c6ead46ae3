"""Deadlines of many workers: they share moments, and none is too early or much too late."""

from __future__ import annotations

import os

from nomarr_systemd.core.frames import EVENTS
from nomarr_systemd.core.health import REGISTERED, HealthRules, Transition
from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Registry, Worker

WORKERS = 500


class Clock(Loop):
    """A loop that notes when it would wake, and whose time goes as it is told."""

    def run_until(self, when: float) -> int:
        """How often it has to wake until then."""
        wakeups = 0
        while self._heap and self._heap[0][0] <= when:
            self.now = self._heap[0][0]
            self._fire()
            wakeups += 1
        self.now = when
        return wakeups


def test_many_silent_workers_die_in_few_wakeups() -> None:
    clock = Clock()
    ends: dict[str, float] = {}

    def see(worker: Worker, transitions: tuple[Transition, ...]) -> None:
        if any(transition.new == "dead" for transition in transitions):
            ends[worker.component_id] = clock.now

    rules = HealthRules()
    registry = Registry(clock, rules, on_change=see, before_tick=lambda _worker: None)
    begun = clock.now
    due = {}
    for number in range(WORKERS):
        clock.now = begun + number * 5 / WORKERS
        worker = registry.add(Component("tag", number), os.open(os.devnull, os.O_RDONLY))
        registry.step(worker, REGISTERED)
        registry.step(worker, EVENTS["healthy"])
        due[worker.component_id] = clock.now + rules.max_misses * rules.staleness_interval_s
    wakeups = clock.run_until(begun + 5 + 3 * rules.staleness_interval_s + 1)
    assert ends.keys() == due.keys()
    assert all(0 <= ends[name] - due[name] <= 0.25 for name in due)
    assert wakeups <= 4 * 21 + WORKERS / 100
    for worker in registry.workers.values():
        os.close(worker.fd)
    clock.close()
