"""Queues and jobs for the live socket (DESIGN §13). Workers' frames say that something changed;
what it is, is read from the store by the settler's thread: soon while somebody looks, and slowly
always, for what no frame told.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import Doc, key_of
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs import queue, stats
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.settlement import Outcome, failure_of
from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor import live_server
from nomarr_systemd.supervisor.job_settler import UNSEEN, Eyes, Settler, describe
from nomarr_systemd.supervisor.log import NOTICE, WARNING, log
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.workers import Registry, Worker

ALL: Final = "queue:status"
JOBS: Final = "queue:jobs"
SOON_S: Final = 0.5  # between two looks while somebody watches
SLOW_S: Final = 30.0
_MAX_OUTCOMES: Final = 1000
_MAX_NAMES: Final = 500
_COUNTED: Final = ("pending", "running", "completed", "errors", "quarantined")


class Look(NamedTuple):
    """What was read: each pool's queue, and the jobs that are running or have just ended."""

    queues: dict[str, dict[str, Any]]
    running: dict[str, dict[str, Any]]
    ended: list[dict[str, Any]]


class Wanted(NamedTuple):
    """What a look is for."""

    published: bool  # figures are written down, too
    jobs: bool


class Queues:
    """The supervisor's side of jobs. All but what is read happens in the loop."""

    def __init__(self, loop: Loop, eyes: Eyes, registry: Registry) -> None:
        self.settler = Settler(loop, eyes, self._take_outcome)
        self._loop = loop
        self._registry = registry
        self._live: live_server.Live | None = None
        self._config = Config()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._settling: set[str] = set()  # invocations
        # By invocation, of runs that are being settled: what the controller says.
        self._causes: dict[str, tuple[str, bool]] = {}
        self._queues: dict[str, dict[str, Any]] = {}
        self._running: dict[str, dict[str, Any]] = {}
        self._names: dict[tuple[str, str], None] = {}  # pool and job, as frames named them
        self._timer: Timer | None = None
        self._looking = self._again = False

    def start(self, config: Config, channel: live_server.Live) -> None:
        """With a configuration, or with another one."""
        self._config = config
        self.settler.configure(config)
        if self._live is None:
            self._live = channel
            self._look_slowly()

    def close(self) -> None:
        self.settler.close()

    # Settlement

    def settle(self, component_id: str, invocation: str, cause: str) -> None:
        """A run has ended."""
        self._settling.add(invocation)
        self.settler.settle(component_id, invocation, cause)

    def settle_unseen(self, component_id: str, invocation: str) -> None:
        """A run that crashed, by the controller's word. One that is not known here was settled by
        a supervisor before us, whose books tell what came of it, or by nobody."""
        if invocation not in self._outcomes and invocation not in self._settling:
            self.settle(component_id, invocation, UNSEEN)

    def answer(self, invocation: str) -> dict[str, Any]:
        """What is known of a run that has ended (see ``settler.describe``)."""
        return dict(describe(self._outcomes.get(invocation)))

    def find_job(self, invocation: str) -> str:
        """The path of the job that a run had in hand when it ended; empty if that is not known."""
        outcome = self._outcomes.get(invocation)
        return outcome.settled[0].path if outcome and outcome.settled else ""

    def take_cause(self, component_id: str, invocation: str, cause: str, decision: str) -> None:
        """The controller's word for a death. One that we know nothing of is settled by it.

        So is one that is to blame and looked as if it left in peace: only systemd knows with
        which exit status.
        """
        is_blamed = decision.startswith(("restart", "fail"))
        outcome = self._outcomes.get(invocation)
        if outcome is not None and is_blamed and _is_nothing(outcome):
            del self._outcomes[invocation]
            self.settle(component_id, invocation, cause)
        elif outcome is None:
            # It may be owed by another word already: then this one is put in afterwards.
            if len(self._causes) < _MAX_OUTCOMES:
                self._causes[invocation] = (cause, is_blamed)
            self.settle(component_id, invocation, cause)
        elif outcome.settled:
            self.settler.name_cause(outcome, cause)

    def _take_outcome(self, outcome: Outcome, *, is_new: bool) -> None:
        self._settling.discard(outcome.invocation)
        cause, is_blamed = self._causes.pop(outcome.invocation, ("", False))
        if is_blamed and _is_nothing(outcome):
            self.settle(outcome.component_id, outcome.invocation, cause)
            return
        if cause and outcome.settled:
            self.settler.name_cause(outcome, cause)
        self._outcomes[outcome.invocation] = outcome
        while len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)
        if not is_new:
            return  # nothing is told twice
        fields = {"component": outcome.component_id, "invocation": outcome.invocation}
        for each in outcome.settled:
            log(NOTICE, f"its job is {each.status} now", job=each.job, path=each.path, **fields)
        if outcome.fail_pool:
            log(WARNING, "its pool has failed", why=outcome.fail_pool, **fields)
        pool = parse_component(outcome.component_id).pool
        if self._live is not None and (outcome.settled or outcome.fail_pool):
            said = outcome.to_dict()
            self._live.publish(live_server.make_event(_topic(pool), "settled", outcome=said))
        self.look_soon()

    # Topics

    def take_frames(self, worker: Worker) -> None:
        """Something may have changed in its pool's queue."""
        if self._live is None or not self._is_watched():
            return
        job = worker.said().get("job")
        if isinstance(job, str) and len(self._names) < _MAX_NAMES:
            self._names[worker.component.pool, job] = None
        self.look_soon()

    def show(self, patterns: Patterns) -> Iterator[dict[str, Any]]:
        """For a new subscriber: as it was at the last look; a fresh one follows."""
        for pool, state in self._queues.items():
            if patterns.match(_topic(pool)):
                yield live_server.make_event(_topic(pool), "snapshot", queue=state)
        if patterns.match(ALL):
            yield live_server.make_event(ALL, "snapshot", queue=_sum(self._queues))
        if patterns.match(JOBS):
            yield live_server.make_event(JOBS, "snapshot", jobs=list(self._running.values()))
        self.look_soon()

    def look_soon(self) -> None:
        if self._live is None or not self._is_watched():
            return
        if self._looking:
            self._again = True
        elif self._timer is None:
            self._timer = self._loop.at(self._loop.now + SOON_S, self._look)

    def _look_slowly(self) -> None:
        if not self._looking:
            self._look(slow=True)
        self._loop.at(self._loop.now + SLOW_S, self._look_slowly)

    def _look(self, *, slow: bool = False) -> None:
        self._timer = None
        self._looking, self._again = True, False
        names, self._names = list(self._names), {}
        lines = {each.component_id: each.line for each in self._registry.workers.values()}
        wanted = Wanted(slow, self._live is not None and self._live.wants(JOBS))
        self.settler.ask(partial(self._read, self._config, wanted, lines, names, self._running))

    def _read(
        self,
        config: Config,
        wanted: Wanted,
        lines: dict[str, bytes],
        names: list[tuple[str, str]],
        known: dict[str, dict[str, Any]],
        store: Store,
    ) -> Callable[[], None]:
        """In the thread."""
        metrics = {name: _metrics(line) for name, line in lines.items()}
        queues = {pool.name: _describe_queue(store, pool.name, metrics) for pool in config.pools}
        if wanted.published:
            _publish(store, metrics, queues)
        running: dict[str, dict[str, Any]] = {}
        ended: list[dict[str, Any]] = []
        if wanted.jobs:
            host = host_of(config.store.url)
            for claim in store.find(CLAIMS, {"host": host}):
                running[claim["job"]] = known.get(claim["job"]) or _read_job(store, claim["job"])
            named = {key_of(pool, job) for pool, job in names}
            for key in sorted((named | known.keys()) - running.keys()):
                state = _read_job(store, key)
                if state and state["status"] != "running":
                    ended.append(state)
        running = {key: state for key, state in running.items() if state}
        return partial(self._take_look, Look(queues, running, ended))

    def _take_look(self, look: Look) -> None:
        self._looking = False
        channel = self._live
        if channel is None:
            return
        for pool, state in look.queues.items():
            if state != self._queues.get(pool):
                channel.publish(live_server.make_event(_topic(pool), "queue_update", queue=state))
        if look.queues != self._queues:
            channel.publish(live_server.make_event(ALL, "queue_update", queue=_sum(look.queues)))
        for key in look.running.keys() - self._running.keys():
            channel.publish(live_server.make_event(JOBS, "job_update", job=look.running[key]))
        for job in look.ended:
            channel.publish(live_server.make_event(JOBS, "job_update", job=job))
        self._queues, self._running = look.queues, look.running
        if self._again:
            self.look_soon()

    def _is_watched(self) -> bool:
        channel = self._live
        return channel is not None and any(
            each.patterns is not None and each.patterns.wants_queues for each in channel.subscribers
        )


def _is_nothing(outcome: Outcome) -> bool:
    """As if it had been no death: nothing in hand, and nothing counted."""
    return not outcome.settled and not outcome.counted


def _topic(pool: str) -> str:
    return f"queue:{pool}:status"


def _publish(
    store: Store, metrics: dict[str, dict[str, Any]], queues: dict[str, dict[str, Any]]
) -> None:
    with store.batch():
        for component_id, figures in metrics.items():
            if figures:
                stats.publish(store, component_id, figures)
        for pool, state in queues.items():
            stats.publish(store, f"queue:{pool}", state)


def _metrics(line: bytes) -> dict[str, Any]:
    metrics = json.loads(line[len(PREFIX) :]).get("metrics") if line else None
    if not isinstance(metrics, dict):
        return {}
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name[:1].isalpha() and len(name) <= 64
    }


def _describe_queue(store: Store, pool: str, metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts, the average of the workers' averages, and how long all of them will take."""
    counts = queue.count(store, pool)
    mine = [each for name, each in metrics.items() if name.split(":")[1] == pool and each]
    times = [each["avg_time_s"] for each in mine if each.get("avg_time_s")]
    average = round(sum(times) / len(times), 3) if times else None
    left = counts["pending"] + counts["running"]
    return {
        "queue": pool,
        "pending": counts["pending"],
        "running": counts["running"],
        "completed": counts["done"],
        "errors": counts["error"],
        "quarantined": counts["quarantined"],
        "avg_time": average,
        "eta": round(left * average / len(times), 1) if average is not None else None,
        "failed": failure_of(store, pool),
    }


def _sum(queues: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All queues as one. The longest of their ends is the end."""
    times = [each["avg_time"] for each in queues.values() if each["avg_time"] is not None]
    ends = [each["eta"] for each in queues.values() if each["eta"] is not None]
    return {
        **{name: sum(each[name] for each in queues.values()) for name in _COUNTED},
        "avg_time": round(sum(times) / len(times), 3) if times else None,
        "eta": max(ends, default=None),
    }


def _read_job(store: Store, key: str) -> dict[str, Any]:
    doc: Doc | None = store.get(queue.JOBS, key)
    if doc is None:
        return {}
    return {
        "id": key,
        "pool": doc["pool"],
        "path": doc["path"],
        "status": doc["status"],
        "worker": doc.get("component_id"),
        "error": doc.get("error"),
        "results": doc.get("result"),
    }
