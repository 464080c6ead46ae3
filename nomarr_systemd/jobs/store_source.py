"""Jobs from the store: the queue of the worker's pool, shared with the pool's other workers.

The end of a job is recorded when the next one is discovered, which follows at once, in the same
commit. If the store is away then, the end is kept, also in a file, and recorded before anything
else. Until then the claim stays, so no other worker begins the job.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import ConfigError, NotReady, StoreRefused, StoreUnavailable
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import Doc, Owner, describe_error, key_of, path_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.claims import Claims, End, check_result
from nomarr_systemd.jobs.owed_results import OwedResults
from nomarr_systemd.jobs.stats import read_average, read_gpu
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store

log = logging.getLogger(__name__)

LAST_TRY_S: Final = 20.0  # how long a worker that ends tries to record the end of its job

_Result = TypeVar("_Result")


class StoreJobs:
    """A ``Source`` of the paths in one pool's queue. The store is opened when it is first used: if
    it is away, the worker waits."""

    def __init__(
        self,
        settings: StoreSettings,
        component_id: str,
        invocation: str,
        *,
        gpu_max_age_s: float,
        state_directory: str = "",
        claim_batch: int = 1,
    ) -> None:
        if not invocation:
            raise ConfigError(
                "a worker that takes jobs from the store needs INVOCATION_ID",
                hint="systemd sets it; to run a worker by hand, override its source()",
            )
        self._settings = settings
        self._pool = parse_component(component_id).pool
        self._owner = Owner(component_id, invocation, host_of(settings), read_boot_id())
        self._gpu_max_age_s = gpu_max_age_s
        self._store: Store | None = None
        self._claims: Claims | None = None
        self._owed = OwedResults(state_directory, self._pool, self._owner)
        self._claim_batch = claim_batch
        self._taken: Doc | None = None
        self._waiting: list[Doc] = []  # the rest of the batch, in the order of keys
        self._unrecorded: tuple[str, End] | None = None
        self._is_unsure = (
            False  # an answer was lost: this run may have a claim that it does not know
        )

    def discover(self) -> str | None:
        try:
            found = self._ask(self._advance)
        except NotReady:
            self._keep()  # this worker may be killed before the store is back
            raise
        self._taken, self._waiting = (found[0], found[1:]) if found else (None, [])
        return path_of(self._taken) if self._taken else None

    def _advance(self, claims: Claims) -> list[Doc]:
        """Record the end of the last job, if there is one; returns the jobs in hand."""
        if self._is_unsure:
            self._record(claims)
            found = claims.in_hand()
            self._is_unsure = False
            return found or claims.take_batch(self._claim_batch)
        if self._unrecorded is None:
            return claims.keep(self._waiting) or claims.take_batch(self._claim_batch)
        key, end = self._unrecorded
        is_ours, found = claims.end_and_take(key, end, self._claim_batch, self._waiting)
        self._mark_recorded(is_ours=is_ours)
        return found

    def claim(self, job: str) -> bool:
        """Return True: ``discover`` has found and claimed it in one step."""
        return self._taken is not None and path_of(self._taken) == job

    def complete(self, job: str, result: object) -> None:
        self._unrecorded = (self._key(job), End("done", check_result(result)))

    def fail(self, job: str, error: Exception) -> None:
        self._unrecorded = (self._key(job), End("error", error=describe_error(error)))

    def release(self, job: str) -> None:
        """Release the job at once, and the rest of the batch: a worker that does so will wait."""
        self._unrecorded = (self._key(job), End("pending"))
        self._ask(self._record)
        self._ask(self._put_back)

    def check_gpu(self) -> None:
        """Raise NotReady if a recent check found that the GPU is not available."""
        host, most_s = self._owner.host, self._gpu_max_age_s
        found = self._ask(lambda claims: read_gpu(claims.store, most_s, host))
        if found is not None and not found.available:
            raise NotReady(f"the GPU is not available: {found.reason or 'no reason given'}")

    def read_average(self) -> float:
        """Return the average time of a job of this worker in earlier runs; 0 if that is not
        known."""
        owner = self._owner
        return self._ask(lambda claims: read_average(claims.store, owner.component_id, owner.host))

    def close(self, wait: Callable[[float], object]) -> None:
        """Record the end of the last job, for LAST_TRY_S at most; ``wait(seconds)`` waits."""
        until = monotonic() + LAST_TRY_S
        while self._unrecorded is not None and monotonic() < until:
            try:
                self._ask(self._record)
            except NotReady as error:
                log.warning(
                    "the end of job %r cannot be recorded now: %s", self._unrecorded[0], error
                )
                wait(0.5)
        if self._unrecorded is not None:
            kept = self._keep()
            what = "is kept for the next worker" if kept else "is lost"
            log.error("the end of job %r could not be recorded: it %s", self._unrecorded[0], what)
        with contextlib.suppress(NotReady):  # then the supervisor settles them
            self._ask(self._put_back)
        self._forget_store()

    def _key(self, job: str) -> str:
        return key_of(self._pool, job)

    def _keep(self) -> bool:
        if self._unrecorded is None or self._unrecorded[1].status == "pending":
            return True
        attempts = self._taken.get("attempts") if self._taken else None
        return isinstance(attempts, int) and self._owed.keep(*self._unrecorded, attempts)

    def _record(self, claims: Claims) -> None:
        if self._unrecorded is None:
            return
        self._mark_recorded(is_ours=claims.end(*self._unrecorded))

    def _mark_recorded(self, *, is_ours: bool) -> None:
        if self._unrecorded is None:
            return
        key, end = self._unrecorded
        if not is_ours and end.status != "pending":
            log.warning("job %r was settled meanwhile; its result is dropped", key)
        self._unrecorded = None
        self._owed.forget()

    def _put_back(self, claims: Claims) -> None:
        """Put what is left of the batch back into the queue."""
        if self._waiting:
            claims.put_back([doc["_key"] for doc in self._waiting])
            self._waiting = []

    def _ask(self, question: Callable[[Claims], _Result]) -> _Result:
        try:
            if self._claims is None:
                self._store = open_work_store(self._settings)
                self._owed.deliver(self._store)
                self._claims = Claims(self._store, self._pool, self._owner)
            return question(self._claims)
        except (StoreUnavailable, StoreRefused) as error:
            self._is_unsure = True
            self._forget_store()
            hint = f" ({error.hint})" if error.hint else ""
            raise NotReady(f"the store is away: {error}{hint}") from error

    def _forget_store(self) -> None:
        store, self._store, self._claims = self._store, None, None
        if store is not None:
            store.close()
