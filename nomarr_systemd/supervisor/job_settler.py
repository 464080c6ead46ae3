"""Settlement in a thread of its own: the loop says which runs have ended and never waits.

What cannot be settled, because the store is away, is owed and tried again. Now and then the
thread also looks for claims whose run nobody saw end, and reads how long the queues are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import REBOOTED, STOPPED
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.settlement import (
    Outcome,
    find_vanished,
    finish_failing,
    name_cause,
    read_outcome,
    settle,
)
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.log import NOTICE, WARNING, Limited, log
from nomarr_systemd.supervisor.loop import Loop

UNSEEN: Final = "ended while nobody watched"
_LEAVE_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 15.0

Question = Callable[[Store], Callable[[], None]]  # asked in the thread; its answer, in the loop


class Eyes(NamedTuple):
    """What the thread may look at by itself: only files that systemd and the hook keep."""

    running: Callable[[str], str]  # the invocation in which a component runs now
    was_asked_to_stop: Callable[[str], bool]


class Settler:
    """``settle`` and ``ask`` from the loop; ``on_outcome(outcome, is_new=…)`` is called there."""

    def __init__(self, loop: Loop, eyes: Eyes, on_outcome: Callable[..., None]) -> None:
        self.failing = False
        self._loop = loop
        self._eyes = eyes
        self._on_outcome = on_outcome
        self._handed: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._limited = Limited(burst=3, every_s=60)
        # The thread's own.
        self._leaving = False
        self._config: Config | None = None  # until then nobody knows where the jobs are
        self._store: Store | None = None
        self._owed: dict[str, tuple[str, str]] = {}  # component id and cause, by invocation
        self._causes: list[tuple[Outcome, str]] = []
        self._question: Question | None = None
        self._vanished: dict[str, float] = {}  # since when, by invocation
        self._is_first = True
        self._sweep_due = 0.0
        self._retry_s = 0.0
        self._retry_at = 0.0

    def configure(self, config: Config) -> None:
        self._hand(partial(self._take_config, config))

    def settle(self, component_id: str, invocation: str, cause: str) -> None:
        """A run has ended. Said again before it is settled, the first cause stands."""
        self._hand(lambda: self._owed.setdefault(invocation, (component_id, cause)) and None)

    def name_cause(self, outcome: Outcome, cause: str) -> None:
        self._hand(lambda: self._causes.append((outcome, cause)))

    def ask(self, question: Question) -> None:
        """Read something from the store, in place of the question before if that still waits."""
        self._hand(partial(self._take_question, question))

    def close(self) -> None:
        """Let the thread finish, but do not wait for long: what is owed is found by the claims."""
        if self._thread is not None:
            self._hand(self._leave)
            self._thread.join(_LEAVE_S)

    def _hand(self, message: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: a store that hangs must not hold up our end.
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()
        self._handed.put(message)

    # In the thread

    def _take_config(self, config: Config) -> None:
        if self._config is None or config.store != self._config.store:
            self._forget_store()
            self._retry_at = 0.0
        self._config = config
        self._sweep_due = 0.0

    def _take_question(self, question: Question) -> None:
        self._question = question

    def _leave(self) -> None:
        self._leaving = True

    def _run(self) -> None:
        while not self._leaving:
            self._listen()
            now = time.monotonic()
            config = self._config
            if self._leaving or config is None or now < self._retry_at:
                continue
            try:
                self._work(config, now)
                if self.failing:
                    log(NOTICE, "the store of jobs is back", owed=len(self._owed))
                self.failing = False
                self._retry_s = self._retry_at = 0.0
            except Exception as error:  # the thread's outermost loop; all that is owed stays owed
                self.failing = True
                self._forget_store()
                self._retry_s = min(max(self._retry_s * 2, _FIRST_RETRY_S), _LAST_RETRY_S)
                self._retry_at = time.monotonic() + self._retry_s
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._limited.log(
                    WARNING,
                    "jobs cannot be settled now",
                    owed=len(self._owed),
                    error=error,
                    hint=hint,
                )
        self._forget_store()

    def _listen(self) -> None:
        """Wait for a message, or until something is due; take all that there are."""
        due = max(self._retry_at, 0.0 if self._has_work() else self._sweep_due)
        patience_s = max(0.0, due - time.monotonic()) if self._config else None
        try:
            message = self._handed.get(timeout=patience_s)
            while True:
                message()
                message = self._handed.get_nowait()
        except Empty:
            return

    def _has_work(self) -> bool:
        return bool(self._owed or self._causes or self._question)

    def _work(self, config: Config, now: float) -> None:
        if self._store is None:
            self._store = open_work_store(config.store)
        store = self._store
        for invocation, (component_id, cause) in list(self._owed.items()):
            self._settle(store, config, component_id, invocation, cause)
            del self._owed[invocation]
        while self._causes:
            name_cause(store, *self._causes[0])
            del self._causes[0]
        if now >= self._sweep_due:
            self._sweep(store, config, now)
            timeouts = [pool.claim_timeout_s for pool in config.pools]
            self._sweep_due = now + max(min(timeouts, default=30.0) / 2, 0.1)
        if self._question is not None:
            answer = self._question(store)
            self._question = None
            self._loop.post(answer)

    def _settle(
        self, store: Store, config: Config, component_id: str, invocation: str, cause: str
    ) -> None:
        pool = _pool_of(config, component_id)
        wall_ms = time.time_ns() // 1_000_000
        try:
            known = read_outcome(store, pool.name, invocation)
            outcome = settle(store, pool, component_id, invocation, cause, wall_ms)
        except (KeyError, TypeError, ValueError) as error:
            # A document that somebody mangled must not keep others from being settled.
            fields = {"component": component_id, "invocation": invocation, "error": repr(error)}
            self._limited.log(WARNING, "a damaged job cannot be settled", **fields)
            return
        self._loop.post(partial(self._on_outcome, outcome, is_new=outcome != known))

    def _sweep(self, store: Store, config: Config, now: float) -> None:
        """Settle claims whose run is over: at our start at once, later when claim_timeout_s has
        passed and nobody settled them. Finish what a kill left of failing a pool."""
        if self._is_first:
            for pool in config.pools:
                finish_failing(store, pool.name, time.time_ns() // 1_000_000)
        vanished = find_vanished(store, host_of(config.store.url), self._eyes.running)
        since = {invocation: self._vanished.get(invocation, now) for _, invocation, _ in vanished}
        for component_id, invocation, boot in vanished:
            patience_s = _pool_of(config, component_id).claim_timeout_s
            if self._is_first or now - since[invocation] >= patience_s:
                cause = self._guess_cause(invocation, boot)
                self._settle(store, config, component_id, invocation, cause)
                del since[invocation]
        self._vanished = since
        self._is_first = False

    def _guess_cause(self, invocation: str, boot: str) -> str:
        if self._eyes.was_asked_to_stop(invocation):
            return STOPPED
        return UNSEEN if boot in ("", read_boot_id()) else REBOOTED

    def _forget_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _pool_of(config: Config, component_id: str) -> Pool:
    """Its settings; the defaults for a pool that is no longer configured."""
    name = parse_component(component_id).pool
    return next((pool for pool in config.pools if pool.name == name), Pool(name))


def describe(outcome: Outcome | None) -> Mapping[str, Any]:
    """What the controller is told about a run: ``settled`` False means, ask again."""
    if outcome is None:
        return {"settled": False}
    jobs: Sequence[str] = [each.job for each in outcome.settled]
    return {
        "settled": True,
        "job": jobs[0] if jobs else None,
        "jobs": jobs,
        "quarantined": outcome.quarantined,
        "refund": outcome.refund,
        "fail_pool": outcome.fail_pool,
    }
