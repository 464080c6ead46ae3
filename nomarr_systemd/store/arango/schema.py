"""Makes the database, collections and indexes of one domain on first use.

Several hosts may do so at once, and in a cluster what one coordinator has made is seen by another a
little later: so a name that exists is fine, and what is not there yet is asked for again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.config.values import Copies
from nomarr_systemd.core.errors import BadDocument, StoreError, StoreRefused
from nomarr_systemd.store.arango.http import (
    DUPLICATE_NAME,
    NO_DATABASE,
    PAUSES_S,
    UNSETTLED,
    Link,
    number_of,
)
from nomarr_systemd.store.arango.queries import NOT_SYNCED
from nomarr_systemd.store.protocol import Collection

_TIMEOUT_S: Final = 10.0  # a cluster takes seconds to agree on a new collection


class Schema:
    """The collections of one domain. ``copies`` are for what is made from now on."""

    def __init__(
        self, link: Link, url: ArangoUrl, collections: Sequence[Collection], copies: Copies
    ) -> None:
        self._link = link
        self._url = url
        self._collections = collections
        self._copies = copies
        self._db = link.database(url.database)

    def make(self, password: str) -> None:
        """Make what is missing. Unknown indexes are kept: another host may run another version."""
        ends = time.monotonic() + _TIMEOUT_S
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                self._make(password)
                return
            except StoreError as error:
                if number_of(error) not in UNSETTLED or time.monotonic() > ends:
                    raise
            time.sleep(pause_s)

    def _make(self, password: str) -> None:
        there = self._list_collections(password)
        # Where all are on one shard, they have the copies of the database, and no others.
        copies = {} if self._copies.sharding == "single" else self._copies.given()
        copies.pop("sharding", None)
        for name, indexes in self._collections:
            documents = self._db.collection(name)
            if name not in there:
                sync = name not in NOT_SYNCED
                self._create(name, self._db.create_collection, name, sync=sync, **copies)
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

    def _list_collections(self, password: str) -> set[Any]:
        name = self._url.database

        def collections() -> set[Any]:
            return {known["name"] for known in self._db.collections()}

        for pause_s in PAUSES_S:
            try:
                return self._link.ask(name, collections, repeatable=True)
            except StoreRefused as error:
                if number_of(error) != NO_DATABASE:
                    raise
                self._create_database(password)
                time.sleep(pause_s)  # another coordinator may see it a little later
        return self._link.ask(name, collections, repeatable=True)

    def _create_database(self, password: str) -> None:
        user, database = self._url.user, self._url.database
        owner = {"username": user, "password": password}  # else only root could use it
        try:
            create = self._link.database("_system").create_database
            self._create(database, create, database, users=[owner], **self._copies.given())
        except StoreRefused as error:
            raise StoreRefused(
                f"ArangoDB at {self._link.where} has no database {database!r},"
                f" and user {user!r} may not create it",
                hint=f"in arangosh: {self._link.creation()}; {self._link.grant()}",
            ) from error

    def _create(self, what: str, make: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            with self._link.patience(_TIMEOUT_S):
                self._link.ask(what, lambda: make(*args, **options), repeatable=True)
        except BadDocument as error:
            raise StoreRefused(
                str(error),
                hint="replication_factor, write_concern and sharding under [store] must fit the"
                " cluster, and those of the database if it is there",
            ) from error.__cause__
        except StoreError as error:
            if number_of(error) != DUPLICATE_NAME:
                raise
