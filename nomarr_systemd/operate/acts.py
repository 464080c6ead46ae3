"""What a person does to workers: pause, resume, restart, reset. Each may be repeated, is on record
with the person's name, and keeps the controller from acting while it changes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host import clock
from nomarr_systemd.host.holds import Holds, make_pause
from nomarr_systemd.host.scope import Scope, name_person
from nomarr_systemd.live import client
from nomarr_systemd.operate import controlling
from nomarr_systemd.operate.job_store import forget_pool_failure
from nomarr_systemd.operate.waiting import FACTS, Facts, Tell, is_down, is_idle, queue, wait_for
from nomarr_systemd.systemd.journal import Journal
from nomarr_systemd.systemd.manager import Manager, Verb, monotonic_ms
from nomarr_systemd.systemd.timers import timer_of

_TELL_SUPERVISOR_MS: Final = 2000  # for all workers together, if the supervisor is slow


class Result(NamedTuple):
    """The result of an act for one worker: a word for scripts and a text for people."""

    worker: Component
    word: str
    text: str


class Report(NamedTuple):
    """One act of one person, and its result for each worker."""

    action: str
    by: str
    results: list[Result]
    warnings: list[str]


class _Act:
    def __init__(self, scope: Scope, config: Config, action: str) -> None:
        self.scope = scope
        self.config = config
        self.action = action
        self.by = name_person()
        self.holds = Holds(scope.paths.hold)
        self.manager = Manager(user=scope.user)
        self.journal = Journal(scope.paths)
        self._results: dict[Component, Result] = {}
        self._warnings: list[str] = []

    def record(self, workers: Sequence[Component], action: str, text: str = "") -> None:
        """Put the act on record before it is done. Without a store, warn and continue."""
        try:
            if workers:
                controlling.note(self.scope, self.config, workers, action, self.by, text)
        except StoreError as error:
            self._warnings.append(f"the ledger has no record of this: {error}")

    def queue(self, verb: Verb, workers: Sequence[Component]) -> None:
        queue(self.manager, verb, [worker.unit for worker in workers])

    def add(
        self, workers: Sequence[Component], word: str, text: str = "", *, log: bool = False
    ) -> None:
        """Set the result of these workers; ``log`` also writes it to the journal."""
        for worker in workers:
            self._results[worker] = Result(worker, word, text or word)
            if log:
                self.journal.write_act(worker, word, self.by)

    def report(self) -> Report:
        results = [self._results[worker] for worker in sorted(self._results)]
        return Report(self.action, self.by, results, self._warnings)


class Span(NamedTuple):
    """What a pause holds besides its workers, why, and for how long."""

    pools: Sequence[str] = ()  # new workers of these begin paused; ALL: of every pool
    reason: str = ""
    for_s: float | None = None


_PLAIN: Final = Span()


def pause(
    scope: Scope, config: Config, workers: Sequence[Component], tell: Tell, span: Span = _PLAIN
) -> Report:
    """Let workers finish their job and keep them down. Returns when they are down or resumed."""
    act = _Act(scope, config, "pause")
    until_ms = None if span.for_s is None else clock.now().wall_ms + round(span.for_s * 1000)
    asked = make_pause(act.by, span.reason, until_ms)
    with controlling.alone(scope):
        # The holds come first: a worker that dies or is added from here on stays down.
        for pool in span.pools:
            act.holds.switch(pool, asked)
        new = [worker for worker in workers if act.holds.pause(worker, asked)]
        act.record(new, "pause", span.reason)
        controlling.arm_end_of_pauses(scope, config)
        units = [*map(timer_of, workers), *(each.unit for each in workers)]
        queue(act.manager, "stop", units)
    resumed: list[Component] = []

    def is_done(worker: Component, facts: Facts) -> bool:
        if not act.holds.is_paused(worker):
            resumed.append(worker)
            return True
        return is_down(facts)

    wait_for(act.manager, workers, is_done, "finishing their jobs", tell)
    act.add(new, "paused", log=True)
    act.add([each for each in workers if each not in new], "already-paused", "was paused already")
    act.add(resumed, "resumed", "was resumed meanwhile")
    return act.report()


def resume(
    scope: Scope, config: Config, workers: Sequence[Component], pools: Sequence[str] = ()
) -> Report:
    """Let paused workers run again, and close the incidents that hold any of these. New workers
    of ``pools`` may run, too."""
    act = _Act(scope, config, "resume")
    elsewhere = [pool.name for pool in config.pools if pool.name not in pools]
    hurt = {each.pool for each in workers if controlling.is_incident(act.holds.read(each))}
    ended = controlling.end_incidents(scope, config, sorted(hurt), f"resumed by {act.by}")
    with controlling.alone(scope):
        if pools:
            act.holds.unswitch(pools, elsewhere)
        paused = [worker for worker in workers if act.holds.is_paused(worker)]
        shown = act.manager.show([each.unit for each in paused], FACTS)
        masked = [each for each in paused if shown[each.unit]["LoadState"] == "masked"]
        good = [each for each in paused if each not in masked]
        act.record(good, "resume")
        for worker in paused:
            act.holds.begin_resume(worker)
        act.queue("start", good)
        for worker in paused:  # if killed before this, the next resume does it again
            act.holds.end_resume(worker)
    act.add(good, "resumed", log=True)
    act.add(masked, "masked", "has failed for good: nomarrctl reset --start")
    others = [each for each in workers if each not in paused]
    act.add([each for each in others if each.pool in ended], "resumed", "no longer held")
    left = [each for each in others if each.pool not in ended]
    strange = [each for each in left if act.holds.read(each)]
    act.add(strange, "held", "is held, and was not paused: nomarrctl doctor tells more")
    act.add([each for each in left if each not in strange], "not-paused", "was not paused")
    return act.report()


def restart(scope: Scope, config: Config, workers: Sequence[Component], tell: Tell) -> Report:
    """Let workers finish their job and start them again; held and masked ones are left alone."""
    act = _Act(scope, config, "restart")
    with controlling.alone(scope):
        shown = act.manager.show([each.unit for each in workers], FACTS)
        held = [each for each in workers if act.holds.read(each)]
        free = [each for each in workers if each not in held]
        masked = [each for each in free if shown[each.unit]["LoadState"] == "masked"]
        good = [each for each in free if each not in masked]
        act.record(good, "manual", "restarted by hand")
        if good:
            act.manager.stop(map(timer_of, good))
        act.queue("restart", good)
    found = wait_for(
        act.manager,
        good,
        lambda _, facts: is_idle(facts),
        "finishing their jobs and starting",
        tell,
    )
    up = [
        each
        for each in good
        if found[each]["ActiveState"] in ("active", "activating")
        and found[each]["InvocationID"] != shown[each.unit]["InvocationID"]
    ]
    act.add(up, "restarted", log=True)
    down = [each for each in good if each not in up]
    act.add(down, "not-started", "did not start: see nomarrctl why")
    act.add(held, "held", "is held; nomarrctl status says why, nomarrctl resume ends a pause")
    act.add(masked, "masked", "has failed for good: nomarrctl reset --start")
    return act.report()


def reset(
    scope: Scope,
    config: Config,
    workers: Sequence[Component],
    *,
    pools: Sequence[str] = (),
    start: bool = False,
) -> Report:
    """Reset the counts of workers and unmask them; clear the failure of ``pools``."""
    act = _Act(scope, config, "reset")
    units = [worker.unit for worker in workers]
    with controlling.alone(scope):
        controlling.reset_counts(scope, config, workers, act.by)
        act.manager.stop(map(timer_of, workers))
        act.manager.unmask(units)
        act.manager.reset_failed(units)
        if not start:
            # A person wants it to stay down: else it would be started as one that failed.
            shown = act.manager.show(units, FACTS)
            down = (worker for worker in workers if is_down(shown[worker.unit]))
            act.manager.stop(worker.wanted_unit for worker in down)
        for worker in workers:
            act.holds.release(worker)
        _tell_supervisor(scope, workers)
        for pool in pools:
            forget_pool_failure(config.store, pool)
        held = {worker: act.holds.read(worker) for worker in workers}
        started = [worker for worker in workers if start and not held[worker]]
        act.queue("start", started)
    act.add(workers, "reset", log=True)
    act.add(started, "reset-and-started", "reset and started")
    for worker in workers if start else ():
        if act.holds.is_paused(worker):
            text = "reset, and not started: paused; nomarrctl resume lets it run"
            act.add([worker], "paused", text)
        elif held[worker]:
            act.add([worker], "held", f"reset, and not started: {held[worker]}")
    return act.report()


def _tell_supervisor(scope: Scope, workers: Sequence[Component]) -> None:
    ends = monotonic_ms() + _TELL_SUPERVISOR_MS
    batch = client.Batch(scope.paths.live)
    for worker in workers:
        if batch.is_silent or monotonic_ms() > ends:
            return  # the supervisor does not answer; at its next start it asks systemd
        batch.ask({"op": "reset", "component": worker.component_id})
