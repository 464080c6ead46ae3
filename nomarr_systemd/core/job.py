"""A job as a document, and every change of it; pure. Reading and writing documents is in jobs/.

A job is a path in a pool. Its key is derived from both, so the same path is one job however often
it is added. Workers take jobs in the order of keys.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import check_pool, parse_component
from nomarr_systemd.core.text import escape

Status = Literal["pending", "running", "done", "error", "quarantined"]
CrashPolicy = Literal["restart-fail-in-flight", "restart-requeue-in-flight", "fail-pool"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
Doc = dict[str, Any]

# Causes of ends that are not counted against a job or its pool.
STOPPED: Final = "stopped"  # a stop of the worker was requested
REBOOTED: Final = "the machine was started again"
HOST_LOST: Final = "its host was lost"  # no sign of its supervisor; counted against the job only
LEFT: Final = "left by itself"  # after a stopping frame; only systemd knows the exit status
# The cause of a run whose death was not reported within claim_timeout_s. It is counted.
UNREPORTED: Final = "ended, and no cause was reported in time"

POOL_FAILED: Final = "its pool failed: "  # prefix of the reason for which workers are masked
_QUARANTINED: Final = re.compile(r"job (\S+) was quarantined")
_FAILED: Final = re.compile(r"job (\S+) failed for it")
_KEY: Final = re.compile(r"[a-z][a-z0-9_]{0,30}:[a-z0-9]{1,48}:[0-9a-f]{24}")

MAX_CRASHES: Final = 20  # crashes that a job's record keeps
MAX_RECORDS: Final = 200  # outcomes that a pool's books keep
_MAX_PATH: Final = 65_536  # bytes: more than any kernel accepts
_SLUG: Final = 48
_MAX_MESSAGE: Final = 2000
_PLAIN = re.compile(r"[^a-z0-9]+")


class WorkerCrashedError(NomarrError):
    """The worker died while it had the job in hand."""

    code = "worker-crashed"


class Owner(NamedTuple):
    """The run of a worker that has a job in hand."""

    component_id: str
    invocation: str
    host: str = ""  # empty if the store has one host only
    boot: str = ""


class RunEnd(NamedTuple):
    """The end of one run of a worker."""

    component_id: str
    invocation: str
    cause: str
    wall_ms: int
    counted: bool = True  # as a crash, of the jobs in hand and of the pool
    pool_stopped: bool = False  # it was stopped as requested, and so were all others of its pool
    blames_job: bool = False  # counted as a crash of the jobs in hand only


class Settled(NamedTuple):
    """A job that a run had in hand when it ended, and its status after that."""

    job: str
    path: str
    status: str


class Outcome(NamedTuple):
    """What the end of one run led to.

    ``refund``: invocations whose restarts the controller refunds, because a job was at fault.
    ``fail_pool``: why the pool's workers are to be stopped and masked; empty if they are not.
    """

    component_id: str
    invocation: str
    settled: tuple[Settled, ...] = ()
    quarantined: tuple[str, ...] = ()  # keys of jobs
    refund: tuple[str, ...] = ()
    fail_pool: str = ""
    counted: bool = False  # as a crash of the pool
    failed: tuple[str, ...] = ()  # keys of jobs that failed for this death and are not tried again

    def to_dict(self) -> dict[str, Any]:
        """The form of the pool's books and of ``settled`` events."""
        return self._asdict() | {"settled": [each._asdict() for each in self.settled]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Outcome:
        """The inverse of ``to_dict``, also after a round through JSON."""
        fields = {name: _freeze(record[name]) for name in cls._fields if name in record}
        fields["settled"] = tuple(Settled(**each) for each in record["settled"])
        return cls(**fields)


class CrashRules(Protocol):
    """The settings of a pool that decide about the jobs of a dead run."""

    @property
    def crash_policy(self) -> CrashPolicy: ...

    @property
    def crash_max_retries(self) -> int | None: ...

    @property
    def job_max_crashes(self) -> int: ...


def key_of(pool: str, path: str) -> str:
    """The job's key: readable, ordered as the path as far as that is possible, and unique."""
    import hashlib  # slow to import, and the controller does not need it

    raw = path.encode("utf-8", "surrogateescape")
    slug = _PLAIN.sub("", path.lower())[:_SLUG] or "0"
    digest = hashlib.blake2b(raw, digest_size=12, person=b"nomarr-job").hexdigest()
    return f"{pool}:{slug}:{digest}"


def describe_quarantine(key: str) -> str:
    """The reason of a refund, for people and for ``find_quarantined``."""
    return f"job {key} was quarantined"


def describe_failed(key: str) -> str:
    """The reason of a refund for a job that was not quarantined, and for ``find_failed``."""
    return f"job {key} failed for it"


def find_quarantined(text: str) -> str:
    """The key of the quarantined job in the reason of a refund; empty if there is none."""
    return _find_key(_QUARANTINED, text)


def find_failed(text: str) -> str:
    """The key of the failed job in the reason of a refund; empty if there is none."""
    return _find_key(_FAILED, text)


def _find_key(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.match(text)
    return found[1] if found and _KEY.fullmatch(found[1]) else ""


def release_command(key: str) -> str:
    """The command that ends a quarantine; empty unless ``key`` is a job's: a person may paste it
    into a shell, and the key may come from a program that is not trusted."""
    return f"nomarrctl jobs quarantine release {key}" if _KEY.fullmatch(key) else ""


def retry_command(key: str) -> str:
    """The command that has a failed job tried again; empty as for ``release_command``."""
    return f"nomarrctl jobs retry {key}" if _KEY.fullmatch(key) else ""


def claim_key(job: str) -> str:
    return f"claim_{job}"


def make_job(pool: str, path: str, wall_ms: int) -> Doc:
    """Return a new job; BadName if pool or path cannot be used."""
    check_pool(pool)
    if not path or "\0" in path:
        raise BadName(f"{path!r:.80} is no path", hint="a path has one character at least, no NUL")
    try:
        raw = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadName(f"{path!r:.80} is no path: {error.reason}") from error
    if len(raw) > _MAX_PATH:
        raise BadName(f"{path!r:.80} is {len(raw)} bytes long", hint=f"{_MAX_PATH} is the most")
    doc: Doc = {
        "_key": key_of(pool, path),
        "pool": pool,
        "path": path,
        "status": "pending",
        "added_wall_ms": wall_ms,
        "updated_wall_ms": wall_ms,
        "attempts": 0,
    }
    try:
        path.encode()
    except UnicodeEncodeError:  # not UTF-8: JSON keeps the bytes, and an escaped form for people
        doc |= {"path": escape(path), "raw": binascii.b2a_base64(raw, newline=False).decode()}
    return doc


def path_of(doc: Mapping[str, Any]) -> str:
    """The path as the operating system knows it; bytes that are not UTF-8 as surrogates."""
    raw = doc.get("raw")
    if isinstance(raw, str):
        return binascii.a2b_base64(raw).decode("utf-8", "surrogateescape")
    return str(doc["path"])


def begin(doc: Doc, owner: Owner, wall_ms: int) -> Doc:
    """Mark a pending job as running in this run."""
    at = {"host": owner.host} if owner.host else {}
    return _change(
        doc,
        wall_ms,
        status="running",
        component_id=owner.component_id,
        invocation=owner.invocation,
        started_wall_ms=wall_ms,
        attempts=int(doc.get("attempts", 0)) + 1,
        **at,
    )


def complete(doc: Doc, result: object, wall_ms: int) -> Doc:
    return _change(doc, wall_ms, status="done", result=result, error=None)


def fail(doc: Doc, error: Mapping[str, Any], wall_ms: int) -> Doc:
    return _change(doc, wall_ms, status="error", error=dict(error))


def requeue(doc: Doc, wall_ms: int) -> Doc:
    """Make the job pending again, whatever its status was."""
    return _change(doc, wall_ms, status="pending", component_id=None, invocation=None)


def put_back(doc: Doc, wall_ms: int) -> Doc:
    """The same for a job that was taken and not begun: the attempt is not counted."""
    return requeue(doc, wall_ms) | {"attempts": max(0, int(doc.get("attempts", 1)) - 1)}


def release(doc: Doc, wall_ms: int) -> Doc:
    """End the quarantine: earlier crashes stay on record and are no longer counted."""
    crashes = doc.get("crashes")
    return requeue(doc, wall_ms) | {"forgiven": len(crashes) if isinstance(crashes, list) else 0}


def is_in_hand(doc: Mapping[str, Any] | None, invocation: str) -> bool:
    """Whether this run has the job in hand."""
    return (
        doc is not None and doc.get("status") == "running" and doc.get("invocation") == invocation
    )


def crashes_of(doc: Mapping[str, Any]) -> list[RunEnd]:
    """The crashes that are counted against the job."""
    kept = doc.get("crashes") or ()
    return [RunEnd(**each) for each in kept[int(doc.get("forgiven", 0)) :]]


def has_crash(doc: Mapping[str, Any], invocation: str) -> bool:
    """Whether the job's record has the crash of this run already."""
    return any(each["invocation"] == invocation for each in doc.get("crashes") or ())


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
    settled, refund = list(before.settled), list(before.refund)
    is_counted = before.counted or end.counted
    jobs = sorted(jobs, key=itemgetter("_key"))
    waiting = [doc for doc in jobs if is_in_hand(doc, end.invocation)][1:]
    # Before the one in hand: a store that writes one after the other may be cut off in between.
    changed = [put_back(doc, end.wall_ms) for doc in waiting]
    put_aside = {doc["_key"] for doc in waiting}
    for doc in jobs:
        if doc["_key"] in put_aside:
            continue
        if is_in_hand(doc, end.invocation):
            doc = settle_job(doc, end, pool.crash_policy, pool.job_max_crashes)
            changed.append(doc)
        elif not has_crash(doc, end.invocation):
            continue  # ended in time, or claimed and not begun
        settled.append(Settled(doc["_key"], doc["path"], doc["status"]))
        if doc["status"] == "quarantined":
            refund += [each.invocation for each in crashes_of(doc) if each.cause != HOST_LOST]
    is_new_crash = end.counted and not before.counted
    crashes = 0 if end.pool_stopped else books["crashes"] + is_new_crash
    crashes = max(0, crashes - len(set(refund) - set(before.refund)))
    failed = [each.job for each in settled if each.status == "error"]
    if pool.crash_policy != "restart-fail-in-flight" or not is_counted:
        failed = []
    outcome = before._replace(
        settled=tuple(dict.fromkeys(settled)),
        quarantined=tuple(
            dict.fromkeys(each.job for each in settled if each.status == "quarantined")
        ),
        # The pool's count keeps a death for which a job failed; the worker's does not.
        refund=tuple(dict.fromkeys([*refund, *([end.invocation] if failed else ())])),
        counted=is_counted,
        failed=tuple(dict.fromkeys(failed)),
    )
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


def find_outcome(books: Mapping[str, Any], invocation: str) -> Outcome | None:
    """Return the outcome of a run in a pool's books; None if there is none."""
    for record in reversed(books["records"]):
        if record["invocation"] == invocation:
            return Outcome.from_dict(record)
    return None


def settle_job(doc: Doc, end: RunEnd, policy: CrashPolicy, max_crashes: int) -> Doc:
    """The job after its worker's end: failed, pending again, or quarantined."""
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
    """Why a crash fails the whole pool; empty if it does not."""
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


def describe_error(error: BaseException) -> Doc:
    """An exception in the form of a job's record."""
    kind = type(error).__name__
    text = escape(str(error)) or kind  # also without lone surrogates, which JSON cannot hold
    return {"type": kind, "message": text[:_MAX_MESSAGE]}


def describe_crash(end: RunEnd) -> Doc:
    """WorkerCrashedError in the form of a job's record: pool, worker index and cause."""
    pool, number = parse_component(end.component_id)
    message = f"worker {number} of pool {pool} died with this job in hand: {end.cause}"
    return describe_error(WorkerCrashedError(message)) | {
        "pool": pool,
        "worker_index": number,
        "cause": end.cause,
        "invocation": end.invocation,
    }


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _change(doc: Doc, wall_ms: int, **fields: object) -> Doc:
    return {**doc, **fields, "updated_wall_ms": wall_ms}
