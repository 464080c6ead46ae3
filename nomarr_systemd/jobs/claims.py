"""Claims: which run works on which job. The key of a claim is derived from the job, and the store
accepts only one insert of a key.

A claim is inserted before the job is marked as running and deleted after the job's end is recorded.
A kill in between leaves the claim, and the claim names the run.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from nomarr_systemd.core import job
from nomarr_systemd.core.errors import BadDocument, KeyExists, StaleRevision
from nomarr_systemd.core.job import Doc, Owner
from nomarr_systemd.jobs.queue import JOBS, now_ms, write_again
from nomarr_systemd.store.protocol import Store, encode

CLAIMS: Final = "worker_claims"
MAX_SPREAD: Final = 64
MAX_RESULT: Final = 262_144  # characters of JSON


class End(NamedTuple):
    """The end of a job; ``status`` pending puts it back into the queue."""

    status: str
    result: object = None
    error: Doc | None = None


class Claims:
    """The queue of one pool as one run of one worker sees it. May raise StoreUnavailable.

    A worker takes jobs in the order of keys. After each collision with another worker it
    chooses at random among twice as many jobs: else all workers would try to claim the same first
    job, and all but one would fail, for every job.
    """

    def __init__(self, store: Store, pool: str, owner: Owner) -> None:
        self.store = store
        self.pool = pool
        self.owner = owner
        self._spread = 1
        self._chance = random.Random(owner.invocation)  # noqa: S311 (no secret)

    def next(self) -> Doc | None:
        """A pending job that looks free."""
        where = {"pool": self.pool, "status": "pending"}
        found = self.store.find(JOBS, where, limit=self._spread)
        return self._chance.choice(found) if found else None

    def take(self, key: str) -> Doc | None:
        """Claim a job and begin it; None if another worker was faster. May be called again after
        an answer was lost."""
        claim = {"_key": job.claim_key(key), "job": key, "pool": self.pool, "wall_ms": now_ms()}
        doc = None
        try:
            with self.store.batch():
                self._insert(claim | self.owner._asdict())
                doc = self._begin(key)
        except (KeyExists, StaleRevision):
            doc = None
        if doc is None:
            self._spread = min(self._spread * 2, MAX_SPREAD)
        else:
            self._spread = max(1, self._spread - 1)
        return doc

    def in_hand(self) -> list[Doc]:
        """The jobs that this run has claimed, also by a call whose answer was lost."""
        claims = self.store.find(CLAIMS, {"invocation": self.owner.invocation})
        found = []
        for claim in claims:
            doc = self.take(claim["job"])
            if doc is not None:
                found.append(doc)
        return found

    def end(self, key: str, end: End) -> bool:
        """Record the end of a job and delete the claim; may be called again.

        False: the job no longer belongs to this run, because it was settled or its pool failed.
        Then nothing is changed.
        """

        def write() -> tuple[Doc | None, bool]:
            with self.store.batch():
                doc = self.store.get(JOBS, key)
                ours = job.is_in_hand(doc, self.owner.invocation)
                if doc is not None and ours:
                    self.store.replace(JOBS, _finish(doc, end, now_ms()))
                claim = self.store.get(CLAIMS, job.claim_key(key))
                if claim is not None and claim["invocation"] == self.owner.invocation:
                    self.store.delete(CLAIMS, claim["_key"], claim["_rev"])
            return doc, ours

        doc, ours = write_again(write)  # it may be settled meanwhile
        # After a lost answer the job has the end that the first call recorded.
        return ours or (
            doc is not None
            and doc.get("invocation") == self.owner.invocation
            and doc["status"] == end.status
        )

    def _insert(self, claim: Doc) -> None:
        try:
            self.store.insert(CLAIMS, claim)
        except KeyExists:
            there = self.store.get(CLAIMS, claim["_key"])
            # It belongs to this run if the answer to an earlier call was lost.
            if there is None or there.get("invocation") != self.owner.invocation:
                raise

    def _begin(self, key: str) -> Doc | None:
        """Begin a claimed job. It may have changed before the claim was inserted."""
        doc = self.store.get(JOBS, key)
        if job.is_in_hand(doc, self.owner.invocation):
            return doc
        if doc is None or doc["status"] != "pending":
            self.store.delete(CLAIMS, job.claim_key(key))
            return None
        changed = job.begin(doc, self.owner, now_ms())
        try:
            changed["_rev"] = self.store.replace(JOBS, changed)
        except StaleRevision:
            self.store.delete(CLAIMS, job.claim_key(key))
            return None
        return changed


def _finish(doc: Doc, end: End, wall_ms: int) -> Doc:
    if end.status == "pending":
        return job.requeue(doc, wall_ms)
    if end.error is not None:
        return job.fail(doc, end.error, wall_ms)
    return job.complete(doc, end.result, wall_ms)


def check_result(result: object) -> object:
    """The result, or the reason why it cannot be stored: the job is done in any case."""
    try:
        size = len(encode({"result": result}))
    except BadDocument as error:
        return {"not_kept": str(error)[:200]}
    if size > MAX_RESULT:
        return {"not_kept": f"the result has {size} characters, {MAX_RESULT} is the most"}
    return result
