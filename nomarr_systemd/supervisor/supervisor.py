"""The supervisor itself: pipes and units in, health, kills, events and history out.

Everything here happens in the loop's thread and waits for nothing. What a part does is in its own
module; here is who tells whom.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.death import LABELS
from nomarr_systemd.core.frames import EVENTS
from nomarr_systemd.core.health import EOF_GONE, REGISTERED, RESET, SET_FAILED, State, Transition
from nomarr_systemd.core.ids import Component, find_instance, is_run, parse_component
from nomarr_systemd.core.job import LEFT, STOPPED
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.supervisor import disagreement, live_server, pipes
from nomarr_systemd.supervisor.announcer import News
from nomarr_systemd.supervisor.job_settler import Eyes
from nomarr_systemd.supervisor.kill import Killer, Target
from nomarr_systemd.supervisor.log import INFO, NOTICE, WARNING, Limited, log
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.queue_topics import Queues
from nomarr_systemd.supervisor.reader import Reader
from nomarr_systemd.supervisor.run_state import Memory
from nomarr_systemd.supervisor.snapshots import Snapshots, take_samples
from nomarr_systemd.supervisor.unit_queries import Inquiry
from nomarr_systemd.supervisor.workers import Crash, Registry, Run, Worker
from nomarr_systemd.systemd.running_units import Units

_LARGEST_PIPE: Final = 17  # reads; a worker may have made its pipe 1 MiB large


class Supervisor:
    """``start``, then the loop's ``run``, then ``close``. ``stored`` is what systemd kept.

    ``settle(component_id, invocation, cause)`` is called once for every run that has ended, also
    for those that ended while no supervisor was there. It must not block.
    """

    def __init__(
        self, paths: Paths, config: Config | None, loop: Loop, stored: dict[str, list[int]]
    ) -> None:
        self.registry = Registry(
            loop,
            (config or Config()).health,
            on_change=self._take_transitions,
            before_tick=self._look_again,
        )
        self._loop = loop
        self._reader = Reader(
            loop, take=self._take, at_end=self._take_end, before=self._before_read
        )
        self._config = config or Config()
        self._configured = config is not None
        self._since_ms = time.time_ns() // 1_000_000
        self._inquiry = Inquiry(loop, user=paths.user)
        self._killer = Killer(loop, self._inquiry.ask)
        self._snapshots = Snapshots()
        self._limited = Limited()
        self._taking = False  # frames: subscribers see where they lead, not each step
        self._pipes = pipes.Pipes(paths.health)
        self._units = Units(paths.runtime, f"{paths.runtime}/nomarr/stop")
        eyes = Eyes(self._find_invocation, self._units.was_asked_to_stop)
        self.queues = Queues(loop, eyes, self.registry)
        self.settle: Callable[[str, str, str], None] = self.queues.settle
        self.find_job = self.queues.find_job
        self.describe_settlement = self.queues.answer
        self.show_queues = self.queues.show
        self._memory = Memory(os.path.join(os.path.dirname(paths.live), "memory"))
        self._stored = stored
        listening, renewed = live_server.open_socket(paths.live, stored.pop(live_server.NAME, []))
        if renewed:
            pipes.unstore(live_server.NAME)
            pipes.store(live_server.NAME, listening.fileno())
        self._live = live_server.Live(loop, listening, self)
        self._news = News(
            loop,
            self.registry,
            self._live,
            is_store_away=lambda: self._snapshots.failing or self.queues.settler.failing,
        )

    # Beginning, changing, ending

    def start(self) -> None:
        """Have every pipe open and stored; then the loop may run, and READY=1 be said."""
        stored = self._stored
        wanted = {each.instance: each for each in self._config.components()}
        if not self._configured:
            # Better all that was there than nothing: their workers still write.
            wanted = {name: each for name in stored if (each := find_instance(name))}
        for instance in stored.keys() - wanted.keys():
            self._pipes.discard(instance, stored[instance])
        self._pipes.tidy(wanted)
        for instance, component in wanted.items():
            self._add(component, stored.get(instance, []))
        for component_id in set(self._memory.remembered()) - self.registry.workers.keys():
            self._memory.forget(component_id)
        self._loop.watch(self._units.fd, select.EPOLLIN, self._take_units, first=True)
        self._arm_snapshot()
        if self._configured:  # else we do not know where the jobs are
            self.queues.start(self._config, self._live)
        # Who was waiting for us is served before anything is read: they shall miss nothing.
        self._live.welcome()
        for worker in self.registry.workers.values():
            self._reader.watch(worker)

    def reload(self, config: Config) -> None:
        """Change to another configuration: pipes come and go, all others stay as they are."""
        self._config = config
        self._configured = True
        self.registry.rules = config.health
        self.queues.start(config, self._live)
        wanted = {each.component_id: each for each in config.components()}
        for worker in list(self.registry.workers.values()):
            if worker.component_id not in wanted:
                self._remove(worker)
        for component_id, component in wanted.items():
            if component_id not in self.registry.workers:
                worker = self._add(component, [])
                self._reader.watch(worker)
                self._news.tell_worker(worker)
        for worker in self.registry.workers.values():
            self.registry.arm(worker)
        self._news.tell_system_soon()

    def close(self) -> None:
        """Leave everything to the supervisor after us: pipes, socket and memory stay."""
        self._live.close()
        self.queues.close()
        self._snapshots.close()
        self._units.close()
        self._memory.close()

    def _add(self, component: Component, stored: list[int]) -> Worker:
        worker = self.registry.add(component, self._pipes.open(component.instance, stored))
        self._recall(worker)
        self._sync(worker)
        return worker

    def _remove(self, worker: Worker) -> None:
        self.registry.remove(worker)
        self._pipes.discard(worker.component.instance, [self._reader.forget(worker)])
        self._memory.forget(worker.component_id)

    def _recall(self, worker: Worker) -> None:
        """Go on where the supervisor before us was killed."""
        kept = self._memory.recall(worker.component_id)
        with contextlib.suppress(TypeError, KeyError):
            worker.ended = Run(*kept["ended"]) if kept.get("ended") else None
            worker.crash = Crash(*kept["crash"]) if kept.get("crash") else None
        if kept.get("failed"):
            self.registry.step(worker, SET_FAILED)
        invocation, label = kept.get("invocation"), kept.get("label")
        if isinstance(invocation, str) and invocation:
            # As if its run had been seen to start: if it is over by now, its end will be seen.
            worker.invocation = invocation
            self.registry.step(worker, REGISTERED)
            if isinstance(label, str) and label in LABELS and worker.state.status != "failed":
                worker.label = label
                worker.state = State(worker.component_id, "dead", cause=label)
                self._condemn(worker)

    def _keep(self, worker: Worker) -> None:
        self._memory.keep(
            worker.component_id,
            {
                "invocation": worker.invocation,
                "label": worker.label,
                "failed": worker.state.status == "failed",
                "ended": worker.ended,
                "crash": worker.crash,
            },
        )

    # Units: runs begin and end

    def _take_units(self, _events: int) -> None:
        changed = self._units.changed()
        if changed is None:
            for worker in tuple(self.registry.workers.values()):
                self._sync(worker)
            return
        for unit in changed:
            found = self.registry.by_unit.get(unit)
            if found:
                self._sync(found)

    def _sync(self, worker: Worker) -> None:
        """See which run of the worker systemd shows."""
        current = self._units.read(worker.component.unit)
        if current == worker.invocation:
            return
        if worker.invocation:
            self._end_run(worker)
        worker.invocation = current
        worker.label = worker.disagreement = ""
        worker.line = b""
        worker.frames = 0
        if current:
            self.registry.step(worker, REGISTERED)
            rules = self.registry.rules
            patience_s = rules.staleness_interval_s * rules.max_misses
            look = partial(self._look_for_frames, worker, current)
            self._loop.at(self._loop.now + patience_s, look)
        self._keep(worker)
        self._news.tell_worker(worker)

    def _find_invocation(self, component_id: str) -> str:
        """Also from another thread: a look at systemd's files, nothing else."""
        return self._units.read(parse_component(component_id).unit)

    def _end_run(self, worker: Worker) -> None:
        """systemd has let go of the run. What it left in the pipe is still its own."""
        invocation = worker.invocation
        self._reader.drain(worker, _LARGEST_PIPE)
        worker.decoder.finish()
        self._killer.pardon(invocation)
        if worker.state.status != "dead" and self._units.was_asked_to_stop(invocation):
            self.registry.step(worker, EVENTS["stopping"])
        self.registry.step(worker, EOF_GONE)
        peaceful = STOPPED if self._units.was_asked_to_stop(invocation) else LEFT
        cause = worker.state.cause if worker.state.status == "dead" else peaceful
        worker.ended = Run(invocation, worker.label, worker.said().get("job"), cause)
        self.settle(worker.component_id, invocation, cause)

    # Pipes: frames come

    def _before_read(self, worker: Worker) -> None:
        if worker.state.status in ("unregistered", "dead"):
            self._sync(worker)  # is it a new run that speaks?

    def _take_end(self, worker: Worker) -> None:
        """Gone, or only silent? The link tells, now or, through inotify, in a moment."""
        worker.decoder.finish()
        self._sync(worker)

    def _take(self, worker: Worker, chunk: bytes) -> None:
        self._taking = True
        frames = self.registry.feed(worker, chunk)
        self._taking = False
        if worker.decoder.drops:
            self._count_drops(worker)
        if frames:
            rules = self.registry.rules
            if disagreement.stands_still(worker.line, rules.stall_timeout_s):
                age = worker.said().get("progress_age_s") or 0
                worker.disagreement = disagreement.HUNG if age > rules.stall_timeout_s else ""
            else:
                worker.disagreement = ""
            self._news.tell_frames(worker, frames)
            self.queues.take_frames(worker)

    def _count_drops(self, worker: Worker) -> None:
        drops = sum(worker.decoder.drops.values())
        if drops != worker.drops:
            self._limited.log(
                WARNING,
                "lines on the pipe that are no frames",
                component=worker.component_id,
                new=drops - worker.drops,
                all=",".join(f"{kind}:{number}" for kind, number in worker.decoder.drops.items()),
            )
            worker.drops = drops

    # Health: what follows from a change

    def _look_again(self, worker: Worker) -> None:
        """Before time is held against a worker: what is unread, and whether it is to stop."""
        self._reader.drain(worker, 2)
        if worker.invocation and self._units.was_asked_to_stop(worker.invocation):
            self.registry.step(worker, EVENTS["stopping"])

    def _take_transitions(self, worker: Worker, transitions: tuple[Transition, ...]) -> None:
        for _, old, new, context in transitions:
            fields = {"component": worker.component_id, "was": old}
            if new == "dead":
                log(NOTICE, "is dead", cause=context, **fields)
                self._take_death(worker, context)
                continue
            # A worker can say unhealthy and healthy in turn as fast as it can write.
            self._limited.log(INFO if new != "failed" else NOTICE, f"is {new}", **fields)
            if new == "unhealthy" and worker.state.misses:
                self._inquiry.ask(
                    worker.component.unit, partial(self._compare, worker, worker.invocation)
                )
        if not self._taking:
            self._news.tell_worker(worker)

    def _take_death(self, worker: Worker, cause: str) -> None:
        text = LABELS[cause].line if cause in LABELS else "ended without a word: its pipe closed"
        wall_ms = time.time_ns() // 1_000_000
        worker.crash = Crash(wall_ms, text, worker.invocation)
        self._keep(worker)
        self._news.tell_crash(worker, cause)
        if cause in LABELS:
            self._condemn(worker)

    def _condemn(self, worker: Worker) -> None:
        """It shall end, so that systemd tells the controller: one path, one policy."""
        invocation = worker.invocation
        cause = worker.state.cause

        def label() -> None:
            # Before the signal: the controller may ask before we come to our next turn.
            worker.label = cause
            self._keep(worker)

        answer = partial(self._compare, worker, invocation)
        unit = worker.component.unit
        self._killer.condemn(Target(unit, invocation, worker.component_id, label, answer))

    def _look_for_frames(self, worker: Worker, invocation: str) -> None:
        """A run that has not said a word by now: what does systemd say of it?"""
        if worker.invocation == invocation and not worker.frames:
            self._inquiry.ask(worker.component.unit, partial(self._compare, worker, invocation))

    def _compare(self, worker: Worker, invocation: str, facts: disagreement.Facts | None) -> None:
        if facts is None or worker.invocation != invocation:
            return
        silent = worker.state.misses or not worker.frames or worker.state.status == "dead"
        if silent and worker.disagreement != disagreement.HUNG:
            name = disagreement.compare(
                facts,
                worker.state,
                frames=worker.frames,
                invocation=invocation,
                staleness_s=self.registry.rules.staleness_interval_s,
            )
            if name and name != worker.disagreement:
                log(NOTICE, f"systemd and the pipe disagree: {name}", component=worker.component_id)
            worker.disagreement = name
            self._news.tell_worker(worker)

    # What others tell and are told

    def take_crash(self, worker: Worker, invocation: str, cause: str, decision: str) -> str:
        """The controller's word on a death; the answer is our label for it."""
        worker.crash = Crash(time.time_ns() // 1_000_000, cause, invocation, decision)
        self._keep(worker)
        self._news.tell_crash(worker, cause)
        self._news.tell_worker(worker)
        self._sync(worker)  # its end may be in systemd's files and not yet in our ears
        if invocation and invocation == worker.invocation:
            return worker.label
        if is_run(invocation):
            self.queues.take_cause(worker.component_id, invocation, cause, decision)
        ended = worker.ended
        return ended.label if ended and ended.invocation == invocation else ""

    def settle_crash(self, worker: Worker, invocation: str) -> None:
        """By the controller's word: a run of an earlier supervisor's time, it may be."""
        self._sync(worker)
        if is_run(invocation) and invocation != worker.invocation:
            self.queues.settle_unseen(worker.component_id, invocation)

    def take_failed(self, worker: Worker) -> None:
        self.registry.step(worker, SET_FAILED)
        self._keep(worker)

    def take_reset(self, worker: Worker) -> None:
        self.registry.step(worker, RESET)
        if worker.invocation and worker.state.status == "unregistered":
            self.registry.step(worker, REGISTERED)  # it runs already
        self._keep(worker)

    def describe_self(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "since_wall_ms": self._since_ms}

    def describe_system(self) -> dict[str, Any]:
        return self._news.describe_system()

    def summarize(self) -> str:
        """One line for ``systemctl status``."""
        counts: dict[str, int] = {}
        for worker in self.registry.workers.values():
            counts[worker.status] = counts.get(worker.status, 0) + 1
        parts = ", ".join(f"{counts[word]} {word}" for word in sorted(counts))
        return f"{len(self.registry.workers)} workers" + (f": {parts}" if parts else "")

    # History

    def _arm_snapshot(self) -> None:
        self._loop.at(self._loop.now + self.registry.rules.snapshot_interval_s, self._snapshot)

    def _snapshot(self) -> None:
        samples = take_samples(self.registry.workers.values())
        if samples:
            self._snapshots.offer(self._config.store, samples)
        self._news.tell_system_soon()  # the store may be away, or back
        self._arm_snapshot()
