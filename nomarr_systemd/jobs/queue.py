"""Operations of a person on the queue: add, list, retry, release, prune, count.

None of them changes a job that is running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

from nomarr_systemd.core import job
from nomarr_systemd.core.errors import KeyExists, NomarrError, StaleRevision, StoreUnavailable
from nomarr_systemd.core.job import STATUSES, Doc, Status, key_of
from nomarr_systemd.core.text import one_line
from nomarr_systemd.store import protocol
from nomarr_systemd.store.protocol import PAGE, Store

JOBS: Final = "jobs"
MAX_TRIES: Final = 1000  # in each try one of the writers succeeds
_Written = TypeVar("_Written")


class NoSuchJob(NomarrError):
    """There is no such job in the store."""

    code = "no-such-job"
    exit_status = 4


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def write_again(write: Callable[[], _Written]) -> _Written:
    """Call ``write``; retry if another process wrote one of its documents meanwhile.

    StoreUnavailable after MAX_TRIES: workers may write anything into this store.
    """
    for _ in range(MAX_TRIES):
        try:
            return write()
        except (StaleRevision, KeyExists):
            continue
    raise StoreUnavailable(
        f"a document of the jobs was changed {MAX_TRIES} times while it was written",
        hint="find what else writes the work store; if nothing does, it is damaged: move it away",
    )


def add(
    store: Store, pool: str, paths: Iterable[str], *, on_page: Callable[[int, int], None]
) -> tuple[int, int]:
    """Add paths to a pool; returns how many there were, and how many of them are new.

    They are written in pages. A page is durable when ``on_page(all so far, new so far)`` is
    called. Jobs that exist already are skipped.
    """
    wall_ms = now_ms()
    seen = new = 0
    paths = iter(paths)
    while page := [job.make_job(pool, path, wall_ms) for path in islice(paths, PAGE)]:
        new += store.add(JOBS, page)
        seen += len(page)
        on_page(seen, new)
    return seen, new


def find_of_run(store: Store, pool: str, invocation: str) -> Doc | None:
    """Return the job that a run had when it died; None if no job names that run any more."""
    where = {"pool": pool, "invocation": invocation}
    # The last ones by key, as it did them in this order; of a batch the first is in hand.
    last = store.find(JOBS, where, descending=True, limit=PAGE)
    for doc in reversed(last):
        error = doc.get("error")
        ended = isinstance(error, dict) and error.get("invocation") == invocation
        if doc["status"] == "running" or ended or job.has_crash(doc, invocation):
            return doc
    for status in STATUSES:  # another worker may have had it since; few jobs have crashes
        for doc in store.find(JOBS, {"pool": pool, "status": status}, limit=PAGE):
            crashes = doc.get("crashes") or ()
            if any(crash.get("invocation") == invocation for crash in crashes):
                return doc
    return None


def find(store: Store, pool: str, job: str) -> Doc:
    """Return the job with this key, or of this path in ``pool``; or NoSuchJob."""
    doc = store.get(JOBS, key_of(pool, job)) if pool else None
    if doc is None and ":" in job and job.isascii() and len(job) <= 200 and "/" not in job:
        doc = store.get(JOBS, job)
    if doc is None:
        raise no_such_job(pool, job)
    return doc


def no_such_job(pool: str, job: str) -> NoSuchJob:
    return NoSuchJob(
        f"there is no job {job!r:.200}" + (f" in pool {pool}" if pool else ""),
        hint="name it by its key or its path, as nomarrctl jobs list shows them",
    )


def walk(store: Store, pool: str, status: Status | None = None) -> Iterator[Doc]:
    """Yield the jobs of a pool, in each status by key."""
    for each in (status,) if status else STATUSES:
        yield from protocol.walk(store, JOBS, {"pool": pool, "status": each})


def count(store: Store, pool: str) -> dict[Status, int]:
    """Return the number of a pool's jobs in each status."""
    found = store.tally(JOBS, {"pool": pool}, "status")
    return {each: found.get(each, 0) for each in STATUSES}


def retry(store: Store, doc: Doc) -> Doc:
    """Put a job that failed or is done back into the queue; its crashes still count."""
    return _swap(store, doc, ("error", "done"), job.requeue, "retried")


def release(store: Store, doc: Doc) -> Doc:
    """End a job's quarantine: its crashes so far no longer count."""
    return _swap(store, doc, ("quarantined",), job.release, "released")


def prune(store: Store, pool: str, status: Status, older_than_ms: int) -> int:
    """Delete jobs in this status that did not change for ``older_than_ms``; returns how many."""
    before = now_ms() - older_than_ms + 1
    return store.prune(JOBS, "updated_wall_ms", before, {"pool": pool, "status": status})


def _swap(
    store: Store,
    doc: Doc,
    allowed: tuple[str, ...],
    change: Callable[[Doc, int], Doc],
    verb: str,
) -> Doc:
    key, tries = doc["_key"], 0

    def swap() -> Doc:
        nonlocal tries
        there = find(store, "", key) if tries else doc
        tries += 1
        if there["status"] not in allowed:
            status = one_line(str(there["status"]), 40)
            raise NomarrError(
                f"job {one_line(key)} is {status} and cannot be {verb}", hint=_HINTS.get(status, "")
            )
        changed = change(there, now_ms())
        store.replace(JOBS, changed)
        return changed

    return write_again(swap)


_HINTS: Final = {
    "pending": "it is in the queue already",
    "running": "a worker is processing it",
    "quarantined": "nomarrctl jobs quarantine release ends its quarantine",
    "error": "nomarrctl jobs retry puts it back into the queue",
    "done": "nomarrctl jobs retry puts it back into the queue",
}
