"""``/metrics``: a collector over one cached look at everything (docs/web.md#metrics).

Labels are pools, workers and values of fixed lists: no invocations, no paths, no names of jobs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeGuard

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import check_pool
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.live.protocol import PUBLIC_STATUS
from nomarr_systemd.web.readers import State

STATES: Final = (*sorted({*PUBLIC_STATUS.values(), "stopping"}), "unknown")
_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_MAX_POOLS: Final = 1000
_LARGEST: Final = 1e18
_QUEUE_STATES: Final = ("pending", "running", "completed", "errors", "quarantined")


class Sources(NamedTuple):
    """Figures that are not in ``State``: of queues, and of this process."""

    queues: Mapping[str, Mapping[str, Any]]
    is_connected: bool
    upstream_lost: int
    readers: int


class Metrics:
    """``render(state, sources)`` returns the text. Decisions and incidents are counted from the
    first look of this process on, which begins with those that are on record."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._jobs = Histogram(
            "nomarr_job_duration_seconds",
            "How long jobs took that a worker finished, with or without an error.",
            ["pool"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._timed: set[str] = set()  # pools; what the supervisor says is not trusted
        self._decisions: dict[tuple[str, str, str], int] = {}
        self._incidents: dict[str, int] = {}
        self._open: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._collect: Callable[[], Iterator[Metric]] = lambda: iter(())
        self._registry.register(self)

    def observe_job(self, pool: str, seconds: float) -> None:
        if len(self._timed) < _MAX_POOLS:
            with contextlib.suppress(BadName):
                check_pool(pool)
                self._timed.add(pool)
        if pool in self._timed:
            self._jobs.labels(pool).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        return self._collect()

    def render(self, state: State | None, sources: Sources) -> bytes:
        """Return the text. ``state`` None: it could not be read, and nomarr_up is 0."""
        self._collect = lambda: self._make(state, sources)
        return bytes(generate_latest(self._registry))

    def _make(self, state: State | None, sources: Sources) -> Iterator[Metric]:
        yield _gauge("nomarr_up", "1 if the configuration and systemd could be read.", state)
        yield _gauge(
            "nomarr_supervisor_connected", "1 if the supervisor answers.", sources.is_connected
        )
        yield _gauge(
            "nomarr_web_stream_clients", "Clients of the event stream.", float(sources.readers)
        )
        lost = CounterMetricFamily(
            "nomarr_web_upstream_lost_events",
            "Events that the supervisor dropped because nomarr-web was too slow.",
        )
        lost.add_metric([], sources.upstream_lost)
        yield lost
        if state is not None:
            yield _queues(state, sources.queues)
            self._count(state)
            yield from self._totals(state)
            failures = CounterMetricFamily(
                "nomarr_supervisor_notification_failures",
                "Notifications to systemd that failed since the supervisor was started.",
            )
            _add(failures, [], state.overview.supervisor.get("notify_failures"))
            yield failures
            yield from _workers(state)
            age = time.monotonic() - state.at
            yield _gauge("nomarr_look_age_seconds", "Age of the data of systemd and ledger.", age)

    def _count(self, state: State) -> None:
        """Add records that are new since the last look."""
        for component_id, account in state.overview.accounts.items():
            pool = component_id.split(":")[1]
            seen = self._attempts.get(component_id, 0)
            if account.attempts < seen:  # the account was deleted: its numbers begin again
                seen = 0
            for record in map(Record.read, reversed(account.rows)):
                if record.attempt <= seen:
                    break
                key = (pool, record.action, record.kind or "none")
                self._decisions[key] = self._decisions.get(key, 0) + 1
            self._attempts[component_id] = account.attempts
        held = {v.worker.pool for v in state.overview.views if v.held.startswith(INCIDENT)}
        for pool in held - self._open:
            self._incidents[pool] = self._incidents.get(pool, 0) + 1
        self._open = held

    def _totals(self, state: State) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "nomarr_decisions",
            "Records of the ledger by action and class of death (none: no death).",
            labels=["pool", "action", "class"],
        )
        for key, number in sorted(self._decisions.items()):
            decisions.add_metric(list(key), number)
        yield decisions
        incidents = CounterMetricFamily(
            "nomarr_incidents", "Incidents that were seen to open.", labels=["pool"]
        )
        is_open = GaugeMetricFamily(
            "nomarr_incident_open", "1 while an incident of the pool is open.", labels=["pool"]
        )
        for pool in state.config.pools:
            incidents.add_metric([pool.name], self._incidents.get(pool.name, 0))
            is_open.add_metric([pool.name], pool.name in self._open)
        yield incidents
        yield is_open


def _workers(state: State) -> Iterator[Metric]:
    labels = ["pool", "worker"]

    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"nomarr_worker_{name}", text, labels=labels)

    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"nomarr_worker_{name}", text, labels=labels)

    healthy = gauge("healthy", "1 if the worker runs and is healthy.")
    masked = gauge("masked", "1 if the worker failed for good and waits for a reset.")
    held = gauge("held", "1 if the worker is paused or held.")
    window = gauge("window_restarts", "Restarts within the window of the policy.")
    window_limit = gauge("window_restarts_limit", "Restarts that the window allows.")
    life = gauge("lifetime_restarts", "Restarts since the last reset.")
    life_limit = gauge("lifetime_restarts_limit", "Restarts that the lifetime allows (0: any).")
    rate = gauge("restart_rate", "Restarts per second within the window.")
    restarts = counter("restarts", "Restarts ever.")
    recoveries = counter("recoveries", "Restarts after which the worker ran stably.")
    frames = counter("frames", "Valid frames of the present run.")
    drops = counter("dropped_lines", "Lines in the worker's pipe that were no valid frame.")
    age = gauge("last_frame_age_seconds", "Seconds since the last frame, as of the last look.")
    backoff = gauge("restart_in_seconds", "Seconds until the restart that is due.")
    counts = GaugeMetricFamily("nomarr_workers", "Workers by health.", labels=["pool", "state"])
    numbers: dict[tuple[str, str], int] = {
        (pool.name, word): 0 for pool in state.config.pools for word in STATES
    }
    for view in state.overview.views:
        worker, names = view.worker, [view.worker.pool, view.worker.instance]
        health = view.health if view.health in STATES else "unknown"
        numbers[worker.pool, health] = numbers.get((worker.pool, health), 0) + 1
        healthy.add_metric(names, view.active == "active" and view.health == "healthy")
        masked.add_metric(names, view.load == "masked")
        held.add_metric(names, bool(view.held))
        if view.next_restart_ms is not None:
            backoff.add_metric(names, view.next_restart_ms / 1000)
        if not view.ledger_problem:
            totals = view.statistics
            window.add_metric(names, view.window_used)
            window_limit.add_metric(names, view.window_limit)
            life.add_metric(names, view.lifetime_used)
            life_limit.add_metric(names, view.lifetime_limit)
            rate.add_metric(names, totals.rate_per_s)
            restarts.add_metric(names, totals.total_restarts)
            recoveries.add_metric(names, totals.recoveries)
        said = state.overview.said.get(worker.component_id, {})
        _add(frames, names, said.get("frames"))
        dropped = said.get("drops")
        kinds = dropped.values() if isinstance(dropped, dict) else [dropped]
        _add(drops, names, sum(each for each in kinds if _is_figure(each)))
        _add(age, names, said.get("frame_age_s"))
    for key, number in numbers.items():
        counts.add_metric(list(key), number)
    yield counts
    yield from (healthy, masked, held, window, window_limit, life, life_limit, rate)
    yield from (restarts, recoveries, frames, drops, age, backoff)


def _queues(state: State, queues: Mapping[str, Mapping[str, Any]]) -> Metric:
    found = GaugeMetricFamily("nomarr_queue_jobs", "Jobs by state.", labels=["pool", "state"])
    for pool in state.config.pools:
        for word in _QUEUE_STATES:
            _add(found, [pool.name, word], queues.get(pool.name, {}).get(word))
    return found


def _add(metric: CounterMetricFamily | GaugeMetricFamily, names: list[str], value: object) -> None:
    """Add a figure of the supervisor, which is not trusted."""
    if _is_figure(value):
        metric.add_metric(names, value)


def _is_figure(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and abs(value) < _LARGEST


def _gauge(name: str, text: str, value: object) -> GaugeMetricFamily:
    number = value if isinstance(value, float) else float(value is not None and value is not False)
    return GaugeMetricFamily(name, text, value=number)
