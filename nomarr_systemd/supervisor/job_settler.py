"""The thread that settles the jobs of runs that have ended, and reads queues for the loop.

The loop sends it messages and never waits. What cannot be settled, because the store is away, is
kept and retried. Every claim_timeout_s / 2 it also reads all claims: those of an earlier boot are
settled at once, those of a run that has ended and was not settled for claim_timeout_s are settled
as UNREPORTED. Every _RESTORE_S it looks for running jobs that have lost their claim.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import REBOOTED, UNREPORTED, Outcome, RunEnd
from nomarr_systemd.core.lease import RENEWALS
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.fleet.leases import is_first
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
from nomarr_systemd.supervisor.host_lease import About, LeaseKeeper
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.work_store import open_bounded
from nomarr_systemd.systemd.running_units import read_invocation

_LEAVE_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 15.0
_MAX_OUTCOMES: Final = 1000
_RESTORE_S: Final = 300.0  # between two looks for jobs without a claim

# An outcome is identified by its run and by whether the run was counted as a crash: one that was
# settled uncounted may be reported as a crash later.
Key = tuple[str, bool]
Query = Callable[[Store], Any]  # called in the thread
Outcomes = dict[str, Outcome | None]  # by invocation; None: not settled in time


class Configure(NamedTuple):
    config: Config


class Settle(NamedTuple):
    end: RunEnd


class Ask(NamedTuple):
    query: Query
    answer: Callable[[Any], None]  # called in the loop


class Renew(NamedTuple):
    """Renew the lease of this host, and look for hosts that are lost."""

    about: About


class Leave(NamedTuple):
    pass


Message = Configure | Settle | Ask | Renew | Leave


class Waiter:
    """A request that waits for outcomes."""

    def __init__(self, keys: Iterable[Key], reply: Callable[[Outcomes], None]) -> None:
        self.missing = set(keys)
        self.found: Outcomes = {invocation: None for invocation, _ in self.missing}
        self.reply = reply


class JobSettler:
    """The loop's side. ``on_settled(outcome)`` is called there for every new outcome,
    ``on_store(is_away)`` when the store becomes unavailable or available again."""

    def __init__(
        self,
        loop: Loop,
        units_directory: str,
        *,
        on_settled: Callable[[Outcome], None],
        on_store: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._units_directory = units_directory
        self._on_settled = on_settled
        self._on_store = on_store
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._waiters: list[Waiter] = []

    def configure(self, config: Config) -> None:
        self._send(Configure(config))

    def settle(self, end: RunEnd) -> None:
        self._send(Settle(end))

    def settle_and_wait(
        self, ends: Iterable[RunEnd], within_s: float, reply: Callable[[Outcomes], None]
    ) -> None:
        """Settle runs, and call ``reply`` once, when all are settled or the time is over."""
        ends = list(ends)
        waiter = Waiter([(end.invocation, end.counted) for end in ends], reply)
        if not ends:
            reply(waiter.found)
            return
        for end in ends:
            self.settle(end)
        self._waiters.append(waiter)
        self._loop.at(self._loop.now + within_s, partial(self._answer, waiter))

    def ask(self, query: Query, answer: Callable[[Any], None]) -> None:
        """Read from the store. A query that still waits is replaced by this one."""
        self._send(Ask(query, answer))

    def renew_lease(self, about: About) -> None:
        """Renew the lease of this host. What still waits is replaced by this."""
        self._send(Renew(about))

    def find_job(self, invocation: str) -> str:
        """The path of the job that a run had in hand when it ended; empty if not known."""
        outcome = self._outcomes.get(invocation)
        return outcome.settled[0].path if outcome and outcome.settled else ""

    def close(self) -> None:
        """Wait a second at most for the thread; the claims show what is not settled."""
        if self._thread is not None:
            self._send(Leave())
            self._thread.join(_LEAVE_S)

    def _send(self, message: Message) -> None:
        if self._thread is None:
            run = _Settling(self._inbox, self._units_directory, self._post).run
            # A daemon: a store that hangs must not delay the end of the program.
            self._thread = threading.Thread(target=run, name="jobs", daemon=True)
            self._thread.start()
        self._inbox.put(message)

    def _post(self, message: _Report) -> None:
        """Called in the thread: pass a report to the loop."""
        self._loop.post(partial(self._take, message))

    def _take(self, message: _Report) -> None:
        match message:
            case _Settled(key, outcome, is_new):
                self._outcomes[outcome.invocation] = outcome
                while len(self._outcomes) > _MAX_OUTCOMES:
                    self._outcomes.popitem(last=False)
                if is_new:
                    self._on_settled(outcome)
                for waiter in tuple(self._waiters):
                    if key in waiter.missing:
                        waiter.missing.discard(key)
                        waiter.found[outcome.invocation] = outcome
                        if not waiter.missing:
                            self._answer(waiter)
            case _Answered(answer, value):
                answer(value)
            case _StoreState(is_away):
                self._on_store(is_away)

    def _answer(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.reply(waiter.found)


class _Settled(NamedTuple):
    key: Key
    outcome: Outcome
    is_new: bool


class _Answered(NamedTuple):
    answer: Callable[[Any], None]
    value: Any


class _StoreState(NamedTuple):
    is_away: bool


_Report = _Settled | _Answered | _StoreState


class _Settling:
    """The thread's side: all of it belongs to the thread alone."""

    def __init__(
        self,
        inbox: SimpleQueue[Message],
        units_directory: str,
        post: Callable[[_Report], None],
    ) -> None:
        self._inbox = inbox
        self._units_directory = units_directory
        self._post = post
        self._rate = RateLimit(burst=3, every_s=60)
        self._is_leaving = False
        self._config: Config | None = None  # None: the store of jobs is not known yet
        self._store: Store | None = None
        self._is_away = False
        self._owed: dict[Key, RunEnd] = {}
        self._question: Ask | None = None
        self._renewal: Renew | None = None
        self._keeper = LeaseKeeper()
        self._vanished: dict[str, float] = {}  # when a run with claims was first found ended
        self._is_first_sweep = True
        self._restore_due = 0.0
        self._sweep_due = 0.0
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
        has_work = bool(self._owed or self._question or self._renewal)
        due = max(self._retry_at, 0.0 if has_work else self._sweep_due)
        patience_s = max(0.0, due - time.monotonic()) if self._config else None
        try:
            message = self._inbox.get(timeout=patience_s)
            while True:
                self._take(message)
                message = self._inbox.get_nowait()
        except Empty:
            return

    def _take(self, message: Message) -> None:
        match message:
            case Configure(config):
                if self._config is None or config.store != self._config.store:
                    self._close_store()
                    self._retry_at = 0.0
                self._config = config
                self._sweep_due = 0.0
            case Settle(end):
                self._owed.setdefault((end.invocation, end.counted), end)
            case Ask():
                self._question = message
            case Renew():
                self._renewal = message
            case Leave():
                self._is_leaving = True

    def _work(self, config: Config, now: float) -> None:
        if self._store is None:
            self._store = open_bounded(config.store)
        store = self._store
        if self._renewal is not None:
            for outcome in self._keeper.keep(store, config, self._renewal.about):
                self._post(_Settled((outcome.invocation, outcome.counted), outcome, is_new=True))
            self._renewal = None
        for key, end in list(self._owed.items()):
            self._settle(store, config, end)
            del self._owed[key]
        if now >= self._sweep_due:
            self._sweep(store, config, now)
            timeouts = [pool.claim_timeout_s for pool in config.pools]
            self._sweep_due = now + max(min(timeouts, default=30.0) / 2, 0.1)
        if self._question is not None:
            query, answer = self._question
            value = query(store)
            self._question = None
            self._post(_Answered(answer, value))

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
            return
        self._post(_Settled((end.invocation, end.counted), outcome, is_new))

    def _sweep(self, store: Store, config: Config, now: float) -> None:
        """Settle claims of runs that have ended, and finish a pool's failure that was cut short."""
        wall_ms, host = time.time_ns() // 1_000_000, host_of(config.store)
        if self._is_first_sweep:
            for pool in config.pools:
                finish_failing(store, pool.name, wall_ms, host)
        if now >= self._restore_due:
            self._restore_due = now + _RESTORE_S
            for pool in config.pools:
                if host and not is_first(store, host, pool.name):
                    continue
                if found := restore_claims(store, pool.name, wall_ms):
                    log(WARNING, "running jobs had no claim", pool=pool.name, jobs=found)
        boot = read_boot_id()
        vanished = {}
        # Of a machine that has our name the claims look like ours, and its runs like ended ones.
        is_unsure = bool(host) and self._keeper.is_contested
        for run in [] if is_unsure else find_claimed_runs(store, host):
            # Read after the claims: a run that had one and is not shown now has ended.
            unit = parse_component(run.component_id).unit
            if read_invocation(self._units_directory, unit) == run.invocation:
                continue
            since = self._vanished.get(run.invocation, now)
            end = RunEnd(run.component_id, run.invocation, UNREPORTED, wall_ms)
            if run.boot not in ("", boot):
                self._settle(store, config, end._replace(cause=REBOOTED, counted=False))
            elif now - since >= _find_pool(config, run.component_id).claim_timeout_s:
                self._settle(store, config, end)
            else:
                vanished[run.invocation] = since
        self._vanished = vanished
        self._is_first_sweep = False

    def _say_away(self, *, is_away: bool) -> None:
        self._is_away = is_away
        self._post(_StoreState(is_away))

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _longest_s(config: Config) -> float:
    """The longest pause before a retry. When a store that hosts share is back, each of them must
    renew its lease before the others declare it lost."""
    is_shared = bool(host_of(config.store))
    return min(_LAST_RETRY_S, config.fleet.lease_s / RENEWALS) if is_shared else _LAST_RETRY_S


def _find_pool(config: Config, component_id: str) -> Pool:
    """The worker's pool; one with default settings if it is no longer configured."""
    name = parse_component(component_id).pool
    return next((pool for pool in config.pools if pool.name == name), Pool(name))


def describe(outcome: Outcome | None) -> Mapping[str, Any]:
    """An outcome in the form of the answer to ``crashed`` (docs/contract.md)."""
    if outcome is None:
        return {"settled": False}
    return {
        "settled": True,
        "jobs": [each.job for each in outcome.settled],
        "quarantined": outcome.quarantined,
        "failed": outcome.failed,
        "refund": outcome.refund,
        "fail_pool": outcome.fail_pool,
    }
