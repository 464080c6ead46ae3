"""The store of several hosts: documents in ArangoDB, by python-arango.

How a request reaches a host, and what becomes of its errors, is in ``arango.http``; where
the password comes from in ``secret``. What a document means is not known here.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.core.errors import (
    BadDocument,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.store.arango.http import DUPLICATE_NAME, NO_DATABASE, PAUSES_S, Link, number_of
from nomarr_systemd.store.protocol import (
    DOMAINS,
    POLICY_LEDGER,
    Doc,
    Domain,
    Equal,
    check_field,
    check_key,
    check_where,
    check_words,
    encode,
    new_keys,
)

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import ArangoUrl
    from nomarr_systemd.store.protocol import Publisher

_CREATE_TIMEOUT_S: Final = 10.0  # a cluster takes seconds to agree on a new collection
_BATCH: Final = 1000
_MAX_DEPTH: Final = 190  # the server's limit is "slightly below 200"
_NOT_SYNCED: Final = frozenset({"health_history", "stats"})
_REV: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ArangoStore:
    """``Store`` on ArangoDB; collections and indexes are made on first use. One per thread.

    A write whose answer was lost is a StoreUnavailable and may have been carried out. The ledger
    bears that: its caller reads again and finds the failure's invocation recorded, or records it.
    So does a claim, whose document names its owner.
    """

    def __init__(
        self,
        url: ArangoUrl,
        domain: Domain,
        *,
        password: str,
        ca_file: str | None = None,
        timeout_s: float = 2.0,
        publisher: Publisher | None = None,
    ) -> None:
        self._url = url
        self._password = password
        self._collections = DOMAINS[domain]
        self._publisher = publisher
        self._ready = False
        self._link = Link(url, password=password, ca_file=ca_file, timeout_s=timeout_s)
        self._db = self._link.database(url.database)

    def get(self, collection: str, key: str) -> Doc | None:
        check_key(key)
        documents = self._open(collection)
        doc = self._link.ask(f"{collection}/{key}", lambda: documents.get(key), repeatable=True)
        return _without_id(doc) if doc else None

    def insert(self, collection: str, doc: Doc) -> str:
        key = check_key(doc.get("_key"))
        new = {**_sendable(doc), "_key": key}
        documents = self._open(collection)
        done = self._link.settle(
            f"{collection}/{key}", lambda: documents.insert(new, sync=_synced(collection))
        )
        self._written(collection, key)
        return str(done["_rev"])

    def replace(self, collection: str, doc: Doc) -> str:
        key, rev = check_key(doc.get("_key")), doc.get("_rev")
        new = {**_sendable(doc), "_key": key, "_rev": rev}
        documents = self._open(collection)
        # Without a revision in the body the server would replace whatever is there.
        if not isinstance(rev, str) or not _REV.fullmatch(rev):
            raise StaleRevision(f"{collection}/{key}: {rev!r:.80} is no revision")
        done = self._link.ask(
            f"{collection}/{key}",
            lambda: documents.replace(new, check_rev=True, sync=_synced(collection)),
        )
        self._written(collection, key)
        return str(done["_rev"])

    def delete(self, collection: str, key: str, rev: str | None = None) -> bool:
        check_key(key)
        documents = self._open(collection)
        what = f"{collection}/{key}"
        options = {"ignore_missing": True, "silent": True, "sync": _synced(collection)}
        if rev is None:
            gone = self._link.settle(what, lambda: documents.delete(key, **options))
        elif _REV.fullmatch(rev):
            gone = self._link.ask(what, lambda: documents.delete(key, rev=rev, **options))
        else:
            raise StaleRevision(f"{what}: {rev!r:.80} is no revision")
        if gone:
            self._written(collection, key)
        return bool(gone)

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
        bound: dict[str, Any] = {"@documents": collection, "order": check_field(order)}
        query = "FOR d IN @@documents"
        for number, (field, value) in enumerate(check_where(where).items()):
            _check_values([value], field)
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": field, f"value{number}": value}
        if after is not None:
            query += " FILTER d._key > @after"
            bound["after"] = after
        direction = "DESC" if descending else "ASC"
        query += f" SORT d.@order {direction}, d._key {direction}"
        if limit is not None:
            query += " LIMIT @limit"
            bound["limit"] = max(0, limit)
        query += " RETURN d"
        self._open(collection)
        execute = self._db.aql.execute
        cursor = self._link.ask(
            collection,
            lambda: execute(query, bind_vars=bound, batch_size=_BATCH),
            repeatable=True,
        )
        docs = list(cursor.batch())
        while cursor.has_more():  # read to its end, a cursor is closed by the server itself
            # Not repeatable: asked for twice, a batch would be skipped.
            docs += self._link.ask(collection, cursor.fetch)["batch"]
        return [_without_id(doc) for doc in docs]

    def count(self, collection: str, where: Equal) -> int:
        bound: dict[str, Any] = {"@documents": collection}
        query = "FOR d IN @@documents"
        for number, (field, value) in enumerate(check_words(where).items()):
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": field, f"value{number}": value}
        query += " COLLECT WITH COUNT INTO n RETURN n"
        self._open(collection)
        execute = self._db.aql.execute
        cursor = self._link.ask(
            collection, lambda: execute(query, bind_vars=bound), repeatable=True
        )
        return int(next(iter(cursor.batch())))

    def add(self, collection: str, docs: Sequence[Doc]) -> int:
        rows = [{**_sendable(doc), "_key": check_key(doc.get("_key"))} for doc in docs]
        documents = self._open(collection)
        if not rows:
            return 0
        done = self._link.settle(
            collection,
            lambda: documents.import_bulk(rows, on_duplicate="ignore", sync=_synced(collection)),
        )
        if done["created"] + done["ignored"] != len(rows):
            raise StoreUnavailable(
                f"ArangoDB at {self._link.where} took {done['created']} of {len(rows)} documents"
                f" for {collection}: {str(done.get('details'))[:200]}"
            )
        for row in rows:
            self._written(collection, row["_key"])
        return int(done["created"])

    def append(self, collection: str, docs: Sequence[Doc]) -> None:
        keys = new_keys(len(docs))
        rows = [{**_sendable(doc), "_key": key} for key, doc in zip(keys, docs, strict=True)]
        documents = self._open(collection)
        if not rows:
            return
        done = self._link.settle(
            collection,
            lambda: documents.import_bulk(rows, halt_on_error=True, sync=_synced(collection)),
        )
        if done["created"] != len(rows):
            raise StoreUnavailable(
                f"ArangoDB at {self._link.where} kept {done['created']} of {len(rows)} documents"
                f" appended to {collection}: {str(done.get('details'))[:200]}"
            )

    def prune(self, collection: str, field: str, below: int) -> int:
        query = (
            "FOR d IN @@documents"
            " FILTER d.@field < @below FILTER IS_NUMBER(d.@field)"  # null and false are less, too
            " REMOVE d IN @@documents"
        )
        _check_values([below], field)
        bound = {"@documents": collection, "field": check_field(field), "below": below}
        self._open(collection)
        execute = self._db.aql.execute
        cursor = self._link.settle(collection, lambda: execute(query, bind_vars=bound))
        return int(cursor.statistics()["modified"])

    def batch(self) -> AbstractContextManager[None]:
        """Nothing to put together here: each write is a request, durable when it is answered."""
        return contextlib.nullcontext()

    def publish_all(self) -> None:
        keys = [doc["_key"] for doc in self.find(POLICY_LEDGER)]
        for key in keys:
            self._publish(key)
        if self._publisher is not None:
            self._publisher.remove_others(keys)

    def close(self) -> None:
        self._link.close()

    def _open(self, collection: str) -> Any:
        if not any(collection == known.name for known in self._collections):
            raise StoreError(f"{self._url.database} has no collection {collection!r:.80}")
        if not self._ready:
            self._make_schema()
            self._ready = True
        return self._db.collection(collection)

    def _make_schema(self) -> None:
        """Create what is missing. Eight processes may do so at once: a name taken is fine.

        Indexes that are not wanted stay: another host may run another version.
        """
        there = {known["name"] for known in self._list_collections()}
        for name, indexes in self._collections:
            documents = self._db.collection(name)
            if name not in there:
                self._create(name, self._db.create_collection, name, sync=bool(_synced(name)))
            known = self._link.ask(name, documents.indexes, repeatable=True) if indexes else []
            indexed = [index["fields"] for index in known]
            for fields in indexes:
                # With the key last, an index yields the order that find() promises.
                wanted = {"type": "persistent", "fields": [*fields, "_key"]}
                if wanted["fields"] not in indexed:
                    self._create(name, documents.add_index, wanted)

    def _list_collections(self) -> list[dict[str, Any]]:
        name, collections = self._url.database, self._db.collections
        for pause_s in PAUSES_S:
            try:
                return self._link.ask(name, collections, repeatable=True)
            except StoreRefused as error:
                if number_of(error) != NO_DATABASE:
                    raise
                self._create_database()
                time.sleep(pause_s)  # another coordinator may hear of it a little later
        return self._link.ask(name, collections, repeatable=True)

    def _create_database(self) -> None:
        user, database = self._url.user, self._url.database
        owner = {"username": user, "password": self._password}  # else it would be root's alone
        try:
            create = self._link.database("_system").create_database
            self._create(database, create, database, users=[owner])
        except StoreRefused as error:
            raise StoreRefused(
                f"ArangoDB at {self._link.where} has no database {database!r},"
                f" and user {user!r} may not create it",
                hint=f'in arangosh: db._createDatabase("{database}"); {self._link.grant()}',
            ) from error

    def _create(self, what: str, make: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            with self._link.patience(_CREATE_TIMEOUT_S):
                self._link.ask(what, lambda: make(*args, **options), repeatable=True)
        except StoreError as error:
            if number_of(error) != DUPLICATE_NAME:
                raise

    def _written(self, collection: str, key: str) -> None:
        if collection == POLICY_LEDGER:
            self._publish(key)

    def _publish(self, key: str) -> None:
        if self._publisher is not None:
            self._publisher.publish(key, lambda: self._text(key))

    def _text(self, key: str) -> str | None:
        doc = self.get(POLICY_LEDGER, key)
        return encode(doc) if doc else None


def _synced(collection: str) -> bool | None:
    """True where an answered write must survive a power cut; None leaves it to the collection."""
    return None if collection in _NOT_SYNCED else True


def _sendable(doc: Doc) -> dict[str, Any]:
    """The document's own fields as they would come back from its JSON text."""
    body: dict[str, Any] = json.loads(encode(doc))
    _check_values([body], doc.get("_key"))
    return body


def _check_values(values: list[Any], name: object) -> None:
    """Refuse what the server would alter or reject: integers beyond 64 bits, deep nesting."""
    for _ in range(_MAX_DEPTH + 1):
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
    raise BadDocument(f"{name!r:.80} is nested deeper than {_MAX_DEPTH} levels")


def _without_id(doc: Doc) -> Doc:
    doc.pop("_id", None)
    return doc
