"""Claims: who has which job in hand. One insert of a key that follows from the job decides it.

A claim is taken before the job is marked as running and given back after the job has its end, so
whatever is killed in between leaves a claim behind, and a claim names the run that left it.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from nomarr_systemd.core import job
from nomarr_systemd.core.errors import BadDocument, KeyExists, StaleRevision
from nomarr_systemd.core.job import Doc, Owner
from nomarr_systemd.jobs.queue import JOBS, now_ms
from nomarr_systemd.store.protocol import Store, encode

CLAIMS: Final = "worker_claims"
MAX_SPREAD: Final = 64
MAX_RESULT: Final = 262_144  # characters of JSON


class End(NamedTuple):
    """What became of a job in hand; ``status`` pending puts it back."""

    status: str
    result: object = None
    error: Doc | None = None


class Claims:
    """The queue of one pool as one run of one worker sees it. May raise StoreUnavailable.

    Alone, a worker takes jobs strictly by key. One that collides with others looks further ahead
    and chooses there at random, the further the more it collides: else all would run for the
    same first job, and all but one in vain, for every single job.
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
        """The job, now in our hands; None if somebody else was faster. May be asked again after
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
        """The jobs this run has claimed: what a lost answer may have left, too."""
        claims = self.store.find(CLAIMS, {"invocation": self.owner.invocation})
        found = []
        for claim in claims:
            doc = self.take(claim["job"])
            if doc is not None:
                found.append(doc)
        return found

    def end(self, key: str, end: End) -> bool:
        """Record what became of a job and give the claim back; may be said again.

        False: the job is no longer ours, because it was settled as a dead worker's or its pool
        was failed. Then nothing is changed.
        """
        while True:
            try:
                with self.store.batch():
                    doc = self.store.get(JOBS, key)
                    ours = job.is_in_hand(doc, self.owner.invocation)
                    if doc is not None and ours:
                        self.store.replace(JOBS, _finish(doc, end, now_ms()))
                    claim = self.store.get(CLAIMS, job.claim_key(key))
                    if claim is not None and claim["invocation"] == self.owner.invocation:
                        self.store.delete(CLAIMS, claim["_key"], claim["_rev"])
            except StaleRevision:
                continue  # settled, this moment: look again
            # Said again after a lost answer, it stands there as we left it.
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
            # Ours, if the answer to an earlier try was lost.
            if there is None or there.get("invocation") != self.owner.invocation:
                raise

    def _begin(self, key: str) -> Doc | None:
        """With the claim: nobody else changes the job, but it may have changed before."""
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
    """The result as it can be kept; the work is done, so what cannot be is replaced by why."""
    try:
        size = len(encode({"result": result}))
    except BadDocument as error:
        return {"not_kept": str(error)[:200]}
    if size > MAX_RESULT:
        return {"not_kept": f"the result has {size} characters, {MAX_RESULT} is the most"}
    return result
