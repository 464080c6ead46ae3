"""Deadlines of many workers: they share moments, and none is too early or much too late."""

from __future__ import annotations

from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Deadlines, Worker, Workers

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
    rules = HealthRules()
    ends: dict[str, float] = {}

    def tick(worker: Worker) -> None:
        if any(each.new == "dead" for each in worker.tick(clock.now)):
            ends[worker.component_id] = clock.now
        deadlines.arm(worker)

    deadlines = Deadlines(clock, tick)
    workers = Workers()
    begun = clock.now
    due = {}
    for number in range(WORKERS):
        clock.now = begun + number * 5 / WORKERS
        worker = workers.add(Component("tag", number), -1)
        worker.register(clock.now)
        worker.take(worker.decoder.feed(encode(worker.component_id, "healthy")), clock.now)
        deadlines.arm(worker)
        due[worker.component_id] = clock.now + rules.max_misses * rules.staleness_interval_s
    wakeups = clock.run_until(begun + 5 + 3 * rules.staleness_interval_s + 1)
    assert ends.keys() == due.keys()
    assert all(0 <= ends[name] - due[name] <= 0.25 for name in due)
    assert wakeups <= 4 * 21 + WORKERS / 100
    clock.close()
