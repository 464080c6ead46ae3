"""Where a store under test is kept, in a form that a child process can be told; and helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from nomarr_systemd.config.store_url import ArangoUrl, PostgresUrl
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import Doc, Domain, Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.arango_standin.running import Server
from tests.support.postgres import ADMIN, Postgres

ArangoOpener = Callable[..., ArangoStore]
DATABASE = "nomarr"  # on stand-ins of a test's own
SECRET = "Pässwörd €"  # of the user ``app`` there


class Place(NamedTuple):
    """A directory for SQLite, or a server's database for ArangoDB or PostgreSQL."""

    directory: str
    server: Server | Postgres | None = None
    database: str = ""

    def open(self, domain: Domain = "policy", *, publisher: Publisher | None = None) -> Store:
        # Patient, for a machine that is busy with eight processes.
        server = self.server
        if server is None:
            return SqliteStore(self.directory, domain, publisher=publisher, patience_s=20)
        patience: dict[str, Any] = {"timeout_s": 20, "publisher": publisher}
        hosts = ((server.host, server.port),)
        if isinstance(server, Postgres):
            at = PostgresUrl(ADMIN, hosts, self.database, tls=False)
            return PostgresStore(at, domain, password=server.password, **patience)
        url = ArangoUrl(server.user, hosts, self.database, tls=False)
        return ArangoStore(url, domain, password=server.password, **patience)


def dump_place(place: Place) -> str:
    return json.dumps((*place, isinstance(place.server, Postgres)))


def load_place(text: str) -> Place:
    directory, server, database, is_postgres = json.loads(text)
    kind: type[Server | Postgres] = Postgres if is_postgres else Server
    return Place(directory, kind(*server) if server else None, database)


def keys_of(docs: list[Doc]) -> list[str]:
    return [doc["_key"] for doc in docs]


def own(doc: Doc | None) -> Doc:
    """The document without what the store adds; it must be there and have no ``_id``."""
    assert doc is not None
    assert "_id" not in doc
    return {name: value for name, value in doc.items() if not name.startswith("_")}
