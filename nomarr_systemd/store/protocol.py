"""The contract of a store: documents by key, compare-and-swap by revision, find by equality.

All backends pass one test suite. Nothing here knows what a document means, except which
collections there are and which fields are indexed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from nomarr_systemd.core.errors import BadDocument, StoreUnavailable
from nomarr_systemd.core.json import DECODER, is_deep, may_be_deep
from nomarr_systemd.core.named_tuple import NamedTuple

Doc = dict[str, Any]
Domain = Literal["policy", "work"]
Equal = Mapping[str, str | int | None]


class Collection(NamedTuple):
    """A collection and its indexes, each a group of fields that are compared or ordered by."""

    name: str
    indexes: tuple[tuple[str, ...], ...] = ()


MAX_DEPTH = 190  # of nesting; the limit of ArangoDB's server is "slightly below 200"
POLICY_LEDGER = "worker_restart_policy"
PAGE = 500  # documents that are read at once where all are read
MOST_FOUND = 128 << 20  # bytes of all documents that one find() returns, unless told otherwise
PORTION = 5000  # documents that one statement changes: others have their turn in between
_MAX_PORTIONS = 10_000
PAST_INCIDENTS = "incidents"
PAST_RECORDS = "records"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
HOSTS = "hosts"  # leases of hosts that share the store

DOMAINS: Mapping[Domain, tuple[Collection, ...]] = {
    "policy": (
        Collection(POLICY_LEDGER, (("host",),)),
        Collection("meta"),
        Collection(PAST_INCIDENTS, (("host", "number"),)),
        Collection(PAST_RECORDS, (("host", "component_id"),)),
        Collection("job_crashes", (("wall_ms",),)),
    ),
    "work": (
        Collection("health_history", (("wall_ms",), ("host",), ("component_id",))),
        Collection("worker_claims", (("invocation",), ("host",), ("pool",))),
        Collection("jobs", (("pool", "status"), ("pool", "invocation"))),
        Collection("stats"),
        Collection(HOSTS, (("state", "renewed_ms"), ("state",))),
    ),
}


class Publisher(Protocol):
    """A store calls it after it has committed documents of the ledger; ``ledger.publisher`` has the
    one that writes files. ``publish`` does not raise its errors: the commit stands."""

    def publish(self, keys: Iterable[str], read: Callable[[list[str]], Mapping[str, str]]) -> None:
        """Publish accounts that were written; ``read`` reads the JSON of those that exist."""

    def publish_records(self, keys: Iterable[str], get: Callable[[str, str], Doc | None]) -> None:
        """Publish documents of PAST_RECORDS that were written or removed."""

    def publish_all(self, find: Callable[..., list[Doc]]) -> None:
        """Publish every document of this host that ``find`` finds, and nothing else."""


class Store(Protocol):
    """A document store with compare-and-swap. Every method may raise StoreUnavailable.

    A document is a JSON object. ``_key`` names it within its collection, ``_rev`` is an opaque
    text that changes with every write and is never used twice; other names starting with an
    underscore are the store's own.
    """

    can_hold: bool
    """True if a batch is one transaction, and ``first`` holds what it returns."""

    @property
    def in_batch(self) -> bool:
        """True inside a batch."""

    def get(self, collection: str, key: str) -> Doc | None:
        """Return the document with its ``_key`` and ``_rev``, or None."""

    def insert(self, collection: str, doc: Doc) -> str:
        """Store a new document under its ``_key``; returns its revision, or raises KeyExists."""

    def replace(self, collection: str, doc: Doc) -> str:
        """Replace the document that has this ``_key`` and ``_rev``.

        Returns the new revision; StaleRevision if it was changed or deleted meanwhile.
        """

    def insert_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        """In a batch, if ``can_hold``: ``insert`` for each, in one statement where possible. After
        KeyExists the batch is to be left."""

    def replace_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        """In a batch, if ``can_hold``: ``replace`` for each, in one statement where possible. After
        StaleRevision the batch is to be left. Not for the ledger."""

    def delete(self, collection: str, key: str, rev: str | None = None) -> bool:
        """Remove a document; False if there is none. With ``rev``: StaleRevision if it differs."""

    def find(
        self,
        collection: str,
        where: Equal | None = None,
        *,
        order: str = "_key",
        descending: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Doc]:
        """Documents whose fields equal ``where`` (None: absent or null), ordered, then by key.

        ``after`` returns only keys greater than this one: to read page by page.
        Order is meant for numbers and for texts of digits and small letters: beyond those,
        SQLite and PostgreSQL compare bytes and ArangoDB compares as its language does.
        """

    def first(self, collection: str, where: Equal, limit: int = 1) -> list[Doc]:
        """In a batch, if ``can_hold``: the first documents by key with these field values that no
        other batch holds; this one holds them to its end."""

    def count(self, collection: str, where: Equal) -> int:
        """Count documents with these field values, which must be identifiers (``check_words``)."""

    def tally(self, collection: str, where: Equal, field: str) -> dict[str, int]:
        """Count documents with these identifiers by the value of ``field``, in one question. It is
        meant for fields that hold identifiers: others may be left out."""

    def add(self, collection: str, docs: Sequence[Doc]) -> int:
        """Store the documents whose ``_key`` is not taken yet, in one write; returns how many."""

    def append(self, collection: str, docs: Sequence[Doc]) -> None:
        """Store new documents without keys, in this order, in one write."""

    def prune(self, collection: str, field: str, below: int, where: Equal | None = None) -> int:
        """Remove documents whose ``field`` is a number below ``below``, of those with the values
        ``where``; returns how many."""

    def update(self, collection: str, where: Equal, fields: Doc) -> int:
        """Set fields of all documents with these identifiers, by one statement for each PORTION;
        returns how many. One of the fields is in ``where`` and changes. Not for the ledger, whose
        documents are published."""

    def now_ms(self) -> int:
        """Return the store's clock, which all hosts share: the server's, or this host's on
        SQLite."""

    def batch(self) -> AbstractContextManager[None]:
        """Writes inside become durable together where the backend can; each is still its own
        compare-and-swap. An exception inside undoes what is not durable yet."""

    def publish_all(self) -> None:
        """Publish every document of the ledger, also those that a kill after a commit left out."""

    def keep_room(self, wanted: int) -> None:
        """Keep so many bytes for commits on a disk that others fill. A server's is not ours."""

    def close(self) -> None:
        """Close files and connections; closing twice is fine."""


_KEY = re.compile(r"[A-Za-z0-9_\-:.@()+,=;$!*'%]{1,254}")
_FIELD = re.compile(r"_key|[a-z][a-z0-9_]{0,63}")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_:.\-]{0,253}")
_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


def check_key(key: object) -> str:
    """Return the key, if every backend can keep it (ArangoDB's rule for ``_key``)."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise BadDocument(
            f"{key!r:.80} cannot be a document's key",
            hint="a key is 1 to 254 letters, digits or _-:.@()+,=;$!*'%",
        )
    return key


def hosted(name: str, host: str) -> str:
    """Return the key of a document that is a host's own; ``host`` is empty if there is one host
    only."""
    return f"{name}@{host}" if host else name


def check_field(name: str) -> str:
    """Return the field name, if it is allowed in a query."""
    if not _FIELD.fullmatch(name):
        raise BadDocument(f"{name!r:.80} cannot be a field in a query")
    return name


def check_where(where: Equal | None) -> Equal:
    """Return the condition, if it means the same to every backend: texts, whole numbers and
    None."""
    where = where or {}
    for field, value in where.items():
        check_field(field)
        if value is not None and type(value) not in (str, int):
            raise BadDocument(f"{field} is compared with {value!r:.80}: only text, int and None")
        if isinstance(value, int):
            check_number(value)
    return where


def check_words(where: Equal) -> Equal:
    """Return the condition, if its values are identifiers, which no database takes for another
    type."""
    for field, value in check_where(where).items():
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            raise BadDocument(f"{field} is counted by {value!r:.80}: it is not an identifier")
    return where


def check_update(where: Equal, fields: Doc) -> Equal:
    """Return the condition of an update, if no document meets it afterwards: else it would not
    end."""
    for name in fields:
        check_field(name)
    if all(fields.get(name, value) == value for name, value in check_words(where).items()):
        raise BadDocument(f"an update of {', '.join(fields)!r:.80} leaves what it looks for")
    return where


def in_portions(change: Callable[[], int]) -> int:
    """Call ``change`` until it changes less than PORTION documents; returns how many in all."""
    changed = 0
    for _ in range(_MAX_PORTIONS):
        now = change()
        changed += now
        if now < PORTION:
            return changed
    raise StoreUnavailable(
        f"{changed} documents were changed, and there are still more",
        hint="find the program that adds them",
    )


def check_number(value: int) -> int:
    """Return the number, if every backend can compare with it."""
    if not -(2**63) <= value < 2**63:
        raise BadDocument("a number in a query has more than 64 bits")
    return value


def encode(doc: Doc) -> str:
    """Return the document's own fields as compact JSON, or BadDocument."""
    body = {name: value for name, value in doc.items() if name not in ("_key", "_rev", "_id")}
    for name in body:
        if not isinstance(name, str) or name.startswith("_"):
            raise BadDocument(f"field {name!r:.80}: a name is text without a leading underscore")
    try:
        text = _encoder.encode(body)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadDocument(f"document {doc.get('_key', '')!r:.80} is not JSON: {error}") from error
    # Python 3.11 cannot write what is nested thousands deep, 3.13 can; neither may be relied upon.
    if may_be_deep(text, MAX_DEPTH) and is_deep(body, MAX_DEPTH):
        raise BadDocument(f"{doc.get('_key', '')!r:.80} is nested deeper than {MAX_DEPTH} levels")
    return text


def decode(text: object, depth: int = MAX_DEPTH) -> Doc:
    """Return the JSON object that a store keeps, which others may have written; ValueError if it is
    none, has a number that is not finite or half of a character in it, or is nested deeper than
    ``depth``."""
    if not isinstance(text, str):
        raise ValueError("it is not a text")
    try:
        doc = DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(doc, dict):
        raise ValueError("it is not an object")
    if may_be_deep(text, depth) and is_deep(doc, depth):
        raise ValueError("it is nested too deeply")
    if "\\" in text and _SURROGATE.search(text):  # half of a pair cannot be encoded
        json.dumps(doc, ensure_ascii=False).encode()
    return doc


def walk(store: Store, collection: str, where: Equal, *, size: int = PAGE) -> Iterator[Doc]:
    """Yield all documents that match, by key; changes meanwhile may be seen or not. ``size`` of
    them are read at once."""
    for page in pages(store, collection, where, size=size):
        yield from page


def pages(
    store: Store, collection: str, where: Equal | None = None, *, size: int = PAGE
) -> Iterator[list[Doc]]:
    """Yield all documents that match, by key, in the lists in which they are read."""
    after = ""
    while page := store.find(collection, where, after=after, limit=size):
        yield page
        after = page[-1]["_key"]


def put(store: Store, collection: str, doc: Doc) -> str:
    """Replace the document, or insert it if it has no revision; StaleRevision or KeyExists if
    another process wrote it meanwhile."""
    return (store.replace if "_rev" in doc else store.insert)(collection, doc)


def new_keys(count: int) -> list[str]:
    """Keys for appended documents; they sort in the order in which they were made."""
    start = time.time_ns()
    return [f"{start + n:020d}{os.urandom(4).hex()}" for n in range(count)]
