"""Claims: which run works on which job. The key of a claim is derived from the job, and the store
accepts only one insert of a key.

A claim is inserted before the job is marked as running and deleted after the job's end is recorded.
A kill in between leaves the claim, and the claim names the run.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nomarr_systemd.core import job
from nomarr_systemd.core.errors import BadDocument, KeyExists, StaleRevision
from nomarr_systemd.core.job import Doc, Owner
from nomarr_systemd.jobs.queue import JOBS, now_ms, write_again
from nomarr_systemd.store.protocol import Store, encode

CLAIMS: Final = "worker_claims"
_NEXT: Final = 16  # jobs that are tried at once after a collision
MAX_RESULT: Final = 262_144  # characters of JSON


class End(NamedTuple):
    """The end of a job; ``status`` pending puts it back into the queue."""

    status: str
    result: object = None
    error: Doc | None = None


class Claims:
    """The queue of one pool as one run of one worker sees it. May raise StoreUnavailable.

    A worker takes the job with the lowest key that is free. Where a store can hold a document, no
    two workers try the same job; elsewhere the slower one tries the next.
    """

    def __init__(self, store: Store, pool: str, owner: Owner) -> None:
        self.store = store
        self.pool = pool
        self.owner = owner

    def take_next(self) -> Doc | None:
        """Claim and begin the lowest job that is free; None if there is none."""
        where = {"pool": self.pool, "status": "pending"}
        if not self.store.find(JOBS, where, limit=1):
            return None  # found out without a lock: idle workers ask this again and again
        if self.store.can_hold:
            try:
                return self._take_held()
            except (KeyExists, StaleRevision):
                pass  # it has a claim already: of a run that is being settled
        after = ""
        while page := self.store.find(JOBS, where, limit=_NEXT, after=after):
            for doc in page:
                if taken := self.take(doc["_key"]):
                    return taken
            after = page[-1]["_key"]
        return None

    def _take_held(self) -> Doc | None:
        """The same in one transaction, passing over those that others hold."""
        where = {"pool": self.pool, "status": "pending"}
        with self.store.batch():
            doc = self.store.first(JOBS, where)
            if doc is None:
                return None
            self.store.insert(CLAIMS, self._make_claim(doc["_key"]))
            taken = job.begin(doc, self.owner, now_ms())
            taken["_rev"] = self.store.replace(JOBS, taken)
        return taken

    def take(self, key: str) -> Doc | None:
        """Claim a job and begin it; None if another worker was faster. May be called again after
        an answer was lost."""
        try:
            with self.store.batch():
                return self._begin(key, self._insert(self._make_claim(key)))
        except (KeyExists, StaleRevision):
            return None

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

    def _make_claim(self, key: str) -> Doc:
        return job.make_claim(key, self.pool, self.owner, now_ms())

    def _insert(self, claim: Doc) -> str:
        """Insert the claim, or find it if it is there; returns its revision."""
        try:
            return self.store.insert(CLAIMS, claim)
        except KeyExists:
            there = self.store.get(CLAIMS, claim["_key"])
            # It belongs to this run if the answer to an earlier call was lost.
            if there is None or there.get("invocation") != self.owner.invocation:
                raise
            return str(there["_rev"])

    def _begin(self, key: str, claim_rev: str) -> Doc | None:
        """Begin a claimed job. It may have changed before the claim was inserted; then the claim
        is deleted, by its revision: a late request must not delete that of another run."""
        doc = self.store.get(JOBS, key)
        if job.is_in_hand(doc, self.owner.invocation):
            return doc
        if doc is None or doc["status"] != "pending":
            self.store.delete(CLAIMS, job.claim_key(key), claim_rev)
            return None
        changed = job.begin(doc, self.owner, now_ms())
        try:
            changed["_rev"] = self.store.replace(JOBS, changed)
        except StaleRevision:
            self.store.delete(CLAIMS, job.claim_key(key), claim_rev)
            return None
        return changed


def _finish(doc: Doc, end: End, wall_ms: int) -> Doc:
    if end.status == "pending":
        return job.requeue(doc, wall_ms)
    if end.error is not None:
        return job.fail(doc, end.error, wall_ms)
    return job.complete(doc, end.result, wall_ms)


def deliver(claims: Claims, key: str, end: End, attempts: int) -> bool:
    """Record the end of a job of a run that could not do so while it lived, once.

    False if the job was begun again, or changed by a person, since.
    """

    def write() -> bool:
        with claims.store.batch():
            doc = claims.store.get(JOBS, key)
            if doc is None or doc.get("attempts") != attempts:
                return False
            if doc["status"] not in ("running", "error", "pending", "quarantined"):
                return False
            claims.store.replace(JOBS, _finish(doc, end, now_ms()))
            claim = claims.store.get(CLAIMS, job.claim_key(key))
            if claim is not None and claim["invocation"] == claims.owner.invocation:
                claims.store.delete(CLAIMS, claim["_key"], claim["_rev"])
        return True

    return write_again(write)


def check_result(result: object) -> object:
    """The result, or the reason why it cannot be stored: the job is done in any case."""
    try:
        size = len(encode({"result": result}))
    except BadDocument as error:
        return {"not_kept": str(error)[:200]}
    if size > MAX_RESULT:
        return {"not_kept": f"the result has {size} characters, {MAX_RESULT} is the most"}
    return result
