"""A job as a document, and every change of it; pure. Reading and writing documents is in jobs/.

A job is a path in a pool. Its key is derived from both, so the same path is one job however often
it is added. Workers take jobs in the order of keys.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import check_pool, parse_component
from nomarr_systemd.core.named_tuple import NamedTuple
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
        """Return the Outcome as the pool's books and ``settled`` events have it."""
        return self._asdict() | {"settled": [each._asdict() for each in self.settled]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Outcome:
        """Make an Outcome of what ``to_dict`` returned, also after a round through JSON."""
        fields = {name: _freeze(record[name]) for name in cls._fields if name in record}
        fields["settled"] = tuple(Settled(**each) for each in record["settled"])
        return cls(**fields)


def key_of(pool: str, path: str) -> str:
    """Return the job's key: readable, ordered as the path as far as that is possible, and
    unique."""
    import hashlib  # slow to import, and the controller does not need it

    raw = path.encode("utf-8", "surrogateescape")
    slug = _PLAIN.sub("", path.lower())[:_SLUG] or "0"
    digest = hashlib.blake2b(raw, digest_size=12, person=b"nomarr-job").hexdigest()
    return f"{pool}:{slug}:{digest}"


def describe_quarantine(key: str) -> str:
    """Return the reason of a refund, for people and for ``find_quarantined``."""
    return f"job {key} was quarantined"


def describe_failed(key: str) -> str:
    """Return the reason of a refund for a job that was not quarantined; see ``find_failed``."""
    return f"job {key} failed for it"


def find_quarantined(text: str) -> str:
    """Return the key of the quarantined job in the reason of a refund; empty if there is none."""
    return _find_key(_QUARANTINED, text)


def find_failed(text: str) -> str:
    """Return the key of the failed job in the reason of a refund; empty if there is none."""
    return _find_key(_FAILED, text)


def _find_key(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.match(text)
    return found[1] if found and _KEY.fullmatch(found[1]) else ""


def release_command(key: str) -> str:
    """Return the command that ends a quarantine; empty unless ``key`` is a job's: a person may
    paste it into a shell, and the key may come from a program that is not trusted."""
    return f"nomarrctl jobs quarantine release {key}" if _KEY.fullmatch(key) else ""


def retry_command(key: str) -> str:
    """Return the command that has a failed job tried again; empty as for ``release_command``."""
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
    """Return the path as the operating system knows it; bytes that are not UTF-8 as surrogates."""
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
    """Make a job pending again that was claimed and not begun: the attempt is not counted."""
    return requeue(doc, wall_ms) | {"attempts": max(0, int(doc.get("attempts", 1)) - 1)}


def release(doc: Doc, wall_ms: int) -> Doc:
    """End the quarantine: earlier crashes stay on record and are no longer counted."""
    crashes = doc.get("crashes")
    return requeue(doc, wall_ms) | {"forgiven": len(crashes) if isinstance(crashes, list) else 0}


def is_in_hand(doc: Mapping[str, Any] | None, invocation: str) -> bool:
    """Return True if this run has the job in hand."""
    return (
        doc is not None and doc.get("status") == "running" and doc.get("invocation") == invocation
    )


def crashes_of(doc: Mapping[str, Any]) -> list[RunEnd]:
    """Return the crashes that are counted against the job."""
    kept = doc.get("crashes") or ()
    return [RunEnd(**each) for each in kept[int(doc.get("forgiven", 0)) :]]


def has_crash(doc: Mapping[str, Any], invocation: str) -> bool:
    """Return True if the job's record has the crash of this run already."""
    return any(each["invocation"] == invocation for each in doc.get("crashes") or ())


def describe_error(error: BaseException) -> Doc:
    """Return an exception in the form of a job's record."""
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
