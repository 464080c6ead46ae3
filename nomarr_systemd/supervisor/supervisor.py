"""The supervisor: pipe → decode → step → announce.

Inputs are callbacks of the loop (pipes, systemd's links, deadlines) and calls of the live server,
which is above this module. What a transition leads to is in health_actions.py, what the store is
needed for in store_tasks.py, the beginning and end of a run in ``_sync``. Nothing here blocks: the
program has one thread, and helpers do what may block (helper.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.death import LABELS
from nomarr_systemd.core.frames import Frame
from nomarr_systemd.core.health import (
    EOF_GONE,
    NOISE,
    RESET,
    SET_FAILED,
    STOP_REQUESTED,
    Event,
    State,
    tick,
)
from nomarr_systemd.core.ids import Component, find_instance, is_run
from nomarr_systemd.core.job import LEFT, STOPPED, RunEnd
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.host.layout import WORKER_USER, Paths
from nomarr_systemd.host.log import WARNING, RateLimit
from nomarr_systemd.supervisor import disagreement, pipe_store, pipes
from nomarr_systemd.supervisor.announcer import Announcer
from nomarr_systemd.supervisor.health_actions import HealthActions
from nomarr_systemd.supervisor.helper import ask_child, close_helpers
from nomarr_systemd.supervisor.job_settler import Outcomes
from nomarr_systemd.supervisor.kill import Killer
from nomarr_systemd.supervisor.live_connection import Subscribers
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.pipe_store import PipeStore
from nomarr_systemd.supervisor.run_state import RunState
from nomarr_systemd.supervisor.store_tasks import StoreTasks
from nomarr_systemd.supervisor.unit_queries import UnitQueries
from nomarr_systemd.supervisor.workers import Crash, Deadlines, Run, Worker, Workers, split_frames
from nomarr_systemd.systemd.running_units import RunningUnits

DEFER_S: Final = 1.0  # how long a report of deaths waits for their jobs to be settled
_MOST_READS: Final = 17  # of one pipe at once: a worker may have made it 1 MiB large
_MUCH: Final = pipes.PIPE_BYTES // 4  # in one read: the pipe is filling up, so it must not wait


class ReportedDeath(NamedTuple):
    """A death as the controller reports it."""

    worker: Worker
    invocation: str
    cause: str
    decision: str
    blamed: bool  # it counts as a crash
    failed: bool  # the worker is not restarted


class Supervisor:
    """``start``, ``watch_pipes``, then the loop's ``run``, then ``close``. ``config`` None: it is
    not valid; keep every pipe."""

    def __init__(
        self, paths: Paths, config: Config | None, loop: Loop, pipe_store: PipeStore
    ) -> None:
        self.workers = Workers()
        self.subscribers = Subscribers()
        self.announcer = Announcer(loop, self.workers, self.subscribers)
        self._loop = loop
        self._config = config or Config()
        self._is_configured = config is not None
        self._since_ms = _now_ms()
        self._pipe_store = pipe_store
        self._rate = RateLimit()
        self._pipes = pipes.Pipes(paths.health, pipe_store)
        self._is_system = not paths.user
        self.public = paths.public
        self._units = RunningUnits(paths.runtime)
        self._run_state = RunState(paths.run_state, loop)
        self._queries = UnitQueries(loop, user=paths.user)
        self._killer = Killer(loop, self._queries, self._run_state)
        self._deadlines = Deadlines(loop, self._be_due)
        self._actions = HealthActions(
            self._deadlines, self._queries, self._killer, self._run_state, self.announcer
        )
        self.store_tasks = StoreTasks(
            *(loop, self.workers, self.subscribers, self.announcer),
            units_directory=self._units.directory,
            public=paths.public,
        )

    @property
    def config(self) -> Config:
        return self._config

    # Start, reload, end

    def start(self) -> None:
        """Open and store every pipe."""
        wanted = {each.instance: each for each in self._config.components()}
        if not self._is_configured:
            # Without a configuration keep every pipe: its worker still writes.
            taken = self._pipe_store.taken
            wanted = {name: each for name in taken if (each := find_instance(name))}
        else:
            self._pipes.tidy(wanted)
        self.workers.expect(len(wanted))
        self._add_all(wanted.values())
        self._pipes.give_up_stored()
        self.keep_pipes()
        for component_id in set(self._run_state.component_ids()) - self.workers.by_id.keys():
            self._run_state.forget(component_id)
        self._loop.watch(self._units.fd, select.EPOLLIN, self._take_units, first=True)
        self.store_tasks.begin(self._config if self._is_configured else None)

    def watch_pipes(self) -> None:
        """Begin to read. Subscribers that waited for the supervisor are served before this."""
        for worker in self.workers:
            self._watch(worker)

    def reload(self, config: Config) -> None:
        """Change the configuration: pipes are added and removed, all others stay as they are."""
        self._config = config
        self._is_configured = True
        self.store_tasks.configure(config)
        wanted = {each.component_id: each for each in config.components()}
        for worker in list(self.workers):
            if worker.component_id not in wanted:
                self._remove(worker)
        self.workers.expect(len(wanted))
        new = [each for name, each in wanted.items() if name not in self.workers.by_id]
        added = self._add_all(new)
        self.keep_pipes()
        for worker in added:
            self._watch(worker)
            self.announcer.tell_worker(worker)
        for worker in self.workers:
            worker.rules = config.health_for(worker.component)
            self._grant(worker)  # its pool may have another user
            self._deadlines.arm(worker)
        self.announcer.tell_system_soon()

    def close(self) -> None:
        """Close everything but the pipes; they and the run state stay for the next supervisor.
        Claims show it which jobs are not settled."""
        self.store_tasks.close()
        close_helpers()
        self._units.close()
        self._run_state.close()

    def keep_pipes(self) -> None:
        """Have systemd keep the pipes that there are, unless it does."""
        if not self._pipe_store.is_whole:
            self._pipe_store.keep({each.component.instance: each.fd for each in self.workers})

    def _add_all(self, components: Collection[Component]) -> list[Worker]:
        known = set(self._run_state.component_ids())
        unknown = [each for each in components if each.component_id not in known]
        found = ask_child(partial(_find_failed, self.public, unknown)) if unknown else None
        failed = set(found or ())
        return [self._add(each, has_failed=each.instance in failed) for each in components]

    def _add(self, component: Component, *, has_failed: bool) -> Worker:
        fd = self._pipes.open(component.instance)
        worker = self.workers.add(component, fd, self._config.health_for(component))
        self._grant(worker)
        is_kept = self._recall(worker)
        self._sync(worker)
        if not is_kept and not worker.invocation and has_failed:
            self._step(worker, SET_FAILED)  # as after a boot
            self._run_state.keep(worker)
        return worker

    def _grant(self, worker: Worker) -> None:
        """Let the worker's user write its pipe. A user's own supervisor has the same user."""
        pool = next((it for it in self._config.pools if it.name == worker.component.pool), None)
        if self._is_system and pool:
            pipes.grant(worker.fd, pool.user or WORKER_USER)

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        fd, worker.fd = worker.fd, -1
        self._loop.forget(fd)
        self._pipes.discard(worker.component.instance, [fd])
        self._run_state.forget(worker.component_id)

    def _recall(self, worker: Worker) -> bool:
        """Restore what the supervisor before this one kept; False if there is nothing."""
        kept = self._run_state.recall(worker.component_id)
        with contextlib.suppress(TypeError, KeyError):
            worker.ended = Run(*kept["ended"][:4]) if kept.get("ended") else None
            worker.crash = Crash(*kept["crash"]) if kept.get("crash") else None
        if kept.get("failed"):
            self._step(worker, SET_FAILED)
        invocation, label = kept.get("invocation"), kept.get("label")
        if isinstance(invocation, str) and invocation:
            # As if its start had been seen. If it has ended since, _sync finds that.
            worker.begin(invocation)
            self._register(worker)
            if isinstance(label, str) and label in LABELS and worker.state.status != "failed":
                worker.label = label
                worker.state = State("dead", cause=label)
                self._killer.kill(worker, label)
        return bool(kept)

    # Pipes

    def _watch(self, worker: Worker) -> None:
        # Level-triggered epoll would spin on a pipe without a writer.
        mask = select.EPOLLIN | select.EPOLLET
        self._loop.watch_gently(worker.fd, mask, partial(self._be_readable, worker))

    def _be_readable(self, worker: Worker, events: int) -> None:
        if events & select.EPOLLHUP:
            worker.is_hung_up = True
        if not worker.is_queued:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        """Read once; if there may be more, read again after the other workers were read."""
        worker.is_queued = False
        if worker.fd < 0:
            return
        chunk = pipes.read(worker.fd)
        if not chunk:
            worker.is_hung_up = False
            if chunk is not None:  # no writer is left: systemd's link shows if the run ended
                worker.decoder.finish()
                self._sync(worker)
            return
        self._take(worker, chunk)
        if len(chunk) >= _MUCH:
            self._loop.hurry()
        # More than was read is reported again by epoll; an end that was reported is not.
        if len(chunk) == pipes.PIPE_BYTES or worker.is_hung_up:
            self._read_later(worker)

    def _read_later(self, worker: Worker) -> None:
        if not worker.is_queued:
            worker.is_queued = True
            self._loop.soon(partial(self._read, worker))

    def _take(self, worker: Worker, chunk: bytes) -> None:
        """Decode, step, announce. systemd shows a run before its first frame can be written, so
        frames that may be of a new run are given to ``_sync`` after they were read."""
        frames = worker.decoder.feed(chunk)
        if worker.may_be_of_new_run(frames) and self._sync(worker, frames):
            return
        transitions = worker.take_all(frames, self._loop.now)
        if worker.decoder.drops:
            self._log_drops(worker)
        self._actions.follow(worker, transitions)
        if frames:
            self._announce_frames(worker, frames)
        elif transitions:
            self.announcer.tell_worker(worker)

    def _announce_frames(self, worker: Worker, frames: Sequence[Frame]) -> None:
        limit_s = worker.rules.stall_timeout_s
        is_stalled = disagreement.is_stalled(worker.progress_age_s, limit_s)
        worker.disagreement = disagreement.HUNG if is_stalled else ""
        if self.subscribers.connections:
            self.announcer.tell_frames(worker, frames)
            self.store_tasks.queue_topics.take_frames(worker)

    def _drain(self, worker: Worker) -> list[Frame]:
        """Decode what is in the pipe now."""
        frames: list[Frame] = []
        for _ in range(_MOST_READS):
            chunk = pipes.read(worker.fd)
            if not chunk:
                return frames
            frames += worker.decoder.feed(chunk)
        self._read_later(worker)
        return frames

    def _log_drops(self, worker: Worker) -> bool:
        """False if no line was dropped since the last call."""
        drops = sum(worker.decoder.drops.values())
        if drops == worker.drops:
            return False
        self._rate.log(
            WARNING,
            "lines on the pipe that are not frames",
            component=worker.component_id,
            new=drops - worker.drops,
            all=",".join(f"{kind}:{number}" for kind, number in worker.decoder.drops.items()),
        )
        worker.drops = drops
        return True

    # Runs

    def _take_units(self, _events: int) -> None:
        changed = self._units.changed()
        if changed is None:
            for worker in tuple(self.workers):
                self._sync(worker)
            return
        for name in changed:
            component = find_instance(name)
            found = self.workers.by_id.get(component.component_id) if component else None
            if found:
                self._sync(found)

    def _sync(self, worker: Worker, read: Sequence[Frame] = ()) -> bool:
        """Compare the run that systemd shows with the one that is known. If it is another, take
        the frames that were read and those that are in the pipe, and return True."""
        current = self._units.read(worker.component)
        if current == worker.invocation:
            return False
        frames = [*read, *self._drain(worker)]
        worker.decoder.finish()
        is_noisy = self._log_drops(worker)
        has_ended = bool(worker.invocation)
        old, new = split_frames(frames, current, has_ended=has_ended)
        if has_ended:
            self._actions.follow(worker, worker.take(old, self._loop.now))
            self._end_run(worker)
        elif old:
            worker.keep(old)
        worker.begin(current)
        if current:
            self._register(worker)
            if is_noisy and not has_ended:
                self._step(worker, NOISE)
            self._actions.follow(worker, worker.take(new, self._loop.now))
            patience_s = worker.rules.staleness_interval_s * worker.rules.max_misses
            check = partial(self._actions.check_for_frames, worker, current)
            self._loop.at_about(self._loop.now + patience_s, check)
        if current:  # else it is kept when systemd has answered: the next supervisor would ask
            self._run_state.keep(worker)
        if frames:
            self._announce_frames(worker, frames)
        else:
            self.announcer.tell_worker(worker)
        return True

    def _end_run(self, worker: Worker) -> None:
        """Record the end of the run, and ask systemd if a stop was requested. If it was, or if the
        run sent a stopping frame, its jobs are settled then; else when the controller reports the
        death."""
        self._killer.forget(worker.invocation)
        worker.ended = worker.run
        is_farewell = worker.state.stopping
        if is_farewell:
            self._step(worker, EOF_GONE)
        conclude = partial(self._conclude, worker, worker.invocation, is_farewell)
        self._queries.ask_if_stopped(worker.component, worker.invocation, conclude)
        self.store_tasks.expect_settling()

    def _conclude(
        self, worker: Worker, invocation: str, is_farewell: bool, is_requested: bool
    ) -> None:
        """Take systemd's answer about the end of a run. Another may have begun since."""
        is_last = not worker.invocation and worker.ended and worker.ended.invocation == invocation
        if not is_farewell and is_last:
            if is_requested:
                self._step(worker, STOP_REQUESTED)
            self._step(worker, EOF_GONE)
        elif not is_farewell and not is_requested:
            self._actions.note_crash(worker, invocation, "pipe-closed")
        self._run_state.keep(worker)
        self.announcer.tell_worker(worker)
        if is_requested or is_farewell:
            cause = STOPPED if is_requested else LEFT
            end = RunEnd(worker.component_id, invocation, cause, _now_ms(), counted=False)
            has_stopped = is_requested and self.workers.is_last(worker)
            self.store_tasks.settle(end._replace(pool_stopped=has_stopped))

    # Health

    def _step(self, worker: Worker, event: Event) -> None:
        self._actions.follow(worker, worker.step(event, self._loop.now))

    def _register(self, worker: Worker) -> None:
        self._actions.follow(worker, worker.register(self._loop.now))

    def _tick(self, worker: Worker) -> None:
        self._actions.follow(worker, worker.tick(self._loop.now))

    def _be_due(self, worker: Worker) -> None:
        """Handle a deadline: read the pipe before the tick."""
        for _ in range(2):
            if not (chunk := pipes.read(worker.fd)):
                break
            self._take(worker, chunk)
        else:
            self._read_later(worker)
        _, changes = tick(worker.state, worker.heard_at, self._loop.now, worker.rules)
        if changes:
            take = partial(self._be_late, worker, worker.invocation)
            self._queries.ask_if_stopped(worker.component, worker.invocation, take)
        else:
            self._tick(worker)

    def _be_late(self, worker: Worker, invocation: str, is_stopping: bool) -> None:
        """Take the silence of a worker for trouble, unless its stop was requested."""
        if worker.invocation == invocation:
            if is_stopping:
                self._step(worker, STOP_REQUESTED)
            else:
                self._tick(worker)
            self.announcer.tell_worker(worker)

    # For the live server

    def take_deaths(
        self, deaths: Iterable[ReportedDeath], reply: Callable[[Outcomes], None]
    ) -> None:
        """Record deaths as the controller reports them, and settle the jobs of their runs.

        ``reply`` is called with the outcomes, by invocation; None for those that were not settled
        within DEFER_S, or still run.
        """
        ends = []
        still_running: Outcomes = {}
        for worker, invocation, cause, decision, blamed, failed in deaths:
            self._sync(worker)  # its end may not have been read yet
            known = worker.crash
            if not known or (known.invocation, known.decision) != (invocation, decision):
                worker.crash = Crash(_now_ms(), cause, invocation, decision)
                self.announcer.tell_crash(worker, cause)
            if failed:
                self._step(worker, SET_FAILED)
            self._run_state.keep(worker)
            self.announcer.tell_worker(worker)
            if invocation == worker.invocation:
                still_running[invocation] = None
            elif is_run(invocation):
                end = RunEnd(worker.component_id, invocation, cause, _now_ms(), counted=blamed)
                ends.append(end)

        def answer(found: Outcomes) -> None:
            reply(found | still_running)

        self.store_tasks.settle_and_wait(ends, DEFER_S, answer)

    def set_failed(self, worker: Worker) -> None:
        self._step(worker, SET_FAILED)
        self._run_state.keep(worker)
        self.announcer.tell_worker(worker)

    def reset(self, worker: Worker) -> None:
        self._step(worker, RESET)
        if worker.invocation and worker.state.status == "unregistered":
            self._register(worker)  # it runs already
        self._run_state.keep(worker)
        self.announcer.tell_worker(worker)

    def describe_self(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "since_wall_ms": self._since_ms,
            "notify_failures": pipe_store.notify_failures,
            "stored_pipes": self._pipe_store.count,
        }


def _find_failed(public: str, components: Iterable[Component]) -> list[str]:
    """The instances of workers that were failed when their accounts were published."""
    from nomarr_systemd.ledger.public import read_published  # large, and needed once

    return [
        each.instance
        for each in components
        if read_published(public, each).account.failure_reason is not None
    ]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
