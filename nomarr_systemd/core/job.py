"""A job as a document, and every way it changes. Who keeps it, and how, is known elsewhere.

A job is a path in a pool. Its key follows from both, so that the same path is one job however
often it is added; the key is also the order in which jobs are taken.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import check_pool, parse_component
from nomarr_systemd.core.text import escape

Status = Literal["pending", "running", "done", "error", "quarantined"]
CrashPolicy = Literal["restart-fail-in-flight", "restart-requeue-in-flight", "fail-pool"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
Doc = dict[str, Any]

# Ends of a run that are not held against the job in hand, nor against the pool.
STOPPED: Final = "stopped"  # as somebody had asked
REBOOTED: Final = "the machine was started again"
LEFT: Final = "left by itself"  # said so before; whether it failed, the controller knows
UNCOUNTED: Final = (STOPPED, REBOOTED, LEFT)

POOL_FAILED: Final = "its pool failed: "  # how the reason begins that its workers are masked for

MAX_CERTIFICATES: Final = 20
_MAX_PATH: Final = 65_536  # bytes: more than any kernel takes
_SLUG: Final = 48
_MAX_MESSAGE: Final = 2000
_PLAIN = re.compile(r"[^a-z0-9]+")


class WorkerCrashedError(NomarrError):
    """The worker died with the job in its hands."""

    code = "worker-crashed"


class Owner(NamedTuple):
    """Who has a job in hand: a worker, in one run of it, in one boot of one host."""

    component_id: str
    invocation: str
    host: str = ""  # empty where one host has the store for itself
    boot: str = ""


class Certificate(NamedTuple):
    """A worker's death with the job in its hands."""

    component_id: str
    invocation: str
    cause: str
    wall_ms: int


def key_of(pool: str, path: str) -> str:
    """The job's key: readable, in the order of paths as far as it goes, and never two alike."""
    raw = path.encode("utf-8", "surrogateescape")
    slug = _PLAIN.sub("", path.lower())[:_SLUG] or "0"
    digest = hashlib.blake2b(raw, digest_size=12, person=b"nomarr-job").hexdigest()
    return f"{pool}:{slug}:{digest}"


def claim_key(job: str) -> str:
    return f"claim_{job}"


def make_job(pool: str, path: str, wall_ms: int) -> Doc:
    """A new job, or BadName."""
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
    except UnicodeEncodeError:  # a name that is no UTF-8: JSON keeps its bytes, people see this
        doc |= {"path": escape(path), "raw": base64.b64encode(raw).decode()}
    return doc


def path_of(doc: Mapping[str, Any]) -> str:
    """The path as the operating system has it, bytes that are no text included."""
    raw = doc.get("raw")
    if isinstance(raw, str):
        return base64.b64decode(raw).decode("utf-8", "surrogateescape")
    return str(doc["path"])


def begin(doc: Doc, owner: Owner, wall_ms: int) -> Doc:
    """A pending job is taken in hand."""
    return _change(
        doc,
        wall_ms,
        status="running",
        component_id=owner.component_id,
        invocation=owner.invocation,
        started_wall_ms=wall_ms,
        attempts=int(doc.get("attempts", 0)) + 1,
    )


def complete(doc: Doc, result: object, wall_ms: int) -> Doc:
    return _change(doc, wall_ms, status="done", result=result, error=None)


def fail(doc: Doc, error: Mapping[str, Any], wall_ms: int) -> Doc:
    return _change(doc, wall_ms, status="error", error=dict(error))


def requeue(doc: Doc, wall_ms: int) -> Doc:
    """Back to where it was before it was taken, or failed, or was done."""
    return _change(doc, wall_ms, status="pending", component_id=None, invocation=None)


def release(doc: Doc, wall_ms: int) -> Doc:
    """Out of quarantine: its deaths so far stay on record and count no more."""
    return requeue(doc, wall_ms) | {"forgiven": len(doc.get("crashes", ()))}


def is_in_hand(doc: Mapping[str, Any] | None, invocation: str) -> bool:
    """Whether this run has the job."""
    return (
        doc is not None and doc.get("status") == "running" and doc.get("invocation") == invocation
    )


def certificates(doc: Mapping[str, Any]) -> list[Certificate]:
    """The deaths that count against the job."""
    kept = doc.get("crashes") or ()
    return [Certificate(**each) for each in kept[int(doc.get("forgiven", 0)) :]]


def is_certified(doc: Mapping[str, Any] | None, invocation: str) -> bool:
    """Whether this run's death stands in the job's record already."""
    kept = (doc or {}).get("crashes") or ()
    return any(each["invocation"] == invocation for each in kept)


def settle(doc: Doc, death: Certificate, policy: CrashPolicy, max_crashes: int) -> Doc:
    """What becomes of a job whose worker died: failed, back in the queue, or quarantined."""
    changed = fail(doc, describe_crash(death), death.wall_ms)
    if death.cause not in UNCOUNTED:
        crashes = [*(doc.get("crashes") or ()), death._asdict()]
        dropped = max(0, len(crashes) - MAX_CERTIFICATES)
        changed["crashes"] = crashes[dropped:]
        changed["forgiven"] = max(0, int(doc.get("forgiven", 0)) - dropped)
        if len(certificates(changed)) >= max_crashes:
            return changed | {"status": "quarantined"}
    if policy == "restart-requeue-in-flight":
        return requeue(changed, death.wall_ms)
    return changed


def describe_error(error: BaseException) -> Doc:
    """An exception as a job's record keeps it."""
    kind = type(error).__name__
    text = escape(str(error)) or kind  # no half surrogate pair either: JSON has none
    return {"type": kind, "message": text[:_MAX_MESSAGE]}


def describe_crash(death: Certificate) -> Doc:
    """WorkerCrashedError, as a job's record keeps it: pool, worker index and cause."""
    pool, number = parse_component(death.component_id)
    message = f"worker {number} of pool {pool} died with this job in hand: {death.cause}"
    return describe_error(WorkerCrashedError(message)) | {
        "pool": pool,
        "worker_index": number,
        "cause": death.cause,
        "invocation": death.invocation,
    }


def _change(doc: Doc, wall_ms: int, **fields: object) -> Doc:
    return {**doc, **fields, "updated_wall_ms": wall_ms}
