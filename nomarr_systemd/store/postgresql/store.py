"""The store of several hosts: documents in PostgreSQL, by psycopg2.

Connections and time are in ``postgresql.session``, transactions in ``postgresql.link``, SQL in
``postgresql.statements``. The meaning of documents is not known here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.core.errors import (
    BadDocument,
    KeyExists,
    StaleRevision,
    StoreError,
    StoreUnavailable,
)
from nomarr_systemd.store.postgresql import schema, statements
from nomarr_systemd.store.postgresql.link import Link
from nomarr_systemd.store.protocol import (
    DOMAINS,
    MOST_FOUND,
    POLICY_LEDGER,
    PORTION,
    Doc,
    Domain,
    Equal,
    check_key,
    check_number,
    check_update,
    check_words,
    in_portions,
    new_keys,
)
from nomarr_systemd.store.publication import Publication

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import PostgresUrl
    from nomarr_systemd.store.protocol import Publisher

# The largest answer in bytes: fifty accounts of 460 kB, or jobs of 1.2 MB, fit.
_MOST: Final[dict[Domain, int]] = {"policy": 32 << 20, "work": 64 << 20}
_PAGE: Final = 50  # documents in the first answer to find(); more if they are small
_MAX_PAGE: Final = 5000
_FIND_TIMES: Final = 5  # all of find() may take this many time-outs
_STRANGE: Final = (ValueError, TypeError, LookupError, RecursionError, BadDocument)


class PostgresStore:
    """``Store`` on PostgreSQL; tables and indexes are made on first use. One per thread.

    A write whose answer was lost is a StoreUnavailable and may have been carried out, as on
    ArangoDB. A batch is one transaction: it is carried out whole or not at all.
    """

    can_hold = True

    def __init__(
        self,
        url: PostgresUrl,
        domain: Domain,
        *,
        password: str,
        ca_file: str | None = None,
        timeout_s: float = 2.0,
        publisher: Publisher | None = None,
        most: int = MOST_FOUND,
    ) -> None:
        self._domain: Domain = domain
        self._collections = {collection.name for collection in DOMAINS[domain]}
        self._publisher = publisher
        self._publication = Publication(publisher, self._read_bodies, self.get)
        self._most = most
        self._most_at_once = min(_MOST[domain], most)
        self._link = Link(
            url,
            password=password,
            ca_file=ca_file,
            timeout_s=timeout_s,
            most=self._most_at_once,
        )

    def get(self, collection: str, key: str) -> Doc | None:
        sql = f"SELECT key, rev, body::text FROM {self._table(collection)} WHERE key = %s"
        docs = self._read(collection, sql, [check_key(key)])
        if len(docs) > 1 or any(doc["_key"] != key for doc in docs):
            raise self._strange(collection)
        return docs[0] if docs else None

    def insert(self, collection: str, doc: Doc) -> str:
        key, rev, body = check_key(doc.get("_key")), _new_rev(), statements.to_body(doc)
        sql = f"INSERT INTO {self._table(collection)} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
        # Not an error of the server, which would end the transaction.
        if not self._link.settle(f"{collection}/{key}", sql, [key, rev, body]).changed:
            raise KeyExists(f"{collection}/{key} exists already")
        self._publication.written(collection, key)
        return rev

    def replace(self, collection: str, doc: Doc) -> str:
        key, rev, body = check_key(doc.get("_key")), _new_rev(), statements.to_body(doc)
        table, old = self._table(collection), _check_rev(f"{collection}/{key}", doc.get("_rev"))
        sql = f"UPDATE {table} SET rev = %s, body = %s WHERE key = %s AND rev = %s"
        if not self._link.run(f"{collection}/{key}", sql, [rev, body, key, old]).changed:
            raise StaleRevision(f"{collection}/{key} was changed or removed meanwhile")
        self._publication.written(collection, key)
        return rev

    def insert_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        rows = [(check_key(doc.get("_key")), statements.to_body(doc)) for doc in docs]
        revs = [_new_rev() for _ in rows]
        if self._insert_all(collection, rows, " ON CONFLICT DO NOTHING", revs) != len(rows):
            raise KeyExists(f"one of {len(rows)} documents of {collection} exists already")
        for key, _ in rows:
            self._publication.written(collection, key)
        return revs

    def replace_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:
        table = self._table(collection)
        revs, values = [_new_rev() for _ in docs], list[object]()
        for doc, rev in zip(docs, revs, strict=True):
            key = check_key(doc.get("_key"))
            values += [key, _check_rev(f"{collection}/{key}", doc.get("_rev"))]
            values += [rev, statements.to_body(doc)]
        sql = (
            f"UPDATE {table} AS old SET rev = new.rev, body = new.body::json"
            f" FROM (VALUES {', '.join(['(%s, %s, %s, %s)'] * len(docs))})"
            " AS new (key, was, rev, body) WHERE old.key = new.key AND old.rev = new.was"
        )
        if docs and self._link.run(collection, sql, values).changed != len(docs):
            raise StaleRevision(f"one of {len(docs)} documents of {collection} was changed")
        return revs

    def delete(self, collection: str, key: str, rev: str | None = None) -> bool:
        what = f"{collection}/{check_key(key)}"
        sql, values = f"DELETE FROM {self._table(collection)} WHERE key = %s", [key]
        if rev is None:
            gone = self._link.settle(what, sql, values).changed > 0
        else:
            values.append(_check_rev(what, rev))
            gone = self._link.run(what, f"{sql} AND rev = %s", values).changed > 0
            if not gone and self.get(collection, key):
                raise StaleRevision(f"{what} was changed meanwhile")
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
        limit = 2**62 if limit is None else max(0, limit)
        select = f"SELECT key, rev, body::text FROM {self._table(collection)}"
        ordered = statements.order_by(order, descending=descending)
        in_pages = order == "_key" and not descending
        page = _PAGE if in_pages else 2**62
        ends, received = time.monotonic() + _FIND_TIMES * self._link.timeout_s, 0
        docs: list[Doc] = []
        while limit > len(docs):
            size = min(page, limit - len(docs))
            condition, values = statements.where(where, after)
            before = self._link.received
            sql = f"{select}{condition}{ordered} LIMIT {size}"
            found = self._read(collection, sql, values)
            docs += found
            if len(found) > size:
                raise self._strange(collection)
            if not in_pages or len(found) < size:
                break
            after = found[-1]["_key"]
            got = max(0, self._link.received - before)
            received += got
            if time.monotonic() > ends or received > self._most:
                raise self._strange(f"{collection} (too large, or without an end)")
            if got < self._most_at_once // 64:
                page = min(page * 8, _MAX_PAGE)
        return docs

    def first(self, collection: str, where: Equal, limit: int = 1) -> list[Doc]:
        if not self.in_batch:
            raise StoreError("a document is held only inside a batch")
        condition, values = statements.where(where)
        ordered = statements.order_by("_key", descending=False)
        sql = f"SELECT key, rev, body::text FROM {self._table(collection)}{condition}{ordered}"
        return self._read(collection, f"{sql} LIMIT {int(limit)} FOR UPDATE SKIP LOCKED", values)

    def count(self, collection: str, where: Equal) -> int:
        condition, values = statements.where(check_words(where))
        sql = f"SELECT count(*) FROM {self._table(collection)}{condition}"
        return self._read_number(collection, sql, values)

    def tally(self, collection: str, where: Equal, field: str) -> dict[str, int]:
        condition, values = statements.where(check_words(where))
        counted = statements.counted_by(field)
        sql = f"SELECT {counted}, count(*) FROM {self._table(collection)}{condition} GROUP BY 1"
        rows = self._link.run(collection, sql, values, repeatable=True).rows
        try:
            return {
                value: int(number)
                for value, number in ((statements.read_text(row[0]), row[1]) for row in rows)
                if value is not None
            }
        except _STRANGE as error:
            raise self._strange(collection) from error

    def add(self, collection: str, docs: Sequence[Doc]) -> int:
        rows = [(check_key(doc.get("_key")), statements.to_body(doc)) for doc in docs]
        added = self._insert_all(collection, rows, " ON CONFLICT DO NOTHING")
        for key, _ in rows:
            self._publication.written(collection, key)
        return added

    def append(self, collection: str, docs: Sequence[Doc]) -> None:
        bodies = [statements.to_body(doc) for doc in docs]
        self._insert_all(collection, list(zip(new_keys(len(docs)), bodies, strict=True)), "")

    def prune(self, collection: str, field: str, below: int, where: Equal | None = None) -> int:
        table, condition = self._table(collection), statements.below(field)
        check_number(below)
        equal, values = statements.where(where)
        if not condition:
            return 0
        condition = f"{equal.removeprefix(' WHERE ')} AND {condition}" if equal else condition
        some = f"SELECT key FROM {table} WHERE {condition} LIMIT {PORTION}"
        sql = f"DELETE FROM {table} WHERE key IN ({some}) AND {condition}"
        values = [*values, below, *values, below]
        return in_portions(lambda: self._link.settle(collection, sql, values).changed)

    def update(self, collection: str, where: Equal, fields: Doc) -> int:
        table = self._table(collection)
        condition, values = statements.where(check_update(where, fields))
        some = f"SELECT key FROM {table}{condition} LIMIT {PORTION}"
        sql = (
            f"UPDATE {table} SET rev = {statements.NEW_REV}, body = {statements.CHANGED_BODY}"
            f" WHERE key IN ({some}){condition.replace(' WHERE ', ' AND ', 1)}"
        )
        changes = [list(fields), statements.to_body(fields)]
        return in_portions(
            lambda: self._link.settle(collection, sql, [*changes, *values, *values]).changed
        )

    def now_ms(self) -> int:
        self._make_ready()
        sql = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        return self._read_number("the clock", sql, [])

    def may_read(self, collection: str) -> bool:
        """Return True if our user may look into the schema that has this collection, of any
        domain."""
        (domain,) = (
            each for each, group in DOMAINS.items() if collection in (known.name for known in group)
        )
        sql = "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s"
        return any(
            row[0] for row in self._link.run(collection, sql, [statements.SCHEMAS[domain]]).rows
        )

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        with self._publication.batch():
            self._make_ready()
            with self._link.transaction():
                yield

    @property
    def in_batch(self) -> bool:
        return self._publication.in_batch

    def publish_all(self) -> None:
        if self._publisher is not None:
            self._publisher.publish_all(self.find)

    def keep_room(self, wanted: int) -> None:
        """Its disk is the server's."""

    def close(self) -> None:
        self._link.close()

    def _read(self, what: str, sql: str, values: Sequence[object]) -> list[Doc]:
        answer = self._link.run(what, sql, values, repeatable=True)
        try:
            return [statements.read_row(row) for row in answer.rows]
        except _STRANGE as error:
            raise self._strange(what) from error

    def _read_number(self, what: str, sql: str, values: Sequence[object]) -> int:
        rows = self._link.run(what, sql, values, repeatable=True).rows
        if len(rows) != 1 or type(rows[0][0]) is not int or rows[0][0] < 0:
            raise self._strange(what)
        return int(rows[0][0])

    def _insert_all(
        self,
        collection: str,
        rows: list[tuple[str, str]],
        suffix: str,
        revs: Sequence[str] | None = None,
    ) -> int:
        """Insert all in one statement; returns how many were new."""
        table = self._table(collection)
        if not rows:
            return 0
        places = ", ".join(["(%s, %s, %s::json)"] * len(rows))
        revs = revs or [_new_rev() for _ in rows]
        values = [
            value for (key, body), rev in zip(rows, revs, strict=True) for value in (key, rev, body)
        ]
        sql = f"INSERT INTO {table} VALUES {places}{suffix}"
        return self._link.settle(collection, sql, values).changed

    def _table(self, collection: str) -> str:
        if collection not in self._collections:
            raise StoreError(f"{self._link.url.database} has no collection {collection!r:.80}")
        self._make_ready()
        return statements.table(self._domain, collection)

    def _make_ready(self) -> None:
        if not self._link.is_ready and not self._link.in_transaction:
            schema.make_ready(self._link, self._domain)

    def _strange(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{what} in PostgreSQL at {self._link.where}: its answer is not as expected",
            hint="check that its data is not damaged",
        )

    def _read_bodies(self, keys: list[str]) -> dict[str, str]:
        sql = f"SELECT key, body::text FROM {self._table(POLICY_LEDGER)} WHERE key = ANY(%s)"
        rows: list[Any] = self._link.run(POLICY_LEDGER, sql, [keys], repeatable=True).rows
        return {str(key): statements.read_body(str(body)) for key, body in rows}


def _new_rev() -> str:
    """Return a random revision: none is used twice, not even after delete and insert."""
    return os.urandom(8).hex()


def _check_rev(what: str, rev: object) -> str:
    if not isinstance(rev, str) or not statements.REV.fullmatch(rev):
        raise StaleRevision(f"{what}: {rev!r:.80} is no revision")
    return rev
