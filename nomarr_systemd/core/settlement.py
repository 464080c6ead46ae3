"""What becomes of the jobs of a run that has ended, and of its pool's books: ``settle``.

Reads and writes nothing; ``jobs.settlement`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, Protocol

from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.job import (
    HOST_LOST,
    CrashPolicy,
    Doc,
    Outcome,
    RunEnd,
    Settled,
    crashes_of,
    describe_crash,
    fail,
    has_crash,
    is_in_hand,
    put_back,
    requeue,
)

MAX_CRASHES: Final = 20  # crashes that a job's record keeps
MAX_RECORDS: Final = 200  # outcomes that a pool's books keep


class CrashRules(Protocol):
    """The settings of a pool that decide about the jobs of a dead run."""

    @property
    def crash_policy(self) -> CrashPolicy: ...

    @property
    def crash_max_retries(self) -> int | None: ...

    @property
    def job_max_crashes(self) -> int: ...


def settle(
    books: Doc, jobs: Iterable[Doc], end: RunEnd, pool: CrashRules
) -> tuple[list[Doc], Doc, Outcome]:
    """Decide what becomes of the jobs of a run that has ended (docs/policy.md).

    ``jobs`` are those that the run has claims on. Returns the jobs that change, the pool's new
    books and the outcome. Called again with its own results, also if only the jobs of the first
    call were written, it gives the same outcome. A run that was settled uncounted and is reported
    as a crash later is counted then; its jobs are not touched again.

    Of several jobs, taken as a batch, the run had the first one by key in hand, because it does
    them in this order. The others go back into the queue, and nothing of it is counted.
    """
    known = find_outcome(books, end.invocation)
    before = known or Outcome(end.component_id, end.invocation)
    changed, settled = _settle_jobs(jobs, end, pool)
    refund = [
        crash.invocation
        for doc in settled
        if doc["status"] == "quarantined"
        for crash in crashes_of(doc)
        if crash.cause != HOST_LOST
    ]
    outcome = _extend_outcome(before, settled, refund, end, pool)
    is_new_crash = end.counted and not before.counted
    crashes = 0 if end.pool_stopped else books["crashes"] + is_new_crash
    crashes = max(0, crashes - len(set(refund) - set(before.refund)))
    books = books | {"crashes": crashes}
    if is_new_crash and not outcome.quarantined:
        outcome = outcome._replace(fail_pool=_judge_pool(pool, crashes, end))
        if outcome.fail_pool:
            books["failed"] = _describe_failure(outcome.fail_pool, end)
    if outcome.counted or outcome.settled:
        others = [each for each in books["records"] if each["invocation"] != end.invocation]
        records = [*others, outcome.to_dict()] if outcome != known else books["records"]
        books["records"] = records[-MAX_RECORDS:]
    return changed, books, outcome


def _settle_jobs(jobs: Iterable[Doc], end: RunEnd, pool: CrashRules) -> tuple[list[Doc], list[Doc]]:
    """Return the jobs that change, and those that the run had in hand when it ended, as they are
    now."""
    jobs = sorted(jobs, key=itemgetter("_key"))
    waiting = [doc for doc in jobs if is_in_hand(doc, end.invocation)][1:]
    # Before the one in hand: a store that writes one after the other may be cut off in between.
    changed = [put_back(doc, end.wall_ms) for doc in waiting]
    put_aside = {doc["_key"] for doc in waiting}
    settled = []
    for doc in jobs:
        if doc["_key"] in put_aside:
            continue
        if is_in_hand(doc, end.invocation):
            doc = settle_job(doc, end, pool.crash_policy, pool.job_max_crashes)
            changed.append(doc)
        elif not has_crash(doc, end.invocation):
            continue  # ended in time, or claimed and not begun
        settled.append(doc)
    return changed, settled


def _extend_outcome(
    before: Outcome, settled: Iterable[Doc], refund: Iterable[str], end: RunEnd, pool: CrashRules
) -> Outcome:
    """Return the outcome ``before``, extended by the jobs that were settled now."""
    shown = [Settled(doc["_key"], doc["path"], doc["status"]) for doc in settled]
    all_settled = tuple(dict.fromkeys([*before.settled, *shown]))
    is_counted = before.counted or end.counted
    by_status: dict[str, dict[str, None]] = {"quarantined": {}, "error": {}}
    for each in all_settled:
        by_status.setdefault(each.status, {})[each.job] = None
    is_for_job = pool.crash_policy == "restart-fail-in-flight" and is_counted
    failed = tuple(by_status["error"]) if is_for_job else ()
    # The pool's count keeps a death for which a job failed; the worker's does not.
    own = [end.invocation] if failed else []
    return before._replace(
        settled=all_settled,
        quarantined=tuple(by_status["quarantined"]),
        refund=tuple(dict.fromkeys([*before.refund, *refund, *own])),
        counted=is_counted,
        failed=failed,
    )


def find_outcome(books: Mapping[str, Any], invocation: str) -> Outcome | None:
    """Return the outcome of a run in a pool's books; None if there is none."""
    for record in reversed(books["records"]):
        if record["invocation"] == invocation:
            return Outcome.from_dict(record)
    return None


def settle_job(doc: Doc, end: RunEnd, policy: CrashPolicy, max_crashes: int) -> Doc:
    """Return the job after its worker's end: failed, pending again, or quarantined."""
    changed = fail(doc, describe_crash(end), end.wall_ms)
    if end.counted or end.blames_job:
        crash = dict(zip(RunEnd._fields[:4], end[:4], strict=True))
        crashes = [*(doc.get("crashes") or ()), crash]
        dropped = max(0, len(crashes) - MAX_CRASHES)
        changed["crashes"] = crashes[dropped:]
        changed["forgiven"] = max(0, int(doc.get("forgiven", 0)) - dropped)
        if len(crashes_of(changed)) >= max_crashes:
            return changed | {"status": "quarantined"}
    if policy == "restart-requeue-in-flight":
        return requeue(changed, end.wall_ms)
    return changed


def _judge_pool(pool: CrashRules, crashes: int, end: RunEnd) -> str:
    """Return why a crash fails the whole pool; empty if it does not."""
    if pool.crash_policy == "fail-pool":
        return f"{end.component_id} died ({end.cause}), and crash_policy is fail-pool"
    limit = pool.crash_max_retries
    if limit is not None and crashes > limit:
        return f"{crashes} crashes since the last clean stop, and crash_max_retries is {limit}"
    return ""


def _describe_failure(reason: str, end: RunEnd) -> Doc:
    return {
        "reason": reason,
        "wall_ms": end.wall_ms,
        "worker_index": parse_component(end.component_id).number,
        "cause": end.cause,
        "invocation": end.invocation,
        "done": False,
    }
