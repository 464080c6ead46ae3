"""Health frames, ``HEALTH|{json}\\n`` (docs/contract.md): decoding with counted drops, encoding.

The decoder takes any bytes in any pieces, keeps at most one frame's length, and never raises.
Reading the pipe is in supervisor/pipes, the meaning of a frame for health in core/health.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from json.decoder import JSONDecoder
from math import isfinite
from types import NoneType
from typing import Any, Final, Protocol

from nomarr_systemd.core.health import Event
from nomarr_systemd.core.json import MAX_DEPTH, is_deep, refuse

MAX_FRAME: Final = 4096  # with the newline: the longest write that is atomic on a pipe
PREFIX: Final = b"HEALTH|"

STATUSES: Final = ("pending", "healthy", "unhealthy", "recovering", "stopping")
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
_TOO_LONG: Final = b"\n"  # kept instead of the beginning of such a line, until it ends

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


class Frame(Event, Protocol):
    """One valid frame. It is an event of the health machine, by its status, with its line, the
    invocation that it names (empty: none) and the age of progress (0: not said)."""

    @property
    def line(self) -> bytes: ...

    @property
    def invocation(self) -> str: ...

    @property
    def progress_age_s(self) -> float: ...


class _Frame:
    """A decoder sets its attributes one by one: a constructor would take as long again."""

    __slots__ = ("invocation", "kind", "line", "progress_age_s", "recover_for_s")
    invocation: str
    kind: str
    line: bytes
    progress_age_s: float
    recover_for_s: float | None


def parse_fields(line: bytes) -> dict[str, Any]:
    """All fields of a frame, known and unknown, from its line. Few frames are asked for them."""
    fields: dict[str, Any] = json.loads(line[len(PREFIX) :])
    return fields


# The scanner behind json.loads, without its two searches for white space at every call. A function
# of ours for floats, as in core/json, would cost more than looking at those that came.
_scan: Callable[[str, int], tuple[Any, int]] = JSONDecoder(parse_constant=refuse).scan_once  # type: ignore[attr-defined]


class Decoder:
    """Decodes one worker's pipe. ``drops`` counts dropped lines by kind since the start."""

    __slots__ = ("_component_id", "_rest", "dropped", "drops")

    def __init__(self, component_id: str) -> None:
        self._component_id = component_id
        self._rest = b""  # the beginning of a line that is not complete yet
        self.drops: dict[str, int] = {}
        self.dropped: tuple[str, bytes] | None = None  # the last one: its kind and its beginning

    def describe_dropped(self) -> str:
        """The last dropped line, and what is wrong with it; empty if there was none."""
        if self.dropped is None:
            return ""
        kind, line = self.dropped
        return f"{line.decode(errors='replace')} ({DROPS[kind]})"

    def feed(self, chunk: bytes) -> Sequence[Frame]:
        """The frames that are complete now."""
        line, newline, more = chunk.partition(b"\n")
        if more or not newline or self._rest:
            return [frame for frame in map(self._parse, self._split(chunk)) if frame]
        frame = self._parse(line)  # one whole line, as mostly
        return (frame,) if frame else ()

    def finish(self) -> None:
        """The pipe has ended: drop an incomplete line."""
        if self._rest not in (b"", _TOO_LONG):
            self._drop("cut", self._rest)
        self._rest = b""

    def _split(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete now."""
        if self._rest == _TOO_LONG:
            _, newline, chunk = chunk.partition(b"\n")
            if not newline:
                return []
            self._rest = b""
        *lines, rest = (self._rest + chunk).split(b"\n")
        if len(rest) >= MAX_FRAME:
            self._drop("length", rest)
            rest = _TOO_LONG
        self._rest = rest
        return lines

    def _parse(self, line: bytes) -> Frame | None:
        """The frame of a line; None, and counted, if it is not valid."""
        if len(line) >= MAX_FRAME:
            return self._drop("length", line)
        if not line.startswith(PREFIX):
            return self._drop("prefix", line)
        try:
            text = line[len(PREFIX) :].strip(b" \t\r").decode()
        except UnicodeDecodeError:
            return self._drop("encoding", line)
        try:
            fields, end = _scan(text, 0)
        except (ValueError, StopIteration, RecursionError):
            return self._drop("json", line)
        if type(fields) is not dict or end != len(text):
            return self._drop("json", line)
        if fields.get("component_id") != self._component_id:
            return self._drop("component", line)
        status = fields.get("status")
        if status is None:
            phase = fields.get("phase")
            status = STATUS_OF_PHASE.get(phase) if type(phase) is str else None
        if type(status) is not str or status not in STATUSES:
            return self._drop("status", line)
        for name, value in fields.items():
            if type(value) not in _types_of(name, _SCALARS) and (fault := _judge(name, value)):
                return self._drop(fault, line)
        progress_age_s = fields.get("progress_age_s") or 0.0
        if progress_age_s - progress_age_s:  # not finite
            return self._drop("json", line)
        if "\\u" in text and not _is_text(fields):
            return self._drop("encoding", line)
        frame = _Frame()
        frame.kind = status
        frame.recover_for_s = fields.get("recover_for_s")
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
    if status not in STATUSES:
        raise ValueError(f"{status!r} is no status; say one of {', '.join(STATUSES)}")
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
