"""Health frames, ``HEALTH|{json}\\n``: bytes into frames and counted drops, and back into bytes.

The decoder takes any bytes in any pieces, keeps at most one frame's length, and never raises.
Who reads the pipe, and what a frame means for health, is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from json.decoder import JSONDecoder
from types import NoneType
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.health import Event

MAX_FRAME: Final = 4096  # with the newline: what a pipe takes in one piece
PREFIX: Final = b"HEALTH|"

# The status words, each as the one event that all its frames share.
EVENTS: Final[Mapping[str, Event]] = {
    word: Event(word) for word in ("pending", "healthy", "unhealthy", "recovering", "stopping")
}
STATUS_OF_PHASE: Final[Mapping[str, str]] = {
    "initializing": "pending",
    "loading_models": "pending",
    "idle": "healthy",
    "processing": "healthy",
    "backing_off": "unhealthy",
    "stopping": "stopping",
}

# Why a line was dropped. Each is counted on its own; all of them are silence.
DROPS: Final = ("prefix", "length", "encoding", "json", "component", "status", "field", "cut")

# The optional fields that have a type; all others are the worker's own business.
_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "phase": frozenset((str, NoneType)),
    "job": frozenset((str, int, NoneType)),
    "seq": frozenset((int, NoneType)),
    "pid": frozenset((int, NoneType)),
    "invocation": frozenset((str, NoneType)),
    "progress_age_s": frozenset((int, float, NoneType)),
    "recover_for_s": frozenset((int, float, NoneType)),
    "metrics": frozenset((dict, NoneType)),
}


class Frame(NamedTuple):
    """One valid frame: the event for the health machine, and its line for the black box."""

    event: Event
    line: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """All it said, known and unknown. Parsed anew: most frames are never asked."""
        fields: dict[str, Any] = json.loads(self.line[len(PREFIX) :])
        return fields


def _refuse(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:  # 1e999 is JSON, but no quantity
        raise ValueError(text)
    return value


# The scanner behind json.loads, without its two searches for white space at every call.
_scan: Callable[[str, int], tuple[Any, int]] = JSONDecoder(  # type: ignore[attr-defined]
    parse_float=_finite, parse_constant=_refuse
).scan_once

# From one frame to the next a worker changes its job, its count and the age of its progress, and
# little else. A line that differs from the last valid one only in these is valid too, and need not
# be taken apart: one text without escapes for another, one number for another. (Nothing inside a
# JSON text looks like the marks below, its quotes being escaped, and inside a nested object more
# than one brace would have to follow the numbers.)
_JOB: Final = b'"job":"'
_SEQ: Final = b',"seq":'
_match_job = re.compile(rb'[ !#-\[\]-~]*"').match
_match_tail = re.compile(
    rb'(?:0|[1-9][0-9]{0,17})(?:,"progress_age_s":(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,9})?)?\}'
).fullmatch


class Decoder:
    """Takes one worker's pipe apart. ``drops`` counts refused lines by kind, for life."""

    __slots__ = ("_component_id", "_event", "_head", "_middle", "_rest", "_skipping", "drops")

    def __init__(self, component_id: str) -> None:
        self._component_id = component_id
        self._rest = b""
        self._skipping = False  # inside a line that is already too long
        # The last valid line: up to its job, from there up to its count, and the event it was.
        self._head = self._middle = b""
        self._event = EVENTS["pending"]
        self.drops: dict[str, int] = {}

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that are complete now."""
        if self._rest or self._skipping:
            chunk = self._rest + chunk
            self._rest = b""
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if rest and not self._skipping:
            if len(rest) < MAX_FRAME:
                self._rest = rest
            else:
                self._drop("length")
                self._skipping = True
        frames = []
        for line in lines:
            event = self._event if self._is_alike(line) else self._parse(line)
            if event is not None:
                frames.append(Frame(event, line))
        return frames

    def finish(self) -> None:
        """The pipe has ended: what is left of a line will never be one."""
        if self._rest:
            self._drop("cut")
        self._rest = b""
        self._skipping = False

    def _is_alike(self, line: bytes) -> bool:
        """Whether a line differs from the last valid one only where that makes no difference."""
        head = self._head
        if not head or not line.startswith(head) or len(line) >= MAX_FRAME:
            return False
        place = len(head)
        if self._middle:
            job = _match_job(line, place)
            if job is None or not line.startswith(self._middle, job.end()):
                return False
            place = job.end() + len(self._middle)
        return _match_tail(line, place) is not None

    def _remember(self, line: bytes, event: Event) -> None:
        stem, mark, tail = line.rpartition(_SEQ)
        self._head = self._middle = b""
        # An age before the count would count again in a line that has none behind it.
        if mark and _match_tail(tail) and b'"progress_age_s"' not in stem:
            self._event = event
            self._head = stem + mark
            before, mark, rest = self._head.partition(_JOB)
            job = _match_job(rest) if mark else None
            if job is not None:
                self._head, self._middle = before + mark, rest[job.end() :]

    def _parse(self, line: bytes) -> Event | None:
        """The event that a line is; a line that is none is counted."""
        if len(line) >= MAX_FRAME:
            return self._drop("length")
        if not line.startswith(PREFIX):
            return self._drop("prefix")
        try:
            text = line.decode()
        except UnicodeDecodeError:
            return self._drop("encoding")
        try:
            fields, end = _scan(text, len(PREFIX))
        except (ValueError, StopIteration, RecursionError):
            return self._drop("json")
        if type(fields) is not dict or (end < len(text) and text[end:].strip(" \t\r")):
            return self._drop("json")
        if "\\u" in text and not _is_text(fields):
            return self._drop("encoding")
        if fields.get("component_id") != self._component_id:
            return self._drop("component")
        status = fields.get("status")
        if status is None:
            phase = fields.get("phase")
            status = STATUS_OF_PHASE.get(phase) if type(phase) is str else None
        event = EVENTS.get(status) if type(status) is str else None
        if event is None:
            return self._drop("status")
        for name, value in fields.items():
            types = _TYPES.get(name)
            if types is not None and type(value) not in types:
                return self._drop("field")
        if status == "recovering":
            event = Event("recovering", fields.get("recover_for_s"))
        self._remember(line, event)
        return event

    def _drop(self, kind: str) -> Event | None:
        self.drops[kind] = self.drops.get(kind, 0) + 1
        return None


def _is_text(fields: dict[str, Any]) -> bool:
    """False for escapes that make half a surrogate pair: no text, and fatal to whoever prints."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def encode(component_id: str, status: str, **fields: object) -> bytes:
    """A frame's bytes, with the newline and never longer than MAX_FRAME.

    What does not fit is left out: the worker's own fields, then metrics, then the beginning of a
    long job. So is a value that is no JSON or of a wrong type: a frame that says less beats one
    that is dropped.
    """
    if len(component_id) > 200:
        raise ValueError(f"{component_id[:40]!r}… is no component id")
    if status not in EVENTS:
        raise ValueError(f"{status!r} is no status; say one of {', '.join(EVENTS)}")
    required = {"component_id": component_id, "status": status}
    last = {name: fields.pop(name) for name in ("seq", "progress_age_s") if name in fields}
    said = {name: value for name, value in (fields | last).items() if _is_sendable(name, value)}
    dispensable = [name for name in said if name not in _TYPES]
    for name in (*dispensable, "metrics"):
        if len(line := _write(required | said)) <= MAX_FRAME:
            return line
        said.pop(name, None)
    while len(line := _write(required | said)) > MAX_FRAME:
        job = said.get("job")
        if not isinstance(job, str) or len(job) < 16:
            return _write(required)
        said["job"] = "…" + job[len(job) // 2 :]
    return line


def _write(fields: Mapping[str, object]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    # A file name that is no UTF-8 reaches Python as half surrogate pairs: "?" stands for those.
    return PREFIX + text.encode(errors="replace") + b"\n"


def _is_sendable(name: str, value: object) -> bool:
    if type(value) not in _TYPES.get(name, {type(value)}):
        return False
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return value is not None
