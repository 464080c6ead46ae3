"""Jobs from the store: the queue of the worker's own pool, shared with all its workers.

What became of a job is never lost to a store that is away: it is owed, and paid before the next
job is looked for. Until then the claim stands, so nobody else begins the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import ConfigError, NotReady, StoreRefused, StoreUnavailable
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import Owner, describe_error, key_of, path_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.claims import Claims, End, check_result
from nomarr_systemd.jobs.stats import read_gpu
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store

log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 20.0  # how long a worker that leaves tries to say what became of its job

_Result = TypeVar("_Result")


class StoreJobs:
    """A ``Source`` of the paths in one pool's queue. The store is opened when it is first used:
    one that is away is something to wait for, not to die of."""

    def __init__(
        self, settings: StoreSettings, component_id: str, invocation: str, *, gpu_max_age_s: float
    ) -> None:
        if not invocation:
            raise ConfigError(
                "a worker that takes jobs from the store needs INVOCATION_ID",
                hint="systemd gives it one; to try a worker by hand, give it a source() of its own",
            )
        self._settings = settings
        self._pool = parse_component(component_id).pool
        self._owner = Owner(component_id, invocation, host_of(settings.url), read_boot_id())
        self._gpu_max_age_s = gpu_max_age_s
        self._store: Store | None = None
        self._claims: Claims | None = None
        self._owed: tuple[str, End] | None = None
        self._unsure = False  # an answer was lost: a job may be ours without our knowing

    def discover(self) -> str | None:
        def look(claims: Claims) -> str | None:
            self._pay(claims)
            if self._unsure:
                found = claims.in_hand()
                if found:
                    return path_of(found[0])
                self._unsure = False
            doc = claims.next()
            return path_of(doc) if doc else None

        return self._ask(look)

    def claim(self, job: str) -> bool:
        return self._ask(lambda claims: claims.take(self._key(job)) is not None)

    def complete(self, job: str, result: object) -> None:
        self._end(job, End("done", check_result(result)))

    def fail(self, job: str, error: Exception) -> None:
        self._end(job, End("error", error=describe_error(error)))

    def release(self, job: str) -> None:
        self._end(job, End("pending"))

    def check_gpu(self) -> None:
        """NotReady if somebody found lately that the GPU is away."""
        found = self._ask(lambda claims: read_gpu(claims.store, self._gpu_max_age_s))
        if found is not None and not found.available:
            raise NotReady(f"the GPU is not available: {found.reason or 'no reason given'}")

    def close(self, wait: Callable[[float], object]) -> None:
        """Leave nothing owed, if the store can be reached in time; ``wait`` waits for so long."""
        until = monotonic() + LAST_WORDS_S
        while self._owed is not None and monotonic() < until:
            try:
                self._ask(self._pay)
            except NotReady as error:
                log.warning("job %r is done, but that cannot be recorded: %s", self._owed[0], error)
                wait(0.5)
        if self._owed is not None:
            log.error("what became of job %r is lost: %r", *self._owed)
        self._forget_store()

    def _key(self, job: str) -> str:
        return key_of(self._pool, job)

    def _end(self, job: str, end: End) -> None:
        self._owed = (self._key(job), end)
        self._ask(self._pay)

    def _pay(self, claims: Claims) -> None:
        if self._owed is None:
            return
        key, end = self._owed
        if not claims.end(key, end) and end.status != "pending":
            log.warning("job %r was settled as another's meanwhile; its result is dropped", key)
        self._owed = None

    def _ask(self, question: Callable[[Claims], _Result]) -> _Result:
        try:
            if self._claims is None:
                self._store = open_work_store(self._settings)
                self._claims = Claims(self._store, self._pool, self._owner)
            return question(self._claims)
        except (StoreUnavailable, StoreRefused) as error:
            self._unsure = True
            self._forget_store()
            hint = f" ({error.hint})" if error.hint else ""
            raise NotReady(f"the store is away: {error}{hint}") from error

    def _forget_store(self) -> None:
        store, self._store, self._claims = self._store, None, None
        if store is not None:
            store.close()
