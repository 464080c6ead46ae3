"""Settlement of the jobs of a run that has ended: read the documents, decide, write them back.

The decision is ``core.settlement.settle``. ``settle`` may be called for the same run any number of
times, by any process, whatever was killed during an earlier call: it returns the same Outcome. All
documents are in the work domain, which the supervisor writes. What root does about an Outcome
(refund restarts, mask workers) is in the controller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core import job, settlement
from nomarr_systemd.core.errors import BadDocument, BadName, KeyExists, StaleRevision
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import Doc, Outcome, RunEnd
from nomarr_systemd.core.json import JsonError, get_str
from nomarr_systemd.core.lease import PoolRules
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.jobs.claims import CLAIMS, find_owner, make_claim
from nomarr_systemd.jobs.queue import JOBS, write_again
from nomarr_systemd.store.protocol import Store, hosted, put, walk

STATS: Final = "stats"
MAX_RUNS: Final = 100_000  # with claims: more than can ever run
_MAX_IDS: Final = 128  # characters of an invocation and a boot's id
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
    """Return the runs of this host that have claims, MAX_RUNS at most. Workers may write anything
    into this store: a claim that names no run must not hide the others."""
    found: set[ClaimedRun] = set()
    for claim in walk(store, CLAIMS, {"host": host}):
        with contextlib.suppress(JsonError, BadName):
            name = parse_component(get_str(claim, "component_id")).component_id
            run, boot = get_str(claim, "invocation"), get_str(claim, "boot", "")
            if len(found) < MAX_RUNS and len(run) + len(boot) <= _MAX_IDS:
                found.add(ClaimedRun(name, run, boot))
    return sorted(found)


def restore_claims(store: Store, pool: str, wall_ms: int) -> int:
    """Insert the lost claims of a pool's running jobs again; returns how many.

    Nothing here deletes a claim before its job has an end, but a person may, and a failover that
    loses a write. With its claim, a job is settled when its run ends, or has ended, as any other.
    """
    lost = {str(doc["_key"]) for doc in walk(store, JOBS, {"pool": pool, "status": "running"})}
    for claim in walk(store, CLAIMS, {"pool": pool}):
        lost.discard(str(claim.get("job")))
    return sum(_restore(store, key, wall_ms) for key in sorted(lost))


def _restore(store: Store, key: str, wall_ms: int) -> bool:
    try:
        doc = store.get(JOBS, key) or {}
        owner = find_owner(doc)
        if owner is None or doc.get("status") != "running":
            return False
        claim = make_claim(key, str(doc["pool"]), owner, wall_ms)
        with store.batch():
            rev = store.insert(CLAIMS, claim)
            try:
                store.replace(JOBS, doc)  # what ends the job now reads again, and finds the claim
            except StaleRevision:
                store.delete(CLAIMS, claim["_key"], rev)
                return False
    except (KeyExists, StaleRevision, BadDocument):  # BadDocument: not a key of ours
        return False
    return True


def failure_of(store: Store, pool: str, host: str = "") -> str:
    """Return why the pool has failed; empty if it has not."""
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
    """Write jobs first, then the books, claims last: a claim stays until all is written."""
    books = _read_books(store, pool.name, host)
    claims = store.find(CLAIMS, {"invocation": end.invocation})
    jobs = [doc for claim in claims if (doc := _find_job(store, claim)) is not None]
    changed, new_books, outcome = settlement.settle(books, jobs, end, pool)
    for doc in changed:
        store.replace(JOBS, doc)
    if new_books != books:
        put(store, STATS, new_books)
    for claim in claims:
        store.delete(CLAIMS, claim["_key"], claim["_rev"])
    return outcome, bool(claims) or new_books != books


def _find_job(store: Store, claim: Doc) -> Doc | None:
    """Return the job of a claim; None if there is none, or if the claim is damaged."""
    with contextlib.suppress(JsonError, BadDocument):
        return store.get(JOBS, get_str(claim, "job"))
    return None


def _fail_claimed(store: Store, pool: str, error: Doc, wall_ms: int, host: str) -> None:
    claims = [claim for claim in walk(store, CLAIMS, {"host": host}) if claim.get("pool") == pool]
    jobs = [_find_job(store, claim) for claim in claims]
    runs = [str(claim.get("invocation")) for claim in claims]
    first: dict[str, str] = {}  # the job in hand of each run, and not the rest of its batch
    for run, doc in zip(runs, jobs, strict=True):
        if doc is not None and job.is_in_hand(doc, run):
            first.setdefault(run, doc["_key"])
    # The rest of a batch before the job in hand: after a kill it is still known which is which.
    for claim, run, doc in reversed(list(zip(claims, runs, jobs, strict=True))):
        if doc is not None and job.is_in_hand(doc, run):
            is_waiting = bool(host) and first[run] != doc["_key"]
            changed = job.put_back(doc, wall_ms) if is_waiting else job.fail(doc, error, wall_ms)
            with contextlib.suppress(StaleRevision):  # its worker ended it meanwhile
                store.replace(JOBS, changed)
        with contextlib.suppress(StaleRevision):  # it is another run's by now
            store.delete(CLAIMS, claim["_key"], claim["_rev"])


def _read_books(store: Store, pool: str, host: str) -> Doc:
    key = hosted(f"pool:{pool}", host)
    empty = {"_key": key, "crashes": 0, "failed": None, "records": []}
    return empty | (store.get(STATS, key) or {})


def _change_books(store: Store, pool: str, host: str, change: Callable[[Doc], Doc]) -> None:
    write_again(lambda: put(store, STATS, change(_read_books(store, pool, host))))
