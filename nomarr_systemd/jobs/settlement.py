"""What follows a worker's death: its job fails, goes back, or is quarantined; its pool may fail.

``settle`` is the one way, and may be called for the same run any number of times, by anybody,
whatever was killed during the call before: the same Outcome comes out. What it decided is in the
job (its certificates of death) and in the pool's books, a document in ``stats``. All of that is
in the work domain: the supervisor writes it. Root's part, restarts given back and workers masked,
is the controller's, and follows from the Outcome alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core import job
from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import UNCOUNTED, Certificate, CrashPolicy, Doc
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.queue import JOBS, PAGE
from nomarr_systemd.store.protocol import Store

STATS: Final = "stats"
MAX_RECORDS: Final = 200  # settlements that a pool's books remember


class Settled(NamedTuple):
    """A job that the dead worker had in hand, and what it is now."""

    job: str
    path: str
    status: str


class Outcome(NamedTuple):
    """What the end of one run led to.

    ``refund``: invocations whose restarts are to be given back, because their job was at fault.
    ``fail_pool``: why the pool's workers are to be stopped and masked; empty if they are not.
    """

    component_id: str
    invocation: str
    settled: tuple[Settled, ...] = ()
    quarantined: tuple[str, ...] = ()  # keys of jobs
    refund: tuple[str, ...] = ()
    fail_pool: str = ""
    counted: bool = False  # as a crash of the pool

    def to_dict(self) -> dict[str, Any]:
        """As the live socket says it, and the pool's books keep it."""
        return self._asdict() | {"settled": [each._asdict() for each in self.settled]}


def settle(
    store: Store, pool: Pool, component_id: str, invocation: str, cause: str, wall_ms: int
) -> Outcome:
    """Settle all that a run which has ended left in its hands, by its pool's crash_policy.

    A ``cause`` of UNCOUNTED is held against nobody. May raise StoreUnavailable; then it
    is to be called again.
    """
    death = Certificate(component_id, invocation, cause, wall_ms)
    while True:
        try:
            with store.batch():
                outcome = _settle(store, pool, death)
            break
        except (StaleRevision, KeyExists):
            continue  # somebody wrote at the same time: look again
    if outcome.fail_pool:
        finish_failing(store, pool.name, wall_ms)
    return outcome


def find_vanished(
    store: Store, host: str, running: Callable[[str], str]
) -> list[tuple[str, str, str]]:
    """Claims of this host whose run is over: component id, invocation and boot of each run.

    ``running`` tells the invocation in which a worker runs now. It is asked after the claims were
    read: whoever claimed before then and is not running now has ended.
    """
    claims = store.find(CLAIMS, {"host": host})
    ended = {
        (claim["component_id"], claim["invocation"], claim["boot"])
        for claim in claims
        if running(claim["component_id"]) != claim["invocation"]
    }
    return sorted(ended)


def name_cause(store: Store, outcome: Outcome, cause: str) -> None:
    """Put the controller's better word for a death into the records of the jobs it hit."""
    for key, _, _ in outcome.settled:
        doc = store.get(JOBS, key)
        if doc is None:
            continue
        for each in doc.get("crashes") or ():
            if each["invocation"] == outcome.invocation:
                each["cause"] = cause
                error = doc.get("error") or {}
                if error.get("invocation") == outcome.invocation:
                    doc["error"] = job.describe_crash(Certificate(**each))
        try:
            store.replace(JOBS, doc)
        except StaleRevision:
            continue  # it has gone on meanwhile: a better word is not worth a fight


def read_outcome(store: Store, pool: str, invocation: str) -> Outcome | None:
    """What was settled for a run, if the books still know."""
    return _recall(_read_books(store, pool), invocation)


def failure_of(store: Store, pool: str) -> str:
    """Why the pool has failed; empty if it has not."""
    failed = _read_books(store, pool).get("failed") or {}
    return str(failed.get("reason", ""))


def clear_pool(store: Store, pool: str) -> None:
    """After ``nomarrctl reset --pool``: its crashes count from none, and it has not failed."""
    _change_books(store, pool, lambda books: books | {"crashes": 0, "failed": None})


def finish_failing(store: Store, pool: str, wall_ms: int) -> bool:
    """Fail all work of a pool that has failed, page by page; False if there is nothing to finish.

    To be called again after a kill: the books say whether it was done.
    """
    failed = _read_books(store, pool).get("failed")
    if not failed or failed.get("done"):
        return False
    message = f"pool {pool} has failed: {failed['reason']}"
    error = job.describe_error(job.WorkerCrashedError(message)) | {"pool": pool}
    error |= {name: failed[name] for name in ("worker_index", "cause", "invocation")}
    # Workers may still take a job between the first look at the queue and that at the claims.
    _fail_pending(store, pool, error, wall_ms)
    _fail_claimed(store, pool, error, wall_ms)
    _fail_pending(store, pool, error, wall_ms)

    def be_done(books: Doc) -> Doc:
        return books | {"failed": {**books["failed"], "done": True}} if books["failed"] else books

    _change_books(store, pool, be_done)
    return True


def _settle(store: Store, pool: Pool, death: Certificate) -> Outcome:
    """The jobs first, then the books, the claims last: a claim stays until all is written."""
    books = _read_books(store, pool.name)
    before = dict(books)
    known = _recall(books, death.invocation)
    claims = store.find(CLAIMS, {"invocation": death.invocation})
    counted = death.cause not in UNCOUNTED
    if known is not None and not claims:
        return known
    policy = pool.crash_policy
    settled = list(known.settled) if known else []
    refund = list(known.refund) if known else []
    for claim in claims:
        doc = _settle_job(store, claim["job"], death, policy, pool.job_max_crashes)
        if doc is None:
            continue
        settled.append(Settled(doc["_key"], doc["path"], doc["status"]))
        if doc["status"] == "quarantined":
            refund += [each.invocation for each in job.certificates(doc)]
    quarantined = tuple(each.job for each in settled if each.status == "quarantined")
    outcome = Outcome(
        death.component_id,
        death.invocation,
        tuple(dict.fromkeys(settled)),
        tuple(dict.fromkeys(quarantined)),
        tuple(dict.fromkeys(refund)),
        counted=counted or (known is not None and known.counted),
    )
    if death.cause == job.STOPPED:
        books["crashes"] = 0  # since the last clean stop
    elif counted and known is None:
        books["crashes"] += 1
    given_back = set(outcome.refund) - set(known.refund if known else ())
    books["crashes"] = max(0, books["crashes"] - len(given_back))
    if known is not None:
        outcome = outcome._replace(fail_pool=known.fail_pool)
    elif counted and not quarantined:
        outcome = outcome._replace(fail_pool=_judge(pool, books["crashes"], death))
    if outcome.fail_pool and known is None:
        index = parse_component(death.component_id).number
        books["failed"] = {
            "reason": outcome.fail_pool,
            "wall_ms": death.wall_ms,
            "worker_index": index,
            "cause": death.cause,
            "invocation": death.invocation,
            "done": False,
        }
    if counted or settled:
        records = [each for each in books["records"] if each["invocation"] != death.invocation]
        books["records"] = [*records, outcome.to_dict()][-MAX_RECORDS:]
    if books != before:
        _write_books(store, books)
    for claim in claims:
        store.delete(CLAIMS, claim["_key"])
    return outcome


def _judge(pool: Pool, crashes: int, death: Certificate) -> str:
    """Why a death fails the whole pool, if it does. A job that was at fault fails alone."""
    if pool.crash_policy == "fail-pool":
        return f"{death.component_id} died ({death.cause}), and crash_policy is fail-pool"
    limit = pool.crash_max_retries
    if limit is not None and crashes > limit:
        return f"{crashes} crashes since the last clean stop, and crash_max_retries is {limit}"
    return ""


def _settle_job(
    store: Store, key: str, death: Certificate, policy: CrashPolicy, max_crashes: int
) -> Doc | None:
    """The job as it is now, if this death changed it, now or in a call that was cut short."""
    doc = store.get(JOBS, key)
    if doc is None:
        return None
    if job.is_in_hand(doc, death.invocation):
        doc = job.settle(doc, death, policy, max_crashes)
        store.replace(JOBS, doc)
        return doc
    # Done in time, or claimed and not begun: then the claim is all there is to clear away.
    return doc if job.is_certified(doc, death.invocation) else None


def _fail_pending(store: Store, pool: str, error: Doc, wall_ms: int) -> None:
    where = {"pool": pool, "status": "pending"}
    while page := store.find(JOBS, where, limit=PAGE):
        _fail(store, page, error, wall_ms)


def _fail_claimed(store: Store, pool: str, error: Doc, wall_ms: int) -> None:
    for claim in store.find(CLAIMS, {"pool": pool}):
        doc = store.get(JOBS, claim["job"])
        if doc is not None and job.is_in_hand(doc, claim["invocation"]):
            _fail(store, [doc], error, wall_ms)
        store.delete(CLAIMS, claim["_key"])


def _fail(store: Store, docs: Sequence[Doc], error: Doc, wall_ms: int) -> None:
    with store.batch():
        for doc in docs:
            try:
                store.replace(JOBS, job.fail(doc, error, wall_ms))
            except StaleRevision:
                continue  # taken or done this moment


def _recall(books: Doc, invocation: str) -> Outcome | None:
    for record in reversed(books["records"]):
        if record["invocation"] == invocation:
            fields = {name: _freeze(record[name]) for name in Outcome._fields if name in record}
            fields["settled"] = tuple(Settled(**each) for each in record["settled"])
            return Outcome(**fields)
    return None


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _books_key(pool: str) -> str:
    return f"pool:{pool}"


def _read_books(store: Store, pool: str) -> Doc:
    empty = {"_key": _books_key(pool), "crashes": 0, "failed": None, "records": []}
    return empty | (store.get(STATS, _books_key(pool)) or {})


def _write_books(store: Store, books: Doc) -> None:
    if "_rev" in books:
        store.replace(STATS, books)
    else:
        store.insert(STATS, books)


def _change_books(store: Store, pool: str, change: Callable[[Doc], Doc]) -> None:
    while True:
        try:
            _write_books(store, change(_read_books(store, pool)))
            return
        except (StaleRevision, KeyExists):
            continue
