"""What the supervisor answers, as values: each function makes a typed value of an answer, or an
empty one. The one parser of answers, for the controller and for nomarrctl.

An answer is untrusted. Every text is clean and cut, lists are cut, and what has another type than
docs/contract.md says is left out; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.core.json import JsonError, decode, get_objects
from nomarr_systemd.core.text import clean_all, one_line

Answer = Mapping[str, Any]
MAX_TEXT: Final = 200  # a label, a key, a reason
MAX_JOB: Final = 500
MAX_FRAMES: Final = 4096
MAX_FRAME_TEXT: Final = 4096
_MOST: Final = 100  # texts in a list
_WORD: Final = 40


class LiveWorker(NamedTuple):
    """A worker as the supervisor describes it."""

    component: str
    status: str
    phase: str
    job: str  # as it is, for scripts: the only text here that may not be printable
    invocation: str
    disagreement: str


class JobsOutcome(NamedTuple):
    """What became of the jobs of a dead run that was settled."""

    quarantined: tuple[str, ...]
    refund: tuple[str, ...]
    fail_pool: bool  # not trusted: the plan counts for itself


def parse_workers(answer: Answer) -> dict[str, LiveWorker] | None:
    """The workers of a ``snapshot``, by component; None if it is no snapshot."""
    if not isinstance(answer.get("workers"), list):
        return None
    workers = map(parse_worker, get_objects(answer, "workers"))
    return {each.component: each for each in workers if each.component}


def parse_supervisor(answer: Answer) -> dict[str, int]:
    """What a ``snapshot`` says of the supervisor itself; {} if it says nothing."""
    about = answer.get("supervisor")
    names = ("pid", "since_wall_ms", "notify_failures")
    return {
        name: about[name]
        for name in names
        if isinstance(about, dict) and type(about.get(name)) is int
    }


def parse_worker(doc: Answer) -> LiveWorker:
    """The ``worker`` of an event, or one of a snapshot."""
    return LiveWorker(
        _text(doc.get("component")),
        _text(doc.get("status"), _WORD),
        _text(doc.get("phase"), _WORD),
        _find_job(doc),
        _text(doc.get("invocation")),
        _text(doc.get("disagreement"), _WORD),
    )


def _find_job(doc: Answer) -> str:
    job = doc.get("current_job")
    if isinstance(job, int) and not isinstance(job, bool):
        job = str(job)
    return job[:MAX_JOB] if isinstance(job, str) else ""


def parse_labels(answer: Answer) -> dict[str, str]:
    """The labels of ``labels``, by invocation."""
    labels = answer.get("labels")
    if not isinstance(labels, dict):
        return {}
    return {run: label for run, each in labels.items() if (label := _text(each))}


def parse_label(answer: Answer) -> tuple[str, str]:
    """The label and the job of ``label``."""
    return _text(answer.get("label")), _text(answer.get("job"), MAX_JOB)


def parse_outcomes(answer: Answer) -> dict[str, JobsOutcome]:
    """The outcomes of ``crashed``, by invocation; runs that are not settled yet are left out."""
    outcomes = answer.get("outcomes")
    if not isinstance(outcomes, dict):
        return {}
    return {
        run: JobsOutcome(
            _texts(each.get("quarantined")),
            _texts(each.get("refund")),
            bool(each.get("fail_pool")),
        )
        for run, each in outcomes.items()
        if isinstance(each, dict) and each.get("settled") is True
    }


def parse_frames(answer: Answer) -> list[dict[str, Any]]:
    """The fields of each valid frame of ``blackbox``, oldest first."""
    lines = answer.get("frames")
    found = []
    for line in lines[-MAX_FRAMES:] if isinstance(lines, list) else ():
        if isinstance(line, str) and len(line) <= MAX_FRAME_TEXT:
            try:
                fields = decode(line[len(PREFIX) :])
            except JsonError:
                continue
            if isinstance(fields, dict):
                found.append(clean_all(fields))
    return found


def parse_event(event: Answer) -> dict[str, Any]:
    """An event whose every text is clean."""
    return {one_line(name, _WORD): clean_all(value) for name, value in event.items()}


def _text(value: object, most: int = MAX_TEXT) -> str:
    """A text, or a number as text; empty for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return one_line(value, most) if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(one_line(each, MAX_TEXT) for each in value[:_MOST] if isinstance(each, str))
