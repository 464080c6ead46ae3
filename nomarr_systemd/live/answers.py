"""What the supervisor answers, as values: each function makes a typed value of an answer, or an
empty one. The one parser of answers, for the controller and for nomarrctl.

An answer is untrusted. Every text is clean and cut, lists are cut, and what has another type than
docs/contract.md says is left out; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.core.json import JsonError, decode, get_objects
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import clean_all, one_line

Answer = Mapping[str, Any]
MAX_TEXT: Final = 200  # a label, a key, a reason
MAX_JOB: Final = 500
MAX_FRAMES: Final = 4096
MAX_FRAME_TEXT: Final = 4096
_MOST: Final = 100  # texts in a list
_WORD: Final = 40
_LONGEST_S: Final = 1e9
_LATEST_MS: Final = 1 << 50
_LARGEST: Final = 1e15
MAX_NOTE: Final = 200


class LiveWorker(NamedTuple):
    """A worker as the supervisor describes it."""

    component: str
    status: str
    phase: str
    job: str  # as it is, for scripts: the only text here that may not be printable
    invocation: str
    disagreement: str
    progress_age_s: float | None = None
    frame_age_s: float | None = None  # since the last frame
    metrics: Mapping[str, float] = MappingProxyType({})  # of that frame
    note: str = ""  # why it is not healthy, in its own words


class RunSaid(NamedTuple):
    """What the supervisor knows of one run."""

    label: str = ""  # why the supervisor ended it; empty if it did not
    job: str = ""
    bad_line: str = ""  # the last line on its pipe that was no frame, and what is wrong with it


class JobsOutcome(NamedTuple):
    """What became of the jobs of a dead run that was settled."""

    quarantined: tuple[str, ...]
    refund: tuple[str, ...]
    fail_pool: bool  # not trusted: the plan counts crashes itself
    failed: tuple[str, ...] = ()


def parse_workers(answer: Answer) -> dict[str, LiveWorker] | None:
    """Return the workers of a ``snapshot``, by component; None if it is no snapshot."""
    if not isinstance(answer.get("workers"), list):
        return None
    workers = map(parse_worker, get_objects(answer, "workers"))
    return {each.component: each for each in workers if each.component}


def parse_supervisor(answer: Answer) -> dict[str, int]:
    """Return what a ``snapshot`` says of the supervisor itself; {} if it says nothing."""
    about = answer.get("supervisor")
    names = ("pid", "since_wall_ms", "notify_failures", "stored_pipes")
    return {
        name: about[name]
        for name in names
        if isinstance(about, dict) and type(about.get(name)) is int
    }


def parse_worker(doc: Answer) -> LiveWorker:
    """Return the ``worker`` of an event, or one of a snapshot."""
    return LiveWorker(
        _text(doc.get("component")),
        _text(doc.get("status"), _WORD),
        _text(doc.get("phase"), _WORD),
        _find_job(doc),
        _text(doc.get("invocation")),
        _text(doc.get("disagreement"), _WORD),
        _seconds(doc.get("progress_age_s")),
        _seconds(doc.get("frame_age_s")),
        _find_metrics(doc),
        _text(doc.get("note"), MAX_NOTE),
    )


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _LONGEST_S else None  # type: ignore[arg-type,operator]


def _number(value: object) -> float | None:
    """Return a number that JSON and people can read."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None  # also NaN
    return value


def _find_metrics(doc: Answer) -> Mapping[str, float]:
    metrics = doc.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    numbers = ((one_line(str(name), _WORD), _number(each)) for name, each in metrics.items())
    return {name: number for name, number in islice(numbers, _MOST) if number is not None}


def _find_job(doc: Answer) -> str:
    job = doc.get("current_job")
    if isinstance(job, int) and not isinstance(job, bool):
        job = str(job)
    return job[:MAX_JOB] if isinstance(job, str) else ""


def parse_labels(answer: Answer) -> dict[str, str]:
    """Return the labels of ``labels``, by invocation."""
    labels = answer.get("labels")
    if not isinstance(labels, dict):
        return {}
    return {run: label for run, each in labels.items() if (label := _text(each))}


def parse_run(answer: Answer) -> RunSaid:
    """Return the answer to ``label``."""
    return RunSaid(
        _text(answer.get("label")),
        _text(answer.get("job"), MAX_JOB),
        _text(answer.get("bad_line"), MAX_JOB),
    )


def parse_outcomes(answer: Answer) -> dict[str, JobsOutcome]:
    """Return the outcomes of ``crashed``, by invocation; runs that are not settled yet are left
    out."""
    outcomes = answer.get("outcomes")
    if not isinstance(outcomes, dict):
        return {}
    return {
        run: JobsOutcome(
            _texts(each.get("quarantined")),
            _texts(each.get("refund")),
            bool(each.get("fail_pool")),
            _texts(each.get("failed")),
        )
        for run, each in outcomes.items()
        if isinstance(each, dict) and each.get("settled") is True
    }


def parse_frames(answer: Answer) -> list[dict[str, Any]]:
    """Return the fields of each valid frame of ``blackbox``, oldest first, with ``received_ms`` if
    that is known, and with the ``invocation`` that the supervisor saw if the worker named none."""
    lines, received = (
        value if isinstance(value := answer.get(name), list) else []
        for name in ("frames", "received")
    )
    found = []
    if len(lines) != len(received):
        received = [None] * len(lines)  # an older supervisor
    for line, seen in list(zip(lines, received, strict=True))[-MAX_FRAMES:]:
        if isinstance(line, str) and len(line) <= MAX_FRAME_TEXT:
            try:
                fields = decode(line[len(PREFIX) :])
            except JsonError:
                continue
            if isinstance(fields, dict):
                found.append(clean_all(fields) | _stamp(seen, fields.get("invocation")))
    return found


def _stamp(seen: object, invocation: object) -> dict[str, Any]:
    stamp: dict[str, Any] = {}
    if isinstance(seen, dict):
        if isinstance(at_ms := seen.get("at_ms"), int) and 0 <= at_ms < _LATEST_MS:
            stamp["received_ms"] = at_ms
        if not invocation and (run := _text(seen.get("invocation"))):
            stamp["invocation"] = run
    return stamp


def parse_event(event: Answer) -> dict[str, Any]:
    """Return an event whose every text is clean."""
    return {one_line(name, _WORD): clean_all(value) for name, value in event.items()}


def _text(value: object, most: int = MAX_TEXT) -> str:
    """Return a text, or a number as text; empty for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return one_line(value, most) if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(one_line(each, MAX_TEXT) for each in value[:_MOST] if isinstance(each, str))
