"""Settlement of the jobs of a run that has ended: read the documents, decide, write them back.

The decision is ``core.job.settle``. ``settle`` may be called for the same run any number of times,
by any process, whatever was killed during an earlier call: it returns the same Outcome. All
documents are in the work domain, which the supervisor writes. What root does about an Outcome
(refund restarts, mask workers) is in the controller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, NamedTuple

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core import job
from nomarr_systemd.core.errors import BadName, KeyExists, StaleRevision
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.job import Doc, Outcome, RunEnd
from nomarr_systemd.core.lease import PoolRules
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.queue import JOBS, write_again
from nomarr_systemd.store.protocol import Store, hosted

STATS: Final = "stats"
Rules = Pool | PoolRules


class ClaimedRun(NamedTuple):
    """A run that has claims in the store."""

    component_id: str
    invocation: str
    boot: str


def settle(store: Store, pool: Rules, end: RunEnd, host: str = "") -> tuple[Outcome, bool]:
    """Settle the jobs of a run that has ended; returns the Outcome, and True if anything changed.
    ``host`` is the run's, where hosts share the store: each has books of its own.

    May raise StoreUnavailable; then call it again.
    """

    def write() -> tuple[Outcome, bool]:
        with store.batch():
            return _settle(store, pool, end, host)

    outcome, is_new = write_again(write)
    if outcome.fail_pool:
        finish_failing(store, pool.name, end.wall_ms, host)
    return outcome, is_new


def find_claimed_runs(store: Store, host: str) -> list[ClaimedRun]:
    """The runs of this host that have claims. Claims that name no run are left out: workers may
    write anything there."""
    found = set()
    for claim in store.find(CLAIMS, {"host": host}):
        try:
            name = parse_component(str(claim.get("component_id"))).component_id
            invocation, _ = split_invocation(str(claim.get("invocation")))
        except BadName:
            continue
        found.add(ClaimedRun(name, invocation, str(claim.get("boot", ""))))
    return sorted(found)


def restore_claims(store: Store, pool: str, wall_ms: int) -> int:
    """Give running jobs of a pool back the claims that they have lost; returns how many.

    Nothing here deletes a claim before its job has an end, but a person may, and a failover that
    loses a write. With its claim, a job is settled when its run ends, or has ended, as any other.
    """
    running = store.find(JOBS, {"pool": pool, "status": "running"})
    # Read after the jobs: one that is not changed since, and has no claim here, has lost it.
    claimed = {claim.get("job") for claim in store.find(CLAIMS, {"pool": pool})}
    return sum(_restore(store, doc, wall_ms) for doc in running if doc["_key"] not in claimed)


def _restore(store: Store, doc: Doc, wall_ms: int) -> bool:
    owner = job.find_owner(doc)
    if owner is None:
        return False
    claim = job.make_claim(doc["_key"], str(doc["pool"]), owner, wall_ms)
    try:
        with store.batch():
            rev = store.insert(CLAIMS, claim)
            try:
                store.replace(JOBS, doc)  # whoever ends it now reads again, and finds the claim
            except StaleRevision:
                store.delete(CLAIMS, claim["_key"], rev)
                return False
    except (KeyExists, StaleRevision):
        return False
    return True


def failure_of(store: Store, pool: str, host: str = "") -> str:
    """Why the pool has failed; empty if it has not."""
    failed = _read_books(store, pool, host).get("failed") or {}
    return str(failed.get("reason", ""))


def clear_pool(store: Store, pool: str, host: str = "") -> None:
    """Set the pool's crashes to 0 and its failure to none, as ``nomarrctl reset --pool`` does."""
    _change_books(store, pool, host, lambda books: books | {"crashes": 0, "failed": None})


def finish_failing(store: Store, pool: str, wall_ms: int, host: str = "") -> None:
    """Fail all work of a pool that has failed, unless that is done already. Where hosts share the
    queue, only what this host has in hand: the rest is for the others.

    May be called again after a kill: the pool's books record whether it is done.
    """
    failed = _read_books(store, pool, host).get("failed")
    if not failed or failed.get("done"):
        return
    message = f"pool {pool} has failed: {failed['reason']}"
    error = job.describe_error(job.WorkerCrashedError(message)) | {"pool": pool}
    error |= {name: failed[name] for name in ("worker_index", "cause", "invocation")}
    # Workers may take a job after the first pass over the queue and before that over the claims.
    pending = {"pool": pool, "status": "pending"}
    changes = job.fail({}, error, wall_ms)
    if not host:
        store.update(JOBS, pending, changes)
    _fail_claimed(store, pool, error, wall_ms, host)
    if not host:
        store.update(JOBS, pending, changes)

    def mark_done(books: Doc) -> Doc:
        return books | {"failed": {**books["failed"], "done": True}} if books["failed"] else books

    _change_books(store, pool, host, mark_done)


def _settle(store: Store, pool: Rules, end: RunEnd, host: str) -> tuple[Outcome, bool]:
    """Jobs first, then the books, claims last: a claim stays until everything is written."""
    books = _read_books(store, pool.name, host)
    claims = store.find(CLAIMS, {"invocation": end.invocation})
    jobs = [doc for claim in claims if (doc := store.get(JOBS, claim["job"])) is not None]
    changed, new_books, outcome = job.settle(books, jobs, end, pool)
    for doc in changed:
        store.replace(JOBS, doc)
    if new_books != books:
        _write_books(store, new_books)
    for claim in claims:
        store.delete(CLAIMS, claim["_key"], claim["_rev"])
    return outcome, bool(claims) or new_books != books


def _fail_claimed(store: Store, pool: str, error: Doc, wall_ms: int, host: str) -> None:
    for claim in store.find(CLAIMS, {"host": host}):
        if claim.get("pool") != pool:
            continue
        doc = store.get(JOBS, claim["job"])
        if doc is not None and job.is_in_hand(doc, claim["invocation"]):
            with contextlib.suppress(StaleRevision):  # its worker ended it meanwhile
                store.replace(JOBS, job.fail(doc, error, wall_ms))
        with contextlib.suppress(StaleRevision):  # it is another run's by now
            store.delete(CLAIMS, claim["_key"], claim["_rev"])


def _read_books(store: Store, pool: str, host: str) -> Doc:
    key = hosted(f"pool:{pool}", host)
    empty = {"_key": key, "crashes": 0, "failed": None, "records": []}
    return empty | (store.get(STATS, key) or {})


def _write_books(store: Store, books: Doc) -> None:
    if "_rev" in books:
        store.replace(STATS, books)
    else:
        store.insert(STATS, books)


def _change_books(store: Store, pool: str, host: str, change: Callable[[Doc], Doc]) -> None:
    write_again(lambda: _write_books(store, change(_read_books(store, pool, host))))
