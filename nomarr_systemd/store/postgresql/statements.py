"""The SQL of the store: tables and indexes, conditions and order, and documents as ``json``.

A collection is a table of key, revision and body. The type ``json`` keeps the body's text as it
was written; ``jsonb`` would alter numbers. Nothing is sent here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from nomarr_systemd.store.protocol import (
    DOMAINS,
    Doc,
    Domain,
    Equal,
    check_field,
    check_key,
    check_where,
    decode,
    encode,
)

VERSION: Final = 1
SCHEMAS: Final[dict[Domain, str]] = {"policy": "nomarr_policy", "work": "nomarr_work"}
LOCK: Final = 0x6E6F6D72  # "nomr": the advisory lock of the session that makes the schema
REV: Final = re.compile(r"[0-9a-f]{16}")

# The body with some fields left out, and those of another one added.
CHANGED_BODY: Final = (
    "(SELECT json_object_agg(key, value) FROM (SELECT key, value FROM json_each(body)"
    " WHERE NOT key = ANY(%s) UNION ALL SELECT key, value FROM json_each(%s::json)) AS field)"
)
NEW_REV: Final = "left(replace(gen_random_uuid()::text, '-', ''), 16)"

# The server cannot look into a body that has the escape of NUL in it. So that escape is kept as
# MARK and 0, and MARK itself, a private character, as MARK and 1.
_MARK: Final = "\ue000"
_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_MARKED: Final = re.compile(f"{_MARK}([01])")


def to_body(doc: Doc) -> str:
    """Return the document's own fields as the server keeps them."""
    return _mark(encode(doc))


def read_row(row: tuple[Any, ...]) -> Doc:
    """Return the document of a row; ValueError or TypeError if the row has another shape."""
    key, rev, body = row
    if not (isinstance(rev, str) and REV.fullmatch(rev) and isinstance(body, str)):
        raise ValueError("this is no document")
    return {**decode(read_body(body)), "_key": check_key(key), "_rev": rev}


def read_body(body: str) -> str:
    """Return a body's JSON as it was written."""
    if _MARK not in body:
        return body
    return _MARKED.sub(lambda found: "\\u0000" if found[1] == "0" else _MARK, body)


def table(domain: Domain, collection: str) -> str:
    return f"{SCHEMAS[domain]}.{collection}"


def make_schema(domain: Domain) -> Iterator[str]:
    """Yield the statements that make the tables that are missing."""
    about = f"{SCHEMAS[domain]}.about"
    yield f"CREATE TABLE IF NOT EXISTS {about} (version integer NOT NULL)"
    yield f"INSERT INTO {about} SELECT {VERSION} WHERE NOT EXISTS (SELECT FROM {about})"
    for name, _ in DOMAINS[domain]:
        yield (
            f'CREATE TABLE IF NOT EXISTS {table(domain, name)} (key text COLLATE "C" PRIMARY KEY,'
            " rev text NOT NULL, body json NOT NULL)"
        )


def make_indexes(domain: Domain) -> dict[str, str]:
    """Return the statements that make the indexes, by the indexes' names."""
    made = {}
    for name, indexes in DOMAINS[domain]:
        for fields in indexes:
            index = f"{name}_by_{'_'.join(fields)}"
            columns = ", ".join(f"{_indexed(field)} NULLS FIRST" for field in fields)
            made[index] = (
                f"CREATE INDEX IF NOT EXISTS {index} ON {table(domain, name)} ({columns}, key)"
            )
    return made


def where(equal: Equal | None, after: str | None = None) -> tuple[str, list[object]]:
    """Return the WHERE clause and its values."""
    conditions: list[str] = []
    values: list[object] = []
    for field, value in check_where(equal).items():
        if field == "_key":
            conditions.append("key = %s" if isinstance(value, str) else "FALSE")
            compared: list[object] = [value] if isinstance(value, str) else []
        elif value is None:
            conditions.append(f"coalesce({_text(field)}, 'null') = 'null'")
            compared = []
        elif isinstance(value, int):
            conditions.append(f"{_number(field)} = %s")
            compared = [value]
        else:
            conditions.append(f"{_text(field)} = %s")
            compared = [_mark(json.dumps(value, ensure_ascii=False))]
        values += compared
    if after is not None:
        conditions.append("key > %s")
        values.append(after)
    return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), values


def order_by(field: str, *, descending: bool) -> str:
    """Numbers before texts, nothing before both; then by key."""
    direction, nothing = ("DESC", "LAST") if descending else ("ASC", "FIRST")
    columns: list[str] = []
    if check_field(field) != "_key":
        columns = [_number(field)] if _is_number(field) else [_number(field), _text(field)]
    ordered = [f"{column} {direction} NULLS {nothing}" for column in columns]
    return " ORDER BY " + ", ".join([*ordered, f"key {direction}"])


def below(field: str) -> str:
    """Return the condition that a field is a number below a value; empty for the key, which
    is a text."""
    return f"{_number(field)} < %s" if check_field(field) != "_key" else ""


def counted_by(field: str) -> str:
    return "key" if check_field(field) == "_key" else _text(field)


def read_text(value: object) -> str | None:
    """Return the text in a field's JSON; None if it is no text."""
    if not isinstance(value, str) or not value.startswith('"'):
        return None
    found = json.loads(read_body(value))
    return found if isinstance(found, str) else None


def _is_number(field: str) -> bool:
    """True for fields that hold moments or numbers: their index is by number, others' by text."""
    return field.endswith("_ms") or field == "number"


def _indexed(field: str) -> str:
    return _number(field) if _is_number(field) else _text(field)


def _text(field: str) -> str:
    """Return the field's JSON, in which a text has its quotes, so that types are kept apart."""
    return f"((body -> '{field}')::text COLLATE \"C\")"


def _number(field: str) -> str:
    is_number = f"json_typeof(body -> '{field}') = 'number'"
    return f"(CASE WHEN {is_number} THEN (body ->> '{field}')::numeric END)"


def _mark(text: str) -> str:
    if _MARK in text:
        text = text.replace(_MARK, f"{_MARK}1")
    if "\\u0000" in text:
        text = _NUL.sub(lambda found: f"{found[1]}{_MARK}0", text)
    return text
