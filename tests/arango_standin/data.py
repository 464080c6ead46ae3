"""Databases, collections, documents and cursors, in memory, with a revision for every write.

DOCS concepts/data-structure/documents/ (keys, revisions), develop/http-api/documents/ and
develop/http-api/queries/aql-queries/. The caller holds the lock; HTTP is not known here.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tests.arango_standin import aql
from tests.arango_standin.tokens import QueryError

Doc = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_\-:.@()+,=;$!*'%]{1,254}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")
_DATABASE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}|_system")
_DIGITS = "-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"


# Options of databases and, but for the last, of collections; for clusters only.
COPIES = ("replicationFactor", "writeConcern", "sharding")


class Refusal(Exception):
    """An HTTP status with ArangoDB's error number and message (DOCS develop/error-codes/)."""

    def __init__(self, status: int, number: int, message: str, **more: str) -> None:
        super().__init__(message)
        self.status = status
        self.number = number
        self.more = more

    def body(self) -> Doc:
        return {
            **self.more,
            "error": True,
            "code": self.status,
            "errorNum": self.number,
            "errorMessage": str(self),
        }


class Clock:
    """Revisions and identifiers: every one is used once."""

    def __init__(self) -> None:
        self._ticks = itertools.count(time.time_ns() // 1000)

    def tick(self) -> int:
        return next(self._ticks)

    def revision(self) -> str:
        number, text = self.tick(), ""
        while number:
            number, digit = divmod(number, 64)
            text = _DIGITS[digit] + text
        return f"_{text}---"


class Collection:
    """Documents by key; a document in here is never changed, only exchanged."""

    def __init__(self, name: str, clock: Clock, copies: Doc, *, synced: bool) -> None:
        self.name = name
        self.copies = copies
        self.synced = synced
        self.number = str(clock.tick())
        self.documents: dict[str, Doc] = {}
        self.indexes: list[Doc] = [
            {"id": f"{name}/0", "name": "primary", "type": "primary", "fields": ["_key"]}
        ]
        self._clock = clock

    def describe(self) -> Doc:
        return {
            "id": self.number,
            "name": self.name,
            "type": 2,
            "status": 3,
            "statusString": "loaded",
            "isSystem": False,
            "waitForSync": self.synced,
            **self.copies,
        }

    def get(self, key: str) -> Doc:
        if key not in self.documents:
            raise Refusal(404, 1202, "document not found")
        return self.documents[key]

    def insert(self, new: Any) -> Doc:
        if not isinstance(new, dict):
            raise Refusal(400, 1227, "invalid document type")
        key = new["_key"] if "_key" in new else str(self._clock.tick())
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise Refusal(400, 1221, "illegal document key")
        if key in self.documents:
            raise Refusal(
                409, 1210, f"unique constraint violated - in index primary; conflicting key: {key}"
            )
        return self._keep(key, new)

    def replace(self, key: str, new: Any, rev: str | None) -> Doc:
        if not isinstance(new, dict):
            raise Refusal(400, 1227, "invalid document type")
        old = self._get_if(key, rev)
        return {**self._keep(key, new), "_oldRev": old["_rev"]}

    def remove(self, key: str, rev: str | None) -> Doc:
        self._get_if(key, rev)
        return _meta(self.documents.pop(key))

    def load(self, news: Iterable[Any], *, complete: bool, ignore_taken: bool = False) -> Doc:
        """DOCS develop/http-api/import/; with ``complete`` all documents are kept or none."""
        before, created, details, ignored = dict(self.documents), 0, [], 0
        for position, new in enumerate(news):
            try:
                self.insert(new)
                created += 1
            except Refusal as refusal:
                if ignore_taken and refusal.number == 1210:
                    ignored += 1
                    continue
                if complete:
                    self.documents = before
                    raise
                details.append(f"at position {position}: {refusal}")
        errors = len(details)
        counts = {
            "created": created,
            "errors": errors,
            "ignored": ignored,
            "empty": 0,
            "updated": 0,
        }
        return {"error": False, **counts, "details": details}

    def ensure_index(self, wanted: Doc) -> tuple[int, Doc]:
        """DOCS develop/http-api/indexes/persistent/: the same definition is made once."""
        fields, kind = wanted.get("fields"), wanted.get("type")
        if kind != "persistent" or not isinstance(fields, list) or not fields or "_id" in fields:
            raise Refusal(400, 10, "bad parameter")
        options = {
            "type": kind,
            "fields": fields,
            "unique": bool(wanted.get("unique")),
            "sparse": bool(wanted.get("sparse")),
        }
        for index in self.indexes:
            if options.items() <= index.items():
                return 200, {**index, "isNewlyCreated": False}
        number = self._clock.tick()
        index = {**options, "id": f"{self.name}/{number}", "name": f"idx_{number}"}
        self.indexes.append(index)
        return 201, {**index, "isNewlyCreated": True}

    def _get_if(self, key: str, rev: str | None) -> Doc:
        old = self.get(key)
        if rev is not None and rev != old["_rev"]:
            raise Refusal(412, 1200, "conflict, _rev values do not match", **_meta(old))
        return old

    def _keep(self, key: str, new: Doc) -> Doc:
        system = {"_key": key, "_id": f"{self.name}/{key}", "_rev": self._clock.revision()}
        self.documents[key] = {**new, **system}
        return system


class Database:
    """Collections by name, and the cursors that still have results."""

    def __init__(self, name: str, clock: Clock, copies: Doc) -> None:
        self.name = name
        self.copies = copies
        self.collections: dict[str, Collection] = {}
        self._cursors: dict[str, tuple[list[Any], int]] = {}
        self._clock = clock

    def collection(self, name: str) -> Collection:
        if name not in self.collections:
            raise Refusal(404, 1203, f"collection or view not found: {name}")
        return self.collections[name]

    def create_collection(self, name: Any, copies: Doc, *, synced: bool) -> Collection:
        """In a cluster: what is not given is as the database says; where all collections are on
        one shard, nothing else may be given."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refusal(400, 1208, "illegal name")
        if name in self.collections:
            raise Refusal(409, 1207, "duplicate name")
        usual = {each: self.copies.get(each, 1) for each in COPIES[:2]}
        if self.copies.get("sharding") == "single" and usual | copies != usual:
            raise Refusal(400, 10, "Cannot have a different replicationFactor or writeConcern")
        copies = _check_copies(usual | copies)
        self.collections[name] = Collection(name, self._clock, copies, synced=synced)
        return self.collections[name]

    def drop_collection(self, name: str) -> None:
        del self.collections[self.collection(name).name]

    def query(self, text: str, bound: Mapping[str, Any], batch: int) -> Doc:
        """The first batch; what a query removes is removed at its end, or not at all."""
        view = _View(self)
        try:
            results = aql.parse(text, bound).run(view)
        except QueryError as error:
            raise Refusal(400, error.number, f"AQL: {error}") from error
        for collection, key, new in view.changes:
            if new is None:
                self.collection(collection).remove(key, None)
            else:
                self.collection(collection).replace(key, new, None)
        stats = {"writesExecuted": len(view.changes), "writesIgnored": 0, "scannedFull": 0}
        extra = {"warnings": [], "stats": stats}
        return {**self._deliver(str(self._clock.tick()), results, batch), "extra": extra}

    def next_batch(self, number: str) -> Doc:
        return self._deliver(number, *self._cursor(number))

    def close_cursor(self, number: str) -> None:
        self._cursor(number)

    def _cursor(self, number: str) -> tuple[list[Any], int]:
        if number not in self._cursors:
            raise Refusal(404, 1600, "cursor not found")
        return self._cursors.pop(number)

    def _deliver(self, number: str, results: list[Any], batch: int) -> Doc:
        answer: Doc = {"result": results[:batch], "hasMore": len(results) > batch, "cached": False}
        if answer["hasMore"]:
            self._cursors[number] = results[batch:], batch
            answer["id"] = number
        return answer


class _View:
    """What a running query sees and is about to change."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.changes: list[tuple[str, str, Doc | None]] = []

    def scan(self, collection: str) -> Iterable[Doc]:
        return list(self._database.collection(collection).documents.values())

    def remove(self, collection: str, key: str) -> None:
        self._database.collection(collection).get(key)
        self.changes.append((collection, key, None))

    def update(self, collection: str, key: str, fields: Doc, *, merge: bool) -> None:
        old = self._database.collection(collection).get(key)
        new = _merge(old, fields) if merge else {**old, **fields}
        self.changes.append((collection, key, new))


class Databases:
    """All databases of a server; ``_system`` is always there."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._by_name = {"_system": Database("_system", self._clock, {})}

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def get(self, name: str) -> Database:
        if name not in self._by_name:
            raise Refusal(404, 1228, f"database not found: {name}")
        return self._by_name[name]

    def create(self, name: Any, copies: Doc) -> None:
        if not isinstance(name, str) or not _DATABASE.fullmatch(name):
            raise Refusal(400, 1229, "database name invalid")
        if name in self._by_name:
            raise Refusal(409, 1207, "duplicate database name")
        self._by_name[name] = Database(name, self._clock, _check_copies(copies))

    def drop(self, name: str) -> None:
        if self.get(name).name == "_system":
            raise Refusal(403, 11, "forbidden")
        del self._by_name[name]


def _check_copies(copies: Doc) -> Doc:
    """DOCS develop/http-api/databases/#create-a-database and collections/#create-a-collection"""
    numbers = [copies.get(name, 1) for name in COPIES[:2]]
    if any(type(number) is not int or number < 1 for number in numbers) or numbers[1] > numbers[0]:
        raise Refusal(400, 10, "bad parameter: replicationFactor or writeConcern")
    if copies.get("sharding", "") not in ("", "flexible", "single"):
        raise Refusal(400, 10, "bad parameter: sharding")
    return copies


def _merge(old: Doc, new: Doc) -> Doc:
    """As mergeObjects says: objects within objects are merged, all else is replaced."""
    merged = dict(old)
    for name, value in new.items():
        there = merged.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            value = _merge(there, value)
        merged[name] = value
    return merged


def _meta(doc: Doc) -> Doc:
    return {name: doc[name] for name in ("_id", "_key", "_rev")}
