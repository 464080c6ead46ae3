"""Health frames, ``HEALTH|{json}\\n`` (docs/contract.md): decoding with counted drops, encoding.

The decoder takes any bytes in any pieces, keeps at most one frame's length, and never raises.
Reading the pipe is in supervisor/pipes, the meaning of a frame for health in core/health.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.decoder import JSONDecoder
from math import isfinite
from types import NoneType
from typing import Any, Final

from nomarr_systemd.core.health import Event
from nomarr_systemd.core.json import MAX_DEPTH, is_deep, refuse

MAX_FRAME: Final = 4096  # with the newline: the longest write that is atomic on a pipe
PREFIX: Final = b"HEALTH|"

# The event of each status; all frames of a status share it.
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

# Why a line was dropped, counted by kind. A dropped line does not end a silence.
DROPS: Final[Mapping[str, str]] = {
    "prefix": "does not begin with HEALTH|",
    "length": "longer than 4095 bytes",
    "encoding": "not UTF-8",
    "json": "not one JSON object",
    "component": "its component_id is another worker's",
    "status": "without a status that is known",
    "field": "a field has the wrong type",
    "cut": "cut off: no newline at its end",
}
_MAX_SHOWN: Final = 120  # bytes of a dropped line

# The optional fields that have a type; all others are the worker's own and not checked. A float has
# to be finite, too, which _judge finds out; only that of most frames is listed here.
_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "phase": frozenset((str, NoneType)),
    "job": frozenset((str, int, NoneType)),
    "seq": frozenset((int, NoneType)),
    "pid": frozenset((int, NoneType)),
    "invocation": frozenset((str, NoneType)),
    "progress_age_s": frozenset((int, float, NoneType)),
    "recover_for_s": frozenset((int, NoneType)),  # and a float
    "metrics": frozenset((NoneType,)),  # and an object
    "note": frozenset((str, NoneType)),
}
_SCALARS: Final = frozenset((str, int, bool, NoneType))
_types_of: Final = _TYPES.get  # bound once: it is called for each field of each frame


class Frame:
    """One valid frame, not changed after it was made: the health machine's event, the line, the
    invocation that it names (empty: none), the age of progress (0: not said), and all its fields.
    A decoder sets them one by one: a constructor would take as long again.
    """

    __slots__ = ("_fields", "event", "invocation", "line", "progress_age_s")
    _fields: Mapping[str, Any]
    event: Event
    invocation: str
    line: bytes
    progress_age_s: float

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields, known and unknown. Few frames are asked for them, so they are not kept, but
        parsed again for the first reader."""
        try:
            return self._fields
        except AttributeError:
            self._fields = json.loads(self.line[len(PREFIX) :])
            return self._fields


# The scanner behind json.loads, without its two searches for white space at every call. A function
# of ours for floats, as in core/json, would cost more than looking at those that came.
_scan: Callable[[str, int], tuple[Any, int]] = JSONDecoder(parse_constant=refuse).scan_once  # type: ignore[attr-defined]


class Decoder:
    """Decodes one worker's pipe. ``drops`` counts dropped lines by kind since the start."""

    __slots__ = ("_component_id", "_rest", "_skipping", "dropped", "drops")

    def __init__(self, component_id: str) -> None:
        self._component_id = component_id
        self._rest = b""
        self._skipping = False  # inside a line that is already too long
        self.drops: dict[str, int] = {}
        self.dropped: tuple[str, bytes] | None = None  # the last one: its kind and its beginning

    def describe_dropped(self) -> str:
        """The last dropped line, and what is wrong with it; empty if there was none."""
        if self.dropped is None:
            return ""
        kind, line = self.dropped
        return f"{line.decode(errors='replace')} ({DROPS[kind]})"

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that are complete now."""
        if self._rest or self._skipping:
            chunk = self._rest + chunk
            self._rest = b""
        elif chunk.find(b"\n") == len(chunk) - 1 >= 0:  # one whole line, as mostly
            frame = self._parse(chunk[:-1])
            return [] if frame is None else [frame]
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if rest and not self._skipping:
            if len(rest) < MAX_FRAME:
                self._rest = rest
            else:
                self._drop("length", rest)
                self._skipping = True
        frames = []
        for line in lines:
            frame = self._parse(line)
            if frame is not None:
                frames.append(frame)
        return frames

    def finish(self) -> None:
        """The pipe has ended: drop an incomplete line."""
        if self._rest:
            self._drop("cut", self._rest)
        self._rest = b""
        self._skipping = False

    def _parse(self, line: bytes) -> Frame | None:
        """The frame of a line; None, and counted, if it is not valid."""
        if len(line) >= MAX_FRAME:
            return self._drop("length", line)
        if not line.startswith(PREFIX):
            return self._drop("prefix", line)
        try:
            text = line.decode()
        except UnicodeDecodeError:
            return self._drop("encoding", line)
        try:
            fields, end = _scan(text, len(PREFIX))
        except (ValueError, StopIteration, RecursionError):
            return self._drop("json", line)
        if type(fields) is not dict or (end < len(text) and text[end:].strip(" \t\r")):
            return self._drop("json", line)
        if fields.get("component_id") != self._component_id:
            return self._drop("component", line)
        status = fields.get("status")
        if status is None:
            phase = fields.get("phase")
            status = STATUS_OF_PHASE.get(phase) if type(phase) is str else None
        event = EVENTS.get(status) if type(status) is str else None
        if event is None:
            return self._drop("status", line)
        for name, value in fields.items():
            if type(value) not in _types_of(name, _SCALARS) and (fault := _judge(name, value)):
                return self._drop(fault, line)
        progress_age_s = fields.get("progress_age_s") or 0.0
        if progress_age_s - progress_age_s:  # not finite
            return self._drop("json", line)
        if "\\u" in text and not _is_text(fields):
            return self._drop("encoding", line)
        if status == "recovering":
            event = Event("recovering", fields.get("recover_for_s"))
        frame = Frame()
        frame.event = event
        frame.line = line
        frame.invocation = fields.get("invocation") or ""
        frame.progress_age_s = progress_age_s
        return frame

    def _drop(self, kind: str, line: bytes) -> Frame | None:
        self.drops[kind] = self.drops.get(kind, 0) + 1
        self.dropped = (kind, line[:_MAX_SHOWN])
        return None


def _judge(name: str, value: object) -> str:
    """Why a float, a list, an object or a value of a wrong type is refused; empty if it is not."""
    if type(value) is float and (name not in _TYPES or name == "recover_for_s"):
        return "" if isfinite(value) else "json"
    if name in _TYPES and (name != "metrics" or type(value) is not dict):
        return "field"
    return "json" if is_deep(value, MAX_DEPTH - 1) or not _is_finite(value) else ""


def _is_finite(value: object) -> bool:
    """False if a float in it is infinite (as 1e999, which is valid JSON), or if it is no JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _is_text(fields: dict[str, Any]) -> bool:
    """False if an escape makes a lone surrogate, which cannot be printed."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(component_id: str, status: str, **fields: object) -> bytes:
    """A frame's bytes, with the newline and never longer than MAX_FRAME.

    If it is too long, it leaves out the worker's own fields, metrics, note, then the beginning of
    the job. A value that is not JSON or has a wrong type is left out, too: a frame with less
    content is better than one that the supervisor drops.
    """
    if len(component_id) > 200:
        raise ValueError(f"{component_id[:40]!r}… is no component id")
    if status not in EVENTS:
        raise ValueError(f"{status!r} is no status; say one of {', '.join(EVENTS)}")
    required = {"component_id": component_id, "status": status}
    last = {name: fields.pop(name) for name in ("seq", "progress_age_s") if name in fields}
    said = {name: value for name, value in (fields | last).items() if _is_sendable(name, value)}
    dispensable = [name for name in said if name not in _TYPES]
    for name in (*dispensable, "metrics", "note"):
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
    # A file name that is not UTF-8 has lone surrogates in Python: each becomes "?".
    return PREFIX + text.encode(errors="replace") + b"\n"


def _is_sendable(name: str, value: object) -> bool:
    if type(value) not in _types_of(name, _SCALARS) and _judge(name, value):
        return False
    return value is not None and _is_finite(value)
