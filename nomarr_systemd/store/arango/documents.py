"""Checks of documents that are sent to ArangoDB and read from it: BadDocument if the server would
alter one; ValueError, TypeError or LookupError if an answer does not have the expected shape.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from nomarr_systemd.core.errors import BadDocument
from nomarr_systemd.core.text import clean
from nomarr_systemd.store.protocol import MAX_DEPTH, Doc, check_key, encode

REV: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def to_body(doc: Doc) -> dict[str, Any]:
    """Return the document's own fields, as decoding its JSON returns them."""
    body: dict[str, Any] = json.loads(encode(doc))
    check_values([body], doc.get("_key"))
    return body


def check_values(values: list[Any], name: object) -> None:
    """Refuse what the server would alter or reject: integers beyond 64 bits, deep nesting."""
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise BadDocument(f"{name!r:.80}: {value!r:.80} does not fit into 64 bits")
        if not inner:
            return
        values = inner
    raise BadDocument(f"{name!r:.80} is nested deeper than {MAX_DEPTH} levels")


def check_document(doc: Any, key: str | None = None) -> Doc:
    """Return the document without its ``_id``; ValueError if it is none, or has another key."""
    if not isinstance(doc, dict) or (key is not None and doc.get("_key") != key):
        raise ValueError("this is no document, or it has another key")
    try:
        check_key(doc.get("_key"))
    except BadDocument as error:
        raise ValueError("this is no key") from error
    read_rev(doc)
    doc.pop("_id", None)
    return doc


def read_rev(doc: Any) -> str:
    rev = doc["_rev"]
    if not isinstance(rev, str) or not REV.fullmatch(rev):
        raise ValueError("this is no revision")
    return rev


def read_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("this is no number of documents")
    return value


def read_details(done: Any) -> str:
    return clean(str(done.get("details")), 200)
