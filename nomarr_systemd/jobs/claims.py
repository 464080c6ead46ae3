"""Claims: which run works on which job. The key of a claim is derived from the job, and the store
accepts only one insert of a key.

A claim is inserted before the job is marked as running and deleted after the job's end is recorded.
A kill in between leaves the claim, and the claim names the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.core import job
from nomarr_systemd.core.errors import BadDocument, BadName, KeyExists, StaleRevision
from nomarr_systemd.core.ids import is_run, parse_component
from nomarr_systemd.core.job import Doc, Owner
from nomarr_systemd.core.named_tuple import NamedTuple
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

    A worker takes the jobs with the lowest keys that are free, and does them in this order. Where a
    store can hold documents, no two workers try the same job, and the end of one job and the claim
    of the next are one commit; elsewhere the slower worker tries the next job.
    """

    def __init__(self, store: Store, pool: str, owner: Owner) -> None:
        self.store = store
        self.pool = pool
        self.owner = owner
        # Jobs as this run wrote them and the revisions of their claims: their ends read neither.
        self._held: dict[str, tuple[Doc, str]] = {}

    def take_next(self) -> Doc | None:
        """Claim and begin the lowest job that is free; None if there is none."""
        return next(iter(self.take_batch(1)), None)

    def take_batch(self, most: int) -> list[Doc]:
        """Claim and begin up to ``most`` jobs; one if the store cannot hold documents."""
        where = {"pool": self.pool, "status": "pending"}
        if not self.store.find(JOBS, where, limit=1):
            return []  # found out without a lock: idle workers ask this again and again
        if self.store.can_hold:
            try:
                with self.store.batch():
                    found = self._take_held(most)
                return self._remember(found)
            except (KeyExists, StaleRevision):
                pass  # one has a claim already: of a run that is being settled
        after = ""
        while page := self.store.find(JOBS, where, limit=_NEXT, after=after):
            for doc in page:
                if taken := self.take(doc["_key"]):
                    return [taken]
            after = page[-1]["_key"]
        return []

    def end_and_take(
        self, key: str, end: End, most: int, rest: Sequence[Doc] = ()
    ) -> tuple[bool, list[Doc]]:
        """``end``; then ``keep`` of ``rest``, or ``take_batch`` if none is left: in one commit
        where that is possible. After a lost answer ask ``in_hand`` before more is taken: the jobs
        of a run are done in the order of their keys."""
        if self.store.can_hold and key in self._held:
            try:
                with self.store.batch():
                    self._end_held(key, end)
                    left = self.keep(rest)
                    found = [] if left else self._take_held(most)
            except (KeyExists, StaleRevision):
                self._held.pop(key, None)  # it was settled, or another job has a claim already
            else:
                del self._held[key]
                return True, left or self._remember(found)
        return self.end(key, end), self.keep(rest) or self.take_batch(most)

    def _take_held(self, most: int) -> list[tuple[Doc, str]]:
        """In a batch: claim and begin the first jobs that no other worker holds; returns them with
        the revisions of their claims."""
        where = {"pool": self.pool, "status": "pending"}
        docs = self.store.first(JOBS, where, limit=most)
        if not docs:
            return []
        claims = self.store.insert_all(CLAIMS, [self._make_claim(doc["_key"]) for doc in docs])
        begun = [job.begin(doc, self.owner, now_ms()) for doc in docs]
        revs = self.store.replace_all(JOBS, begun)
        taken = [doc | {"_rev": rev} for doc, rev in zip(begun, revs, strict=True)]
        return list(zip(taken, claims, strict=True))

    def _end_held(self, key: str, end: End) -> None:
        """In a batch: record the end of a job that was not changed since it was taken."""
        doc, claim_rev = self._held[key]
        self.store.replace(JOBS, _finish(doc, end, now_ms()))
        self.store.delete(CLAIMS, job.claim_key(key), claim_rev)

    def _remember(self, found: list[tuple[Doc, str]]) -> list[Doc]:
        self._held |= {doc["_key"]: (doc, claim_rev) for doc, claim_rev in found}
        return [doc for doc, _ in found]

    def keep(self, rest: Sequence[Doc]) -> list[Doc]:
        """The jobs of a batch from the first on that this run still has: they may be settled."""
        for number, doc in enumerate(rest):
            if job.is_in_hand(self.store.get(JOBS, doc["_key"]), self.owner.invocation):
                return list(rest[number:])
        return []

    def put_back(self, keys: Sequence[str]) -> None:
        """Put jobs of a batch that were not begun back into the queue, uncounted."""

        def write() -> None:
            with self.store.batch():
                for key in keys:
                    self._release(key, lambda doc: job.put_back(doc, now_ms()))

        write_again(write)
        for key in keys:
            self._held.pop(key, None)

    def take(self, key: str) -> Doc | None:
        """Claim a job and begin it; None if another worker was faster. May be called again after
        an answer was lost."""
        try:
            with self.store.batch():
                claim_rev = self._insert(self._make_claim(key))
                doc = self._begin(key, claim_rev)
        except (KeyExists, StaleRevision):
            return None
        return self._remember([(doc, claim_rev)])[0] if doc else None

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

        if key in self._held:
            try:
                with self.store.batch():
                    self._end_held(key, end)
            except StaleRevision:
                pass  # it was settled meanwhile, or only its claim is left
            else:
                del self._held[key]
                return True
            self._held.pop(key, None)

        def write() -> tuple[Doc | None, bool]:
            with self.store.batch():
                return self._release(key, lambda doc: _finish(doc, end, now_ms()))

        doc, ours = write_again(write)  # it may be settled meanwhile
        # After a lost answer the job has the end that the first call recorded.
        return ours or (
            doc is not None
            and doc.get("invocation") == self.owner.invocation
            and doc["status"] == end.status
        )

    def _release(self, key: str, change: Callable[[Doc], Doc]) -> tuple[Doc | None, bool]:
        """Change a job if this run has it in hand, and delete its claim; returns the job as it was
        and whether it was in hand."""
        doc = self.store.get(JOBS, key)
        ours = job.is_in_hand(doc, self.owner.invocation)
        if doc is not None and ours:
            self.store.replace(JOBS, change(doc))
        claim = self.store.get(CLAIMS, job.claim_key(key))
        if claim is not None and claim["invocation"] == self.owner.invocation:
            self.store.delete(CLAIMS, claim["_key"], claim["_rev"])
        return doc, ours

    def _make_claim(self, key: str) -> Doc:
        return make_claim(key, self.pool, self.owner, now_ms())

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


def make_claim(key: str, pool: str, owner: Owner, wall_ms: int) -> Doc:
    claim = {"_key": job.claim_key(key), "job": key, "pool": pool, "wall_ms": wall_ms}
    return claim | owner._asdict()


def find_owner(doc: Doc) -> Owner | None:
    """The run that has the job in hand; None if its document names none."""
    component_id, invocation = str(doc.get("component_id")), str(doc.get("invocation"))
    try:
        parse_component(component_id)
    except BadName:
        return None
    host = str(doc.get("host") or "")
    return Owner(component_id, invocation, host) if is_run(invocation) else None


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
