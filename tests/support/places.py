"""Where a store under test is kept, in a form that a child process can be told; and helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.ledger.public import Publisher
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.protocol import Doc, Domain, Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.arango_standin.running import Server

ArangoOpener = Callable[..., ArangoStore]
DATABASE = "nomarr"  # on stand-ins of a test's own
SECRET = "Pässwörd €"  # of the user ``app`` there


class Place(NamedTuple):
    """A directory for SQLite, or a server's database for ArangoDB."""

    directory: str
    server: Server | None = None
    database: str = ""

    def open(self, domain: Domain = "policy", *, publisher: Publisher | None = None) -> Store:
        if self.server is None:
            return SqliteStore(self.directory, domain, publisher=publisher)
        server = self.server
        url = ArangoUrl(server.user, ((server.host, server.port),), self.database, tls=False)
        # Patient, for a machine that is busy with eight processes.
        return ArangoStore(url, domain, password=server.password, timeout_s=20, publisher=publisher)


def dump_place(place: Place) -> str:
    return json.dumps(place)


def load_place(text: str) -> Place:
    directory, server, database = json.loads(text)
    return Place(directory, Server(*server) if server else None, database)


def keys_of(docs: list[Doc]) -> list[str]:
    return [doc["_key"] for doc in docs]


def own(doc: Doc | None) -> Doc:
    """The document without what the store adds; it must be there and have no ``_id``."""
    assert doc is not None
    assert "_id" not in doc
    return {name: value for name, value in doc.items() if not name.startswith("_")}
