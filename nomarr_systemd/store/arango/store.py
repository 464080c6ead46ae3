"""The store of several hosts: documents in ArangoDB, by python-arango.

Requests, hosts and errors are in ``arango.http``, the password is read in ``secret``. The meaning
of documents is not known here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.core.errors import (
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.store.arango.documents import (
    REV,
    check_document,
    check_values,
    read_details,
    read_number,
    read_rev,
    to_body,
)
from nomarr_systemd.store.arango.http import (
    DUPLICATE_NAME,
    NO_DATABASE,
    PAUSES_S,
    UNSETTLED,
    Link,
    number_of,
)
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
# The largest answer in bytes, and the number of documents in one answer, chosen so that they fit:
# an account has 460 kB at most, a job 1.2 MB.
_MOST: Final[dict[Domain, int]] = {"policy": 4 << 20, "work": 64 << 20}
_BATCH: Final[dict[Domain, int]] = {"policy": 8, "work": 50}
_MOST_FOUND: Final = 128 << 20  # bytes of all answers to one find(): 4096 usual accounts are less
_FIND_TIMES: Final = 5  # all of find() may take this many time-outs
_NOT_SYNCED: Final = frozenset({"health_history"})


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
        publisher: Publisher | None = None,
    ) -> None:
        self._url = url
        self._password = password
        self._collections = DOMAINS[domain]
        self._batch = _BATCH[domain]
        self._find_s = _FIND_TIMES * timeout_s
        self._is_away = False  # the last document to be published could not be read
        self._publisher = publisher
        self._ready = False
        self._link = Link(
            url, password=password, ca_file=ca_file, timeout_s=timeout_s, most=_MOST[domain]
        )
        self._db = self._link.database(url.database)

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
        self._written(collection, key)
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
        self._written(collection, key)
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
        bound: dict[str, Any] = {"@documents": collection}
        query = "FOR d IN @@documents"
        for number, (field, value) in enumerate(check_where(where).items()):
            check_values([value], field)
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": field, f"value{number}": value}
        if after is not None:
            query += " FILTER d._key > @after"
            bound["after"] = after
        direction = "DESC" if descending else "ASC"
        if check_field(order) == "_key":
            query += f" SORT d._key {direction}"  # twice, no index would serve it
        else:
            query += f" SORT d.@order {direction}, d._key {direction}"
            bound["order"] = order
        if limit is not None:
            query += " LIMIT @limit"
            bound["limit"] = max(0, limit)
        query += " RETURN d"
        self._open(collection)
        execute = self._db.aql.execute
        batch = self._batch if limit is None else max(1, min(limit, self._batch))

        def begin() -> tuple[Any, list[Doc]]:
            cursor = execute(query, bind_vars=bound, batch_size=batch)
            return cursor, [check_document(doc) for doc in cursor.batch()]

        ends, received = time.monotonic() + self._find_s, self._link.received
        cursor, docs = self._link.ask(collection, begin, repeatable=True)
        while self._link.ask(collection, cursor.has_more):  # the server closes it at its end
            # Not repeatable: asked for twice, a batch would be skipped.
            page = self._link.ask(
                collection, lambda: [check_document(doc) for doc in cursor.fetch()["batch"]]
            )
            docs += page
            is_late = time.monotonic() > ends or self._link.received - received > _MOST_FOUND
            if not page or is_late:
                raise self._link.strange(f"{collection} (too large, or without an end)")
        if limit is not None and len(docs) > max(0, limit):
            raise self._link.strange(collection)
        return docs

    def first(self, collection: str, where: Equal) -> Doc | None:  # noqa: ARG002 (the contract's)
        raise StoreError("ArangoDB holds no documents: each write is a request of its own")

    def count(self, collection: str, where: Equal) -> int:
        bound: dict[str, Any] = {"@documents": collection}
        query = "FOR d IN @@documents"
        for number, (field, value) in enumerate(check_words(where).items()):
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": field, f"value{number}": value}
        query += " COLLECT WITH COUNT INTO n RETURN n"
        self._open(collection)
        execute = self._db.aql.execute

        def read() -> int:
            (number,) = execute(query, bind_vars=bound).batch()
            return read_number(number)

        return self._link.ask(collection, read, repeatable=True)

    def tally(self, collection: str, where: Equal, field: str) -> dict[str, int]:
        bound: dict[str, Any] = {"@documents": collection, "counted": check_field(field)}
        query = "FOR d IN @@documents"
        for number, (name, value) in enumerate(check_words(where).items()):
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": name, f"value{number}": value}
        query += " COLLECT value = d.@counted WITH COUNT INTO n RETURN [value, n]"
        self._open(collection)
        execute = self._db.aql.execute

        def read() -> dict[str, int]:
            rows = execute(query, bind_vars=bound, batch_size=1000).batch()
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
            self._written(collection, row["_key"])
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
        query = "FOR d IN @@documents"
        check_values([below], field)
        bound: dict[str, Any] = {"@documents": collection, "field": check_field(field)}
        bound["below"] = below
        for number, (name, value) in enumerate(check_where(where).items()):
            query += f" FILTER d.@field{number} == @value{number}"
            bound |= {f"field{number}": name, f"value{number}": value}
        # Null and false are less than any number, too.
        query += " FILTER d.@field < @below FILTER IS_NUMBER(d.@field) REMOVE d IN @@documents"
        self._open(collection)
        execute = self._db.aql.execute
        return self._link.settle(
            collection,
            lambda: read_number(execute(query, bind_vars=bound).statistics()["modified"]),
        )

    def now_ms(self) -> int:
        self._open(self._collections[0].name)
        execute = self._db.aql.execute

        def read() -> int:
            (number,) = execute("RETURN DATE_NOW()").batch()
            return read_number(number)

        return self._link.ask("the clock", read, repeatable=True)

    def may_read(self, collection: str) -> bool:
        """True if our user may read a collection, of any domain."""
        documents = self._db.collection(collection)
        try:
            self._link.ask(collection, lambda: documents.get("none"), repeatable=True)
        except StoreRefused:
            return False
        return True

    def batch(self) -> AbstractContextManager[None]:
        """Does nothing: each write is a request of its own, durable when it is answered."""
        return contextlib.nullcontext()

    def publish_all(self) -> None:
        keys = [doc["_key"] for doc in self.find(POLICY_LEDGER)]
        for key in keys:
            self._publish(key)
            if self._is_away:
                raise StoreUnavailable(f"ArangoDB at {self._link.where} went away")
        if self._publisher is not None:
            self._publisher.remove_others(keys)

    def close(self) -> None:
        self._link.close()

    def _open(self, collection: str) -> Any:
        if not any(collection == known.name for known in self._collections):
            raise StoreError(f"{self._url.database} has no collection {collection!r:.80}")
        if not self._ready:
            self._begin()
            self._ready = True
        return self._db.collection(collection)

    def _begin(self) -> None:
        """Make the schema. Another host may be doing the same, and in a cluster what one
        coordinator has made is seen by another a little later: so it is tried again."""
        ends = time.monotonic() + _CREATE_TIMEOUT_S
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                self._make_schema()
                return
            except StoreError as error:
                if number_of(error) not in UNSETTLED or time.monotonic() > ends:
                    raise
            time.sleep(pause_s)

    def _make_schema(self) -> None:
        """Create what is missing. Several processes may do so at once: a name that exists is fine.

        Unknown indexes are kept: another host may run another version.
        """
        there = self._list_collections()
        for name, indexes in self._collections:
            documents = self._db.collection(name)
            if name not in there:
                self._create(name, self._db.create_collection, name, sync=bool(_synced(name)))
            indexed = self._list_indexes(name, documents) if indexes else []
            for fields in indexes:
                # With the key last, an index yields the order that find() promises.
                wanted = {"type": "persistent", "fields": [*fields, "_key"]}
                if wanted["fields"] not in indexed:
                    self._create(name, documents.add_index, wanted)

    def _list_indexes(self, name: str, documents: Any) -> list[Any]:
        return self._link.ask(
            name, lambda: [index["fields"] for index in documents.indexes()], repeatable=True
        )

    def _list_collections(self) -> set[Any]:
        name = self._url.database

        def collections() -> set[Any]:
            return {known["name"] for known in self._db.collections()}

        for pause_s in PAUSES_S:
            try:
                return self._link.ask(name, collections, repeatable=True)
            except StoreRefused as error:
                if number_of(error) != NO_DATABASE:
                    raise
                self._create_database()
                time.sleep(pause_s)  # another coordinator may see it a little later
        return self._link.ask(name, collections, repeatable=True)

    def _create_database(self) -> None:
        user, database = self._url.user, self._url.database
        owner = {"username": user, "password": self._password}  # else only root could use it
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
            self._publisher.publish([key], self._text)

    def _text(self, key: str) -> str | None:
        self._is_away = True
        doc = self.get(POLICY_LEDGER, key)
        self._is_away = False
        return encode(doc) if doc else None


def _synced(collection: str) -> bool | None:
    """True where an answered write must survive a power cut; None leaves it to the collection."""
    return None if collection in _NOT_SYNCED else True
