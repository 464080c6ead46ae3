"""Stores to test: SQLite in a directory, PostgreSQL in a database of a real server that the tests
start, ArangoDB in a database of a stand-in or a real server.

``NOMARR_TEST_ARANGO_URL=http://root:password@host:8529`` names a real server; the user must be
allowed to create databases. Every test has a database of its own there, dropped at its end.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.postgresql.statements import SCHEMAS
from nomarr_systemd.store.protocol import POLICY_LEDGER, Store
from tests.arango_standin.running import PASSWORD, Server, open_server, run_standin
from tests.support.forks import start_server
from tests.support.places import DATABASE, SECRET, ArangoOpener, Place
from tests.support.postgres import Postgres, run_postgres


@pytest.fixture(scope="session")
def forks() -> None:
    """The server that forks a test's processes, begun before the test looks for children."""
    start_server()


@pytest.fixture(scope="session")
def arango_server() -> Iterator[Server]:
    with open_server() as server:
        yield server


@pytest.fixture
def database(arango_server: Server) -> Iterator[str]:
    """The name of a database that does not exist yet."""
    name = f"nomarr_test_{uuid.uuid4().hex}"
    yield name
    arango_server.call("DELETE", f"/_api/database/{name}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A PostgreSQL for the whole session, with a database for tests."""
    with run_postgres() as running:
        running.server.sql(f"CREATE DATABASE {DATABASE}")
        yield running.server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Postgres:
    """The server, with nothing of ours in its database."""
    drop = f"DROP SCHEMA IF EXISTS {', '.join(SCHEMAS.values())} CASCADE"
    postgres_server.sql(drop, database=DATABASE)
    return postgres_server


@pytest.fixture
def empty_postgres(postgres_server: Postgres) -> Postgres:
    """The server with our tables, if they were made before, and no document in them."""
    tables = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname LIKE 'nomarr_%'"
    found = postgres_server.sql(tables, database=DATABASE)
    empty = "".join(f"DELETE FROM {schema}.{name};" for schema, name in found if name != "about")
    postgres_server.sql(f"SELECT; {empty}", database=DATABASE)
    return postgres_server


@pytest.fixture(params=["sqlite", "postgresql", "arango"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(str(tmp_path))
    if request.param == "postgresql":
        return Place(str(tmp_path), request.getfixturevalue("empty_postgres"), DATABASE)
    server = request.getfixturevalue("arango_server")
    return Place(str(tmp_path), server, request.getfixturevalue("database"))


@pytest.fixture
def open_store(place: Place) -> Iterator[Callable[..., Store]]:
    """Opens any number of handles on one store, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_one(*args: object, **options: object) -> Store:
            store = place.open(*args, **options)  # type: ignore[arg-type]
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    return open_store()


@pytest.fixture(scope="session")
def running_pair() -> Iterator[tuple[Server, Server]]:
    """Two stand-ins, even where there is a real server: they are told to misbehave."""
    options = (
        *("--account", f"app:{SECRET}:{DATABASE}", "--account", "guest:guest:elsewhere"),
        *("--account", f"worker:{SECRET}:{DATABASE}:{POLICY_LEDGER}"),
    )
    with run_standin(*options) as first, run_standin(*options) as second:
        yield first, second


@pytest.fixture
def pair(running_pair: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """Two healthy servers without the database; whatever hangs is let go in the end."""
    for server in running_pair:
        server.fault()
        server.call("DELETE", f"/_api/database/{DATABASE}")
    yield running_pair
    for server in running_pair:
        server.fault()


@pytest.fixture
def first(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture
def second(pair: tuple[Server, Server]) -> Server:
    return pair[1]


@pytest.fixture
def open_arango() -> Iterator[ArangoOpener]:
    """Opens a store on one or more servers, or their ports, and closes it."""
    with contextlib.ExitStack() as stack:

        def open_one(
            *servers: Server | int, user: str = "root", tls: bool = False, **options: Any
        ) -> ArangoStore:
            ports = [server if isinstance(server, int) else server.port for server in servers]
            url = ArangoUrl(user, tuple(("127.0.0.1", port) for port in ports), DATABASE, tls)
            options = {"password": PASSWORD, "timeout_s": 10, **options}
            store = ArangoStore(url, "policy", **options)
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port nobody listens on, kept for as long as the test runs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
