"""The store of several hosts: documents in ArangoDB, by python-arango.

Requests, hosts and errors are in ``arango.http``, the password is read in ``secret``. The meaning
of documents is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.config.values import Copies
from nomarr_systemd.core.errors import (
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.store.arango import queries
from nomarr_systemd.store.arango.documents import (
    REV,
    check_document,
    read_details,
    read_number,
    read_rev,
    to_body,
)
from nomarr_systemd.store.arango.http import Link
from nomarr_systemd.store.arango.queries import Query
from nomarr_systemd.store.arango.schema import Schema
from nomarr_systemd.store.protocol import (
    DOMAINS,
    MOST_FOUND,
    POLICY_LEDGER,
    Doc,
    Domain,
    Equal,
    check_key,
    encode,
    in_portions,
    new_keys,
)
from nomarr_systemd.store.publication import Publication

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import ArangoUrl
    from nomarr_systemd.store.protocol import Publisher

# The largest answer in bytes, and the number of documents in one answer, chosen so that they fit:
# an account has 460 kB at most, a job 1.2 MB.
_MOST: Final[dict[Domain, int]] = {"policy": 4 << 20, "work": 64 << 20}
_BATCH: Final[dict[Domain, int]] = {"policy": 8, "work": 50}
_FIND_TIMES: Final = 5  # all of find() may take this many time-outs
_NO_COPIES: Final = Copies()


class ArangoStore:
    """``Store`` on ArangoDB; collections and indexes are made on first use. One per thread.

    A write whose answer was lost is a StoreUnavailable and may have been carried out. The ledger
    tolerates that: its caller reads again and finds the failure's invocation recorded, or records
    it. So does a claim, whose document names its owner.
    """

    can_hold = False

    def __init__(
        self,
        url: ArangoUrl,
        domain: Domain,
        *,
        password: str,
        ca_file: str | None = None,
        timeout_s: float = 2.0,
        copies: Copies = _NO_COPIES,
        publisher: Publisher | None = None,
        most: int = MOST_FOUND,
    ) -> None:
        self._url = url
        self._password = password
        self._collections = {collection.name for collection in DOMAINS[domain]}
        self._batch = _BATCH[domain]
        self._find_s = _FIND_TIMES * timeout_s
        self._most = most
        self._publisher = publisher
        self._publication = Publication(publisher, self._read_bodies, self.get)
        self._ready = False
        self._link = Link(
            url,
            password=password,
            ca_file=ca_file,
            timeout_s=timeout_s,
            most=min(_MOST[domain], most),
            copies=copies,
        )
        self._db = self._link.database(url.database)
        self._schema = Schema(self._link, url, DOMAINS[domain], copies)

    def get(self, collection: str, key: str) -> Doc | None:
        check_key(key)
        documents = self._open(collection)

        def read() -> Doc | None:
            doc = documents.get(key)
            return None if doc is None else check_document(doc, key)

        return self._link.ask(f"{collection}/{key}", read, repeatable=True)

    def insert(self, collection: str, doc: Doc) -> str:
        key = check_key(doc.get("_key"))
        new = {**to_body(doc), "_key": key}
        documents = self._open(collection)
        rev = self._link.settle(
            f"{collection}/{key}", lambda: read_rev(documents.insert(new, sync=_synced(collection)))
        )
        self._publication.written(collection, key)
        return rev

    def replace(self, collection: str, doc: Doc) -> str:
        key, rev = check_key(doc.get("_key")), doc.get("_rev")
        new = {**to_body(doc), "_key": key, "_rev": rev}
        documents = self._open(collection)
        # Without a revision in the body the server would replace whatever is there.
        if not isinstance(rev, str) or not REV.fullmatch(rev):
            raise StaleRevision(f"{collection}/{key}: {rev!r:.80} is no revision")
        rev = self._link.ask(
            f"{collection}/{key}",
            lambda: read_rev(documents.replace(new, check_rev=True, sync=_synced(collection))),
        )
        self._publication.written(collection, key)
        return rev

    def delete(self, collection: str, key: str, rev: str | None = None) -> bool:
        check_key(key)
        documents = self._open(collection)
        what = f"{collection}/{key}"
        options = {"ignore_missing": True, "silent": True, "sync": _synced(collection)}
        if rev is None:
            gone = self._link.settle(what, lambda: documents.delete(key, **options))
        elif REV.fullmatch(rev):
            gone = self._link.ask(what, lambda: documents.delete(key, rev=rev, **options))
        else:
            raise StaleRevision(f"{what}: {rev!r:.80} is no revision")
        if gone:
            self._publication.written(collection, key)
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
        query = queries.find(
            collection, where, order=order, descending=descending, limit=limit, after=after
        )
        docs = self._find(collection, query, limit)
        if limit is not None and len(docs) > max(0, limit):
            raise self._link.strange(collection)
        return docs

    def _find(self, collection: str, query: Query, limit: int | None = None) -> list[Doc]:
        self._open(collection)
        execute = self._db.aql.execute
        batch = self._batch if limit is None else max(1, min(limit, self._batch))

        def begin() -> tuple[Any, list[Doc]]:
            cursor = execute(query.text, bind_vars=query.bound, batch_size=batch)
            return cursor, [check_document(doc) for doc in cursor.batch()]

        ends, received = time.monotonic() + self._find_s, self._link.received
        cursor, docs = self._link.ask(collection, begin, repeatable=True)
        while self._link.ask(collection, cursor.has_more):  # the server closes it at its end
            # Not repeatable: asked for twice, a batch would be skipped.
            page = self._link.ask(
                collection, lambda: [check_document(doc) for doc in cursor.fetch()["batch"]]
            )
            docs += page
            is_late = time.monotonic() > ends or self._link.received - received > self._most
            if not page or is_late:
                raise self._link.strange(f"{collection} (too large, or without an end)")
        return docs

    def first(self, collection: str, where: Equal, limit: int = 1) -> list[Doc]:  # noqa: ARG002
        raise self._holds_nothing()

    def insert_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:  # noqa: ARG002
        raise self._holds_nothing()

    def replace_all(self, collection: str, docs: Sequence[Doc]) -> list[str]:  # noqa: ARG002
        raise self._holds_nothing()

    def _holds_nothing(self) -> StoreError:
        return StoreError("ArangoDB holds no documents: each write is a request of its own")

    def count(self, collection: str, where: Equal) -> int:
        query = queries.count(collection, where)
        self._open(collection)
        execute = self._db.aql.execute

        def read() -> int:
            (number,) = execute(query.text, bind_vars=query.bound).batch()
            return read_number(number)

        return self._link.ask(collection, read, repeatable=True)

    def tally(self, collection: str, where: Equal, field: str) -> dict[str, int]:
        query = queries.tally(collection, where, field)
        self._open(collection)
        execute = self._db.aql.execute

        def read() -> dict[str, int]:
            rows = execute(query.text, bind_vars=query.bound, batch_size=1000).batch()
            return {value: read_number(n) for value, n in rows if isinstance(value, str)}

        return self._link.ask(collection, read, repeatable=True)

    def add(self, collection: str, docs: Sequence[Doc]) -> int:
        rows = [{**to_body(doc), "_key": check_key(doc.get("_key"))} for doc in docs]
        documents = self._open(collection)
        if not rows:
            return 0

        def load() -> tuple[int, int, str]:
            done = documents.import_bulk(rows, on_duplicate="ignore", sync=_synced(collection))
            return read_number(done["created"]), read_number(done["ignored"]), read_details(done)

        created, ignored, details = self._link.settle(collection, load)
        if created + ignored != len(rows):
            raise StoreUnavailable(
                f"ArangoDB at {self._link.where} took {created} of {len(rows)} documents"
                f" for {collection}: {details}"
            )
        for row in rows:
            self._publication.written(collection, row["_key"])
        return created

    def append(self, collection: str, docs: Sequence[Doc]) -> None:
        keys = new_keys(len(docs))
        rows = [{**to_body(doc), "_key": key} for key, doc in zip(keys, docs, strict=True)]
        documents = self._open(collection)
        if not rows:
            return

        def load() -> tuple[int, str]:
            done = documents.import_bulk(rows, halt_on_error=True, sync=_synced(collection))
            return read_number(done["created"]), read_details(done)

        created, details = self._link.settle(collection, load)
        if created != len(rows):
            raise StoreUnavailable(
                f"ArangoDB at {self._link.where} kept {created} of {len(rows)} documents"
                f" appended to {collection}: {details}"
            )

    def prune(self, collection: str, field: str, below: int, where: Equal | None = None) -> int:
        return self._change(collection, queries.prune(collection, field, below, where))

    def update(self, collection: str, where: Equal, fields: Doc) -> int:
        return self._change(collection, queries.update(collection, where, fields))

    def _change(self, collection: str, query: Query) -> int:
        self._open(collection)
        execute = self._db.aql.execute

        def change() -> int:
            done = execute(query.text, bind_vars=query.bound).statistics()
            return read_number(done["modified"])

        return in_portions(lambda: self._link.settle(collection, change))

    def now_ms(self) -> int:
        self._make_ready()
        execute = self._db.aql.execute

        def read() -> int:
            (number,) = execute("RETURN DATE_NOW()").batch()
            return read_number(number)

        return self._link.ask("the clock", read, repeatable=True)

    def may_read(self, collection: str) -> bool:
        """Return True if our user may read a collection, of any domain."""
        documents = self._db.collection(collection)
        try:
            self._link.ask(collection, lambda: documents.get("none"), repeatable=True)
        except StoreRefused:
            return False
        return True

    def batch(self) -> AbstractContextManager[None]:
        """Only publishes at its end what was written in it: each write is a request of its own,
        durable when it is answered."""
        return self._publication.batch(always=True)

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

    def _open(self, collection: str) -> Any:
        if collection not in self._collections:
            raise StoreError(f"{self._url.database} has no collection {collection!r:.80}")
        self._make_ready()
        return self._db.collection(collection)

    def _make_ready(self) -> None:
        if not self._ready:
            self._schema.make(self._password)
            self._ready = True

    def _read_bodies(self, keys: list[str]) -> dict[str, str]:
        if len(keys) == 1:
            docs = [doc for doc in [self.get(POLICY_LEDGER, keys[0])] if doc is not None]
        else:
            docs = self._find(POLICY_LEDGER, queries.find_keys(POLICY_LEDGER, keys))
        return {doc["_key"]: encode(doc) for doc in docs}


def _synced(collection: str) -> bool | None:
    """True where an answered write must survive a power cut; None leaves it to the collection."""
    return None if collection in queries.NOT_SYNCED else True
