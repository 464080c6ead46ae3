"""A job as it is shown to people. Workers write the work store, so its documents are not trusted:
each field gets its type, is made one printable line and is cut; nothing here raises.
"""

from __future__ import annotations

import binascii
import json
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.job import Doc, path_of
from nomarr_systemd.core.json import get_objects, is_deep
from nomarr_systemd.core.text import one_line

MAX_LONG: Final = 4096  # a path, a message, a result
_MAX_TEXT: Final = 200
_MAX_CRASHES: Final = 20


class Crash(NamedTuple):
    component: str
    cause: str
    invocation: str


class JobView(NamedTuple):
    """One job; a field that the document does not have is empty."""

    key: str
    path: str
    status: str
    attempts: int
    worker: str
    host: str  # where hosts share the store
    updated_ms: int | None
    error: str  # type and message
    message: str
    result: str
    crashes: tuple[Crash, ...]


def view_job(doc: Doc) -> JobView:
    error = doc.get("error")
    message = _text(error.get("message"), MAX_LONG) if isinstance(error, dict) else ""
    whole = f"{_text(error.get('type'))}: {message}" if isinstance(error, dict) else _any(error)
    updated = doc.get("updated_wall_ms")
    attempts = doc.get("attempts")
    return JobView(
        _text(doc.get("_key"), 300),
        _find_path(doc),
        _text(doc.get("status")),
        attempts if isinstance(attempts, int) else 0,
        _text(doc.get("component_id")),
        _text(doc.get("host")),
        updated if isinstance(updated, int) else None,
        whole,
        message,
        _any(doc.get("result")),
        tuple(
            Crash(*(_text(each.get(name)) for name in ("component_id", "cause", "invocation")))
            for each in get_objects(doc, "crashes")[-_MAX_CRASHES:]
        ),
    )


def _find_path(doc: Doc) -> str:
    try:
        return one_line(path_of(doc), MAX_LONG)
    except (KeyError, ValueError, binascii.Error):
        return _text(doc.get("path"), MAX_LONG)


def _text(value: object, most: int = _MAX_TEXT) -> str:
    return one_line(value, most) if isinstance(value, str) else ""


def _any(value: Any) -> str:
    """Return a value of any type, as JSON unless it is a text; null is empty."""
    if value is None:
        return ""
    if is_deep(value):
        return "(nested too deeply to be shown)"
    return one_line(value if isinstance(value, str) else json.dumps(value), MAX_LONG)
