"""The store of one host: a SQLite file per domain, durable at every commit.

A collection is a table of key, revision and JSON body; searched fields are indexed by expression.
How the file is opened, locked and saved from corruption is in ``sqlite.file``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from nomarr_systemd.core.errors import StaleRevision, StoreError, StoreUnavailable
from nomarr_systemd.core.text import clean
from nomarr_systemd.host.log import CRITICAL, log
from nomarr_systemd.store.protocol import (
    DOMAINS,
    MOST_FOUND,
    POLICY_LEDGER,
    PORTION,
    Doc,
    Domain,
    Equal,
    Publisher,
    check_field,
    check_key,
    check_number,
    check_update,
    check_where,
    check_words,
    decode,
    encode,
    in_portions,
    new_keys,
)
from nomarr_systemd.store.publication import Publication
from nomarr_systemd.store.sqlite.file import SqliteFile

SCHEMA_VERSION: Final = 1
# Each write would parse its document four times more, and change a page more. All documents are of
# one host; and there are few claims, which are rarely read by pool.
_NOT_WORTH_IT: Final = {POLICY_LEDGER: (("host",),), "worker_claims": (("host",), ("pool",))}
_Row = tuple[Any, Any, Any]  # key, revision and body, whatever their types are
FILES: Final[dict[Domain, str]] = {"policy": "ledger.db", "work": "work/work.db"}


class SqliteStore:
    """``Store`` on SQLite. Use one per thread; any number of processes may share the file."""

    can_hold = True  # a transaction holds the whole file

    def __init__(
        self,
        directory: str,
        domain: Domain,
        *,
        publisher: Publisher | None = None,
        patience_s: float = 2.0,
        most: int = MOST_FOUND,
    ) -> None:
        self._collections = {collection.name for collection in DOMAINS[domain]}
        self._publisher = publisher
        self._most = most
        self._publication = Publication(publisher, self._read_bodies, self.get)
        self._file = SqliteFile(
            os.path.join(directory, FILES[domain]),
            version=SCHEMA_VERSION,
            schema=tuple(_schema(domain)),
            indexes=tuple(_indexes(domain)),
            patience_s=patience_s,
            most=most,
            private=domain == "policy",
        )
        self._file.run(lambda db: db.execute("SELECT 1 FROM sqlite_master").fetchone())

    @property
    def path(self) -> str:
        return self._file.path

    def get(self, collection: str, key: str) -> Doc | None:
        sql = f"SELECT key, rev, body FROM {self._table(collection)} WHERE key = ?"
        check_key(key)
        row = self._file.run(lambda db: db.execute(sql, (key,)).fetchone())
        return self._load(collection, row) if row else None

    def insert(self, collection: str, doc: Doc) -> str:
        key, rev, body = check_key(doc.get("_key")), _new_rev(), encode(doc)
        self._write(f"INSERT INTO {self._table(collection)} VALUES (?, ?, ?)", key, rev, body)
        self._publication.written(collection, key)
        return rev

    def replace(self, collection: str, doc: Doc) -> str:
        sql = f"UPDATE {self._table(collection)} SET rev = ?, body = ? WHERE key = ? AND rev = ?"
        key, rev, body = check_key(doc.get("_key")), _new_rev(), encode(doc)
        if not self._write(sql, rev, body, key, doc.get("_rev")):
            raise StaleRevision(f"{collection}/{key} was changed or removed meanwhile")
        self._publication.written(collection, key)
        return rev

    def insert_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        return [self.insert(collection, doc) for doc in docs]

    def replace_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        return [self.replace(collection, doc) for doc in docs]

    def delete(self, collection: str, key: str, rev: str | None = None) -> bool:
        sql = f"DELETE FROM {self._table(collection)} WHERE key = ?"
        check_key(key)
        if rev is None:
            gone = self._write(sql, key) > 0
        else:
            gone = self._write(f"{sql} AND rev = ?", key, rev) > 0
            if not gone and self.get(collection, key):
                raise StaleRevision(f"{collection}/{key} was changed meanwhile")
        if gone:
            self._publication.written(collection, key)
        return gone

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
        sql = f"SELECT key, rev, body FROM {self._table(collection)}"
        conditions: list[str] = []
        values: list[str | int] = []
        for field, value in check_where(where).items():
            condition, compared = _equals(field, value)
            conditions.append(condition)
            values += compared
        if after is not None:
            conditions.append("key > ?")
            values.append(after)
        if conditions:
            sql += f" WHERE {' AND '.join(conditions)}"
        direction = "DESC" if descending else "ASC"
        first = "" if order == "_key" else f"{_column(order)} {direction}, "  # keys are unique
        sql += f" ORDER BY {first}key {direction}"
        if limit is not None:
            sql += f" LIMIT {min(max(0, int(limit)), 2**62)}"
        rows = self._file.run(lambda db: self._fetch(collection, db.execute(sql, values)))
        docs = [self._load(collection, row) for row in rows]
        return [doc for doc in docs if doc is not None]

    def first(self, collection: str, where: Equal, limit: int = 1) -> list[Doc]:
        if not self.in_batch:
            raise StoreError("a document is held only inside a batch")
        return self.find(collection, where, limit=limit)

    def count(self, collection: str, where: Equal) -> int:
        # Without find()'s check of the type, which would read every document: an identifier is
        # neither a number nor an object's text, so the index is enough.
        conditions = " AND ".join(f"{_column(field)} = ?" for field in check_words(where))
        sql = f"SELECT count(*) FROM {self._table(collection)} WHERE {conditions or 'TRUE'}"
        values = tuple(where.values())
        return self._file.run(lambda db: int(db.execute(sql, values).fetchone()[0]))

    def tally(self, collection: str, where: Equal, field: str) -> dict[str, int]:
        conditions = [f"{_column(each)} = ?" for each in check_words(where)]
        counted, values = _column(field), tuple(where.values())
        sql = (
            f"SELECT {counted}, count(*) FROM {self._table(collection)}"
            f" WHERE {' AND '.join([*conditions, f'{counted} IS NOT NULL'])} GROUP BY 1"
        )
        rows = self._file.run(lambda db: db.execute(sql, values).fetchall())
        return {value: int(number) for value, number in rows if isinstance(value, str)}

    def add(self, collection: str, docs: Sequence[Doc]) -> int:
        sql = f"INSERT OR IGNORE INTO {self._table(collection)} VALUES (?, ?, ?)"
        rows = [(check_key(doc.get("_key")), _new_rev(), encode(doc)) for doc in docs]
        with contextlib.nullcontext() if self.in_batch else self.batch():
            added = max(0, self._file.run(lambda db: db.executemany(sql, rows).rowcount))
        for key, _, _ in rows:
            self._publication.written(collection, key)
        return added

    def append(self, collection: str, docs: Sequence[Doc]) -> None:
        sql = f"INSERT INTO {self._table(collection)} VALUES (?, ?, ?)"
        keys = new_keys(len(docs))
        rows = [(key, _new_rev(), encode(doc)) for key, doc in zip(keys, docs, strict=True)]
        with contextlib.nullcontext() if self.in_batch else self.batch():
            self._file.run(lambda db: db.executemany(sql, rows))

    def prune(self, collection: str, field: str, below: int, where: Equal | None = None) -> int:
        sql = f"DELETE FROM {self._table(collection)} WHERE {_column(field)} < ?"
        sql += f" AND {_type(field)} IN ('integer', 'real')"
        values: list[str | int] = [check_number(below)]
        for each, value in check_where(where).items():
            condition, compared = _equals(each, value)
            sql += f" AND {condition}"
            values += compared
        return self._write(sql, *values)

    def update(self, collection: str, where: Equal, fields: Doc) -> int:
        conditions = " AND ".join(f"{_column(each)} = ?" for each in check_update(where, fields))
        table, new = self._table(collection), json.loads(encode(fields))
        changes = "".join(f", '$.{name}', json(?)" for name in new)
        sql = (
            f"UPDATE {table} SET rev = lower(hex(randomblob(8))), body = json_set(body{changes})"
            f" WHERE key IN (SELECT key FROM {table} WHERE {conditions} LIMIT {PORTION})"
        )
        texts = [json.dumps(value, ensure_ascii=False) for value in new.values()]
        return in_portions(lambda: self._write(sql, *texts, *where.values()))

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        with self._publication.batch(), self._file.transaction():
            yield

    @property
    def in_batch(self) -> bool:
        return self._publication.in_batch

    def publish_all(self) -> None:
        if self._publisher is not None:
            self._publisher.publish_all(self.find)

    def keep_room(self, wanted: int) -> None:
        self._file.keep_room(wanted)

    def close(self) -> None:
        self._file.finish()

    def _write(self, sql: str, *values: object) -> int:
        return self._file.run(lambda db: db.execute(sql, values).rowcount)

    def _fetch(self, collection: str, rows: Iterable[_Row]) -> list[_Row]:
        """All rows; StoreUnavailable if they are too large together."""
        found, size = [], 0
        for row in rows:
            size += len(row[2]) if isinstance(row[2], str | bytes) else 0
            if size > self._most:
                raise StoreUnavailable(
                    f"more than {self._most >> 20} MiB at once: {collection} in {self.path}",
                    hint="see which of its documents are so large, and what wrote them",
                )
            found.append(row)
        return found

    def _load(self, collection: str, row: _Row) -> Doc | None:
        """The document of a row; None if it is none. The file may be another user's."""
        key, rev, body = row
        if not isinstance(key, str) or not isinstance(rev, str):
            return None
        try:
            doc = decode(body)
        except ValueError:
            self._bury(collection, key, rev)
            return None
        doc["_key"], doc["_rev"] = key, rev
        return doc

    def _bury(self, collection: str, key: str, rev: str) -> None:
        """Move what is no document to the table ``damaged``; the others are sound."""
        table = self._table(collection)
        columns = f"SELECT '{collection}', key, rev, body FROM {table} WHERE key = ? AND rev = ?"
        with contextlib.nullcontext() if self.in_batch else self.batch():
            self._write(f"INSERT INTO damaged {columns}", key, rev)
            self._write(f"DELETE FROM {table} WHERE key = ? AND rev = ?", key, rev)
        log(
            CRITICAL,
            f"{collection}/{clean(key, 254)} in {self.path} is no document. It was moved to the"
            " table 'damaged', and is missing now.",
        )

    def _table(self, collection: str) -> str:
        if collection not in self._collections:
            raise StoreError(f"{self.path} has no collection {collection!r:.80}")
        return f'"{collection}"'

    def _read_bodies(self, keys: list[str]) -> dict[str, str]:
        places = ", ".join("?" * len(keys))
        sql = f'SELECT key, body FROM "{POLICY_LEDGER}" WHERE key IN ({places})'
        return dict(self._file.run(lambda db: db.execute(sql, keys).fetchall()))


def _schema(domain: Domain) -> Iterator[str]:
    yield "CREATE TABLE IF NOT EXISTS damaged (collection TEXT, key TEXT, rev TEXT, body)"
    for name, _ in DOMAINS[domain]:
        yield (
            f'CREATE TABLE IF NOT EXISTS "{name}"'
            " (key TEXT PRIMARY KEY NOT NULL, rev TEXT NOT NULL, body TEXT NOT NULL)"
        )


def _indexes(domain: Domain) -> Iterator[str]:
    for name, indexes in DOMAINS[domain]:
        for fields in indexes:
            if fields in _NOT_WORTH_IT.get(name, ()):
                continue
            columns = ", ".join([*map(_column, fields), "key"])
            yield f'CREATE INDEX "{name}_by_{"_".join(fields)}" ON "{name}"({columns})'


def _column(field: str) -> str:
    """Return the SQL of a field: NULL if the document is not JSON, so that it can be removed."""
    if check_field(field) == "_key":
        return "key"
    return f"CASE WHEN json_valid(body) THEN json_extract(body, '$.{field}') END"


def _type(field: str) -> str:
    return "typeof(key)" if field == "_key" else f"json_type(body, '$.{field}')"


@functools.lru_cache(maxsize=64)
def _equals(field: str, value: str | int | None) -> tuple[str, tuple[str | int, ...]]:
    """The condition and its values. JSON's types are kept apart, where SQLite takes true for 1,
    an object for its text, and a text with a NUL in it for the part before the NUL."""
    column = _column(field)
    if value is None:
        return f"{column} IS NULL", ()
    if field == "_key":
        return f"{column} = ?", (value,)
    if isinstance(value, int):
        return f"{column} = ? AND {_type(field)} IN ('integer', 'real')", (value,)
    exactly, text = f"body -> '$.{field}' = ?", json.dumps(value, ensure_ascii=False)
    if "\0" in value:
        return exactly, (text,)
    return f"{column} = ? AND {exactly}", (value, text)


def _new_rev() -> str:
    """Return a random revision: none is used twice, not even after delete and insert."""
    return os.urandom(8).hex()
