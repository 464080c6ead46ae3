"""What the supervisor needs the store for: the jobs of ended runs are settled, queues are read,
history is written, questions are answered, this host's lease is renewed. A helper does it
(store_process.py); what is here passes values to it, takes what it reports, and never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import Outcome, RunEnd
from nomarr_systemd.host.log import NOTICE, WARNING, log
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.live.protocol import make_event, queue_topic
from nomarr_systemd.supervisor.announcer import Announcer
from nomarr_systemd.supervisor.helper import Channel
from nomarr_systemd.supervisor.job_settler import JobSettler, Outcomes, get_sweep_s
from nomarr_systemd.supervisor.live_connection import Subscribers
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.queue_topics import QueueTopics
from nomarr_systemd.supervisor.snapshots import Snapshots, take_samples
from nomarr_systemd.supervisor.store_process import StoreProcess
from nomarr_systemd.supervisor.store_queries import StoreQueries
from nomarr_systemd.supervisor.workers import Workers

_OFTEN_S: Final = 10.0  # what is needed more often stays


class StoreTasks:
    """``begin``, ``configure`` with each new configuration, and ``close``."""

    def __init__(
        self,
        loop: Loop,
        workers: Workers,
        subscribers: Subscribers,
        announcer: Announcer,
        *,
        units_directory: str,
        public: str,
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._subscribers = subscribers
        self._announcer = announcer
        self._config: Config | None = None  # None: which store it is, is not known
        self._is_job_store_away = False
        self._is_renewing = False
        self._process = StoreProcess(loop, partial(_serve, units_directory, public))
        self._settler = JobSettler(
            loop,
            self._process,
            on_settled=self._take_outcome,
            on_store=self._take_store_state,
        )
        self._snapshots = Snapshots(self._process)
        self.queries = StoreQueries(self._process)
        self.queue_topics = QueueTopics(loop, self._settler, workers, subscribers)

    def begin(self, config: Config | None) -> None:
        """Begin what is done from time to time. ``config`` None: it is not valid."""
        if config is not None:
            self.configure(config)
        self._arm_snapshot()

    def configure(self, config: Config) -> None:
        self._config = config
        pause_s = min(config.health.snapshot_interval_s, get_sweep_s(config))
        self._process.is_kept = bool(host_of(config.store)) or pause_s < _OFTEN_S
        if not self._is_renewing:
            self._renew_lease()  # first: with it the settler looks at this host's claims at once
        self._settler.configure(config)
        self.queue_topics.configure(config)

    def close(self) -> None:
        """Have written what is known; the helper is closed after this."""
        self._snapshots.flush()

    # Jobs

    def expect_settling(self) -> None:
        """Start the helper: a run has ended, and its worker is restarted when its jobs are
        settled."""
        self._settler.expect()

    def settle(self, end: RunEnd) -> None:
        """Have the jobs of a run that has ended settled."""
        self._settler.settle(end)

    def settle_and_wait(
        self, ends: Iterable[RunEnd], patience_s: float, reply: Callable[[Outcomes], None]
    ) -> None:
        """Settle the jobs of many runs; ``reply`` gets the outcomes known within ``patience_s``."""
        self._settler.settle_and_wait(ends, patience_s, reply)

    def find_job(self, invocation: str) -> str:
        """The job that a run had in hand when it was settled."""
        return self._settler.find_job(invocation)

    def _take_outcome(self, outcome: Outcome) -> None:
        fields = {"component": outcome.component_id, "invocation": outcome.invocation}
        for each in outcome.settled:
            log(NOTICE, f"its job is {each.status}", job=each.job, path=each.path, **fields)
        if outcome.fail_pool:
            log(WARNING, "its pool has failed", reason=outcome.fail_pool, **fields)
        if outcome.settled or outcome.fail_pool:
            topic = queue_topic(parse_component(outcome.component_id).pool)
            self._subscribers.publish(make_event(topic, "settled", outcome=outcome.to_dict()))
        self.queue_topics.read_soon()

    def _take_store_state(self, is_away: bool) -> None:
        self._is_job_store_away = is_away
        self._assess_store()

    def _assess_store(self) -> None:
        self._announcer.is_store_away = self._is_job_store_away or self._snapshots.is_failing
        self._announcer.tell_system_soon()

    # The lease of this host

    def _renew_lease(self) -> None:
        """By a timer of the loop: a supervisor that hangs does not renew it."""
        config = self._config
        self._is_renewing = config is not None and bool(host_of(config.store))
        if config is None or not self._is_renewing:
            return
        from nomarr_systemd.core.lease import RENEWALS  # a store of one host does not need them
        from nomarr_systemd.supervisor.host_lease import describe_host

        system = self._announcer.describe_system()["status"]
        self._settler.renew_lease(describe_host(self._workers, config, system))
        self._loop.at(self._loop.now + config.fleet.lease_s / RENEWALS, self._renew_lease)

    # History

    def _arm_snapshot(self) -> None:
        interval_s = (self._config or Config()).health.snapshot_interval_s
        self._loop.at_next(interval_s, self._snapshot)

    def _snapshot(self) -> None:
        samples = take_samples(self._workers)
        if samples:
            self._snapshots.offer((self._config or Config()).store, samples)
        self._assess_store()
        self._arm_snapshot()


def _serve(units_directory: str, public: str, channel: Channel) -> None:
    from nomarr_systemd.supervisor.store_child import serve  # for the helper only

    serve(channel, units_directory, public)
