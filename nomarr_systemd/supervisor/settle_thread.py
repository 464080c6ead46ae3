"""The thread of the store's helper that settles the jobs of runs that have ended, looks for claims
of runs that have, reads queues, and renews this host's lease.

What cannot be done, because the store is away, is kept and retried. A sweep reads all claims: those
of an earlier boot are settled at once, those of a run that has ended and was not settled for
claim_timeout_s are settled as UNREPORTED. Every _RESTORE_S it also looks for running jobs that have
lost their claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import REBOOTED, UNREPORTED, Outcome, RunEnd
from nomarr_systemd.core.lease import RENEWALS
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.settlement import (
    find_claimed_runs,
    finish_failing,
    restore_claims,
    settle,
)
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.job_settler import About, Key, Sweep
from nomarr_systemd.supervisor.queue_reader import QueueReader
from nomarr_systemd.supervisor.work_store import Inbox, open_bounded
from nomarr_systemd.systemd.running_units import read_invocation

if TYPE_CHECKING:
    from nomarr_systemd.supervisor.lease_keeper import LeaseKeeper

_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 15.0
_RESTORE_S: Final = 300.0  # between two looks for jobs without a claim


class SettleThread:
    """All of it belongs to the thread alone. ``report`` sends a message to the loop."""

    def __init__(
        self,
        inbox: Inbox,
        units_directory: str,
        report: Callable[[Message], None],
        is_done: Event,
    ) -> None:
        self._inbox = inbox
        self._is_done = is_done  # nothing can be done now
        self._units_directory = units_directory
        self._report = report
        self._rate = RateLimit(burst=3, every_s=60)
        self._is_leaving = False
        self._config: Config | None = None  # None: the store of jobs is not known yet
        self._store: Store | None = None
        self._is_away = False
        self._owed: dict[Key, RunEnd] = {}
        self._sweep: Sweep | None = None
        self._question: dict[str, Any] | None = None
        self._lines: dict[str, str] = {}  # the last frames of workers, for the question
        self._queues = QueueReader()
        self._renewal: About | None = None
        self._keeper: LeaseKeeper | None = None  # for a store of one host there is none
        self._retry_s = 0.0
        self._retry_at = 0.0

    def run(self) -> None:
        while not self._is_leaving:
            self._receive()
            now = time.monotonic()
            config = self._config
            if self._is_leaving or config is None or now < self._retry_at:
                continue
            try:
                self._work(config, now)
                self._retry_s = self._retry_at = 0.0
                if self._is_away:
                    log(NOTICE, "the store of jobs is back", owed=len(self._owed))
                    self._say_away(is_away=False)
            except Exception as error:  # the thread's outermost loop; what is owed is retried
                self._close_store()
                self._retry_s = min(max(self._retry_s * 2, _FIRST_RETRY_S), _longest_s(config))
                self._retry_at = time.monotonic() + self._retry_s
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._rate.log(
                    WARNING,
                    "jobs cannot be settled now",
                    owed=len(self._owed),
                    error=error,
                    hint=hint,
                )
                if not self._is_away:
                    self._say_away(is_away=True)
        self._close_store()

    def _receive(self) -> None:
        """Wait for a message, or until something is due; then take all messages."""
        has_work = self._owed or self._sweep or self._question or self._renewal is not None
        is_ready = self._config is not None and has_work
        patience_s = max(0.0, self._retry_at - time.monotonic()) if is_ready else None
        if patience_s != 0 and self._inbox.empty():
            self._is_done.set()
        try:
            message = self._inbox.get(timeout=patience_s)
            while True:
                self._take(message)
                message = self._inbox.get_nowait()
        except Empty:
            return

    def _take(self, message: list[Any] | None) -> None:
        match message:
            case ["configure", stored, is_away]:
                config = Config.from_dict(stored)
                if self._config is None:
                    self._is_away = is_away
                elif config.store != self._config.store:
                    self._close_store()
                    self._retry_at = 0.0
                self._config = config
            case ["settle", end]:
                owed = RunEnd(*end)
                self._owed.setdefault((owed.invocation, owed.counted), owed)
            case ["sweep", sweep]:
                self._sweep = Sweep(*sweep)
            case ["lines", lines]:
                self._lines.update(lines)
            case ["look", question]:
                self._question = question
            case ["renew", about]:
                self._renewal = about
            case None:
                self._is_leaving = True

    def _work(self, config: Config, now: float) -> None:
        if self._store is None:
            self._store = open_bounded(config.store)
        store = self._store
        if self._renewal is not None:
            if self._keeper is None:
                from nomarr_systemd.supervisor.lease_keeper import LeaseKeeper

                self._keeper = LeaseKeeper()
            for outcome in self._keeper.keep(store, config, self._renewal):
                self._tell(outcome, is_new=True)
            self._renewal = None
            self._report(["renewed"])
        for key, end in list(self._owed.items()):
            self._settle(store, config, end)
            del self._owed[key]
        if self._sweep is not None:
            self._report(["swept", self._look_for_claims(store, config, self._sweep, now)])
            self._sweep = None
        if self._question is not None:
            look = self._queues.read(store, config, self._lines, self._question)
            self._question, self._lines = None, {}
            self._report(["looked", look])

    def _settle(self, store: Store, config: Config, end: RunEnd) -> None:
        try:
            pool, host = _find_pool(config, end.component_id), host_of(config.store)
            outcome, is_new = settle(store, pool, end, host)
        except (KeyError, TypeError, ValueError) as error:
            # A damaged document must not keep other runs from being settled.
            self._rate.log(
                WARNING,
                "a damaged job cannot be settled",
                component=end.component_id,
                invocation=end.invocation,
                error=repr(error),
            )
            self._report(["settled", end.invocation, end.counted, None, False])
            return
        self._tell(outcome, is_new=is_new, counted=end.counted)

    def _tell(self, outcome: Outcome, *, is_new: bool, counted: bool | None = None) -> None:
        counted = outcome.counted if counted is None else counted
        self._report(["settled", outcome.invocation, counted, outcome.to_dict(), is_new])

    def _look_for_claims(self, store: Store, config: Config, sweep: Sweep, now: float) -> Sweep:
        """Settle claims of runs that have ended, and finish a pool's failure that was cut short.
        Return what the next sweep has to know."""
        wall_ms, host = time.time_ns() // 1_000_000, host_of(config.store)
        if sweep.is_first:
            for pool in config.pools:
                finish_failing(store, pool.name, wall_ms, host)
        restore_due = sweep.restore_due
        if now >= restore_due:
            restore_due = now + _RESTORE_S
            for pool in config.pools:
                if host and not _is_first(store, host, pool.name):
                    continue
                if found := restore_claims(store, pool.name, wall_ms):
                    log(WARNING, "running jobs had no claim", pool=pool.name, jobs=found)
        boot = read_boot_id()
        vanished = {}
        # Of a machine that has our name the claims look like ours, and its runs like ended ones.
        is_unsure = bool(host) and (self._keeper is None or self._keeper.is_contested)
        for run in [] if is_unsure else find_claimed_runs(store, host):
            # Read after the claims: a run that had one and is not shown now has ended.
            unit = parse_component(run.component_id).unit
            if read_invocation(self._units_directory, unit) == run.invocation:
                continue
            since = sweep.vanished.get(run.invocation, now)
            end = RunEnd(run.component_id, run.invocation, UNREPORTED, wall_ms)
            if run.boot not in ("", boot):
                self._settle(store, config, end._replace(cause=REBOOTED, counted=False))
            elif now - since >= _find_pool(config, run.component_id).claim_timeout_s:
                self._settle(store, config, end)
            else:
                vanished[run.invocation] = since
        return Sweep(vanished, is_first=False, restore_due=restore_due)

    def _say_away(self, *, is_away: bool) -> None:
        self._is_away = is_away
        self._report(["store", is_away])

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _is_first(store: Store, host: str, pool: str) -> bool:
    from nomarr_systemd.fleet.leases import is_first  # a store of one host does not need it

    return is_first(store, host, pool)


def _longest_s(config: Config) -> float:
    """The longest pause before a retry. When a store that hosts share is back, each of them must
    renew its lease before the others declare it lost."""
    is_shared = bool(host_of(config.store))
    return min(_LAST_RETRY_S, config.fleet.lease_s / RENEWALS) if is_shared else _LAST_RETRY_S


def _find_pool(config: Config, component_id: str) -> Pool:
    """The worker's pool; one with default settings if it is no longer configured."""
    name = parse_component(component_id).pool
    return next((pool for pool in config.pools if pool.name == name), Pool(name))
