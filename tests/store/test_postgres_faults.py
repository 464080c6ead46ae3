"""PostgreSQL's host hangs, answers late, is cut off, fails over, is full or hostile: each call ends
in time, the message names what happened, and the next call works as soon as the server does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nomarr_systemd.config.store_url import PostgresUrl
from nomarr_systemd.core.errors import KeyExists, StoreRefused, StoreUnavailable
from nomarr_systemd.store.postgresql import session
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import Domain, Store
from tests.support.places import DATABASE
from tests.support.postgres import (
    ADMIN,
    PASSWORD,
    Postgres,
    Running,
    free_port,
    give,
    run_postgres,
)
from tests.support.tcp_proxy import Proxy, run_proxy

TIMEOUT_S = 2.0
HANGS_S = 20.0  # a call that takes longer waits for something without a deadline
Opener = Callable[..., PostgresStore]


@pytest.fixture
def open_at() -> Iterator[Opener]:
    """Opens a store on ports of this host, with the time-out of the failure path."""
    with contextlib.ExitStack() as stack:

        def open_one(
            *ports: int,
            host: str = "127.0.0.1",
            domain: Domain = "policy",
            password: str = PASSWORD,
            timeout_s: float = TIMEOUT_S,
        ) -> PostgresStore:
            url = PostgresUrl(ADMIN, tuple((host, port) for port in ports), DATABASE, tls=False)
            store = PostgresStore(url, domain, password=password, timeout_s=timeout_s)
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[Proxy]:
    with run_proxy(postgres.port) as running:
        yield running


def took_s(call: Callable[[], object]) -> float:
    """The seconds until the call ends with StoreUnavailable, which names the time-out."""
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"did not answer: .*in time"):
        call()
    return time.monotonic() - begun


class TestNetwork:
    @pytest.mark.parametrize("mode", ["dead", "silent"])
    def test_a_connection_that_says_nothing_more(
        self, proxy: Proxy, open_at: Opener, mode: str
    ) -> None:
        """Half-open, or an answer that takes 5 s: the caller has its answer after 2."""
        store = open_at(proxy.port)
        store.insert("meta", {"_key": "a"})
        for call in (
            lambda: store.get("meta", "a"),
            lambda: store.insert("meta", {"_key": "b"}),
            lambda: store.find("meta"),
        ):
            assert store.get("meta", "a")
            proxy.mode = mode  # type: ignore[assignment]
            assert TIMEOUT_S * 0.9 < took_s(call) < HANGS_S
            proxy.mode = "pass"
        assert store.get("meta", "a")

    def test_a_connection_that_was_idle_is_asked_first(
        self, proxy: Proxy, postgres: Postgres, open_at: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The host is gone without a word, the next one has taken over: nothing is lost."""
        monkeypatch.setattr(session, "_TRUSTED_S", -1.0)
        store = open_at(proxy.port, postgres.port)
        store.insert("meta", {"_key": "a"})
        proxy.mode = "dead"
        store.insert("meta", {"_key": "b"})
        assert len(store.find("meta")) == 2

    @pytest.mark.parametrize("within", [False, True])
    def test_an_answer_that_is_lost(self, proxy: Proxy, open_at: Opener, *, within: bool) -> None:
        """The write was carried out, the caller does not know, and who reads finds out; in a batch
        nothing was."""
        store = open_at(proxy.port)
        store.get("meta", "a")
        proxy.mode = "cut"
        with (
            pytest.raises(StoreUnavailable, match="did not answer"),
            store.batch() if within else contextlib.nullcontext(),
        ):
            store.insert("meta", {"_key": "a"})
        proxy.mode = "pass"
        assert (store.get("meta", "a") is None) is within
        if not within:
            with pytest.raises(KeyExists):
                store.insert("meta", {"_key": "a"})

    def test_no_statement_of_a_lost_batch_goes_on_alone(
        self, proxy: Proxy, open_at: Opener
    ) -> None:
        store = open_at(proxy.port)
        store.get("meta", "a")

        def write() -> None:
            with store.batch():
                store.insert("meta", {"_key": "a"})
                proxy.mode = "cut"
                with pytest.raises(StoreUnavailable):
                    store.insert("meta", {"_key": "b"})
                proxy.mode = "pass"
                store.insert("meta", {"_key": "c"})

        with pytest.raises(StoreUnavailable, match="in the middle of a transaction"):
            write()
        assert store.find("meta") == []

    def test_a_read_is_repeated_where_the_connection_was_closed(
        self, postgres: Postgres, open_at: Opener
    ) -> None:
        store = open_at(postgres.port)
        store.insert("meta", {"_key": "a"})
        # Until the process is gone: it is a while after the signal.
        end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        postgres.sql(f"{end} WHERE application_name = 'nomarr'")
        assert store.get("meta", "a")
        postgres.sql(f"{end} WHERE application_name = 'nomarr'")
        store.insert("meta", {"_key": "b"})  # it is seen before anything is sent

    def test_hosts_that_refuse_or_hear_nothing_are_passed_over(
        self, proxy: Proxy, postgres: Postgres, open_at: Opener, refusing: int
    ) -> None:
        proxy.mode = "dead"
        store = open_at(refusing, proxy.port, postgres.port, timeout_s=6.0)
        store.insert("meta", {"_key": "a"})
        asked = proxy.connections
        assert store.get("meta", "a")
        assert proxy.connections == asked  # the one that answered is used on

    def test_nobody_listens(self, open_at: Opener, refusing: int) -> None:
        with pytest.raises(StoreUnavailable, match="refused"):
            open_at(refusing).get("meta", "a")

    def test_a_name_that_leads_nowhere(self, open_at: Opener) -> None:
        with pytest.raises(StoreUnavailable, match=r"host\.invalid"):
            open_at(5432, host="host.invalid").get("meta", "a")

    def test_a_resolver_that_hangs(self, open_at: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        released = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait() and [])
        store = open_at(5432, host="db.example")
        try:
            with pytest.raises(StoreUnavailable, match="not resolved in time"):
                store.get("meta", "a")
        finally:
            released.set()


class TestServer:
    def test_a_lock_that_another_holds(self, postgres: Postgres, open_at: Opener) -> None:
        store, other = open_at(postgres.port), open_at(postgres.port)
        rev = store.insert("meta", {"_key": "a"})
        with other.batch():
            other.replace("meta", {"_key": "a", "_rev": rev, "n": 1})
            with pytest.raises(StoreUnavailable, match=r"lock|too long|in time"):
                store.replace("meta", {"_key": "a", "_rev": rev, "n": 2})
        assert (store.get("meta", "a") or {})["n"] == 1

    def test_a_wrong_password_is_named_while_others_work(
        self, postgres: Postgres, open_at: Opener
    ) -> None:
        with pytest.raises(StoreRefused, match="password authentication failed"):
            open_at(postgres.port, password="wrong").get("meta", "a")
        assert open_at(postgres.port).get("meta", "a") is None

    def test_a_full_disk(self, postgres: Postgres, open_at: Opener, tmp_path: Path) -> None:
        """A real one: the table is on a file system of 2 MiB."""
        small = Path(postgres.directory) / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(small)]
        done = subprocess.run(mount, capture_output=True)
        if done.returncode:
            small.rmdir()
            pytest.skip(f"a file system must be mounted: {done.stderr.decode()}")
        give(small)
        try:
            store = open_at(postgres.port, domain="work")
            store.count("jobs", {})
            postgres.sql(f"CREATE TABLESPACE small LOCATION '{small}'")
            postgres.sql("ALTER TABLE nomarr_work.jobs SET TABLESPACE small", database=DATABASE)
            kept = self._fill(store)
            with pytest.raises(StoreUnavailable, match="its disk is full") as caught:
                store.insert("jobs", {"_key": "more", "text": os.urandom(3000).hex()})
            assert "free space on the server's disk" in caught.value.hint
            assert len(store.find("jobs")) == kept
            store.insert("stats", {"_key": "a"})  # elsewhere there is room
        finally:
            postgres.sql(
                "DROP SCHEMA IF EXISTS nomarr_work CASCADE", "CHECKPOINT", database=DATABASE
            )
            postgres.sql("DROP TABLESPACE IF EXISTS small")
            subprocess.run(["umount", "--lazy", str(small)], check=True)
            small.rmdir()

    def _fill(self, store: Store) -> int:
        for number in range(2000):
            try:
                store.insert("jobs", {"_key": f"{number:04d}", "text": os.urandom(3000).hex()})
            except StoreUnavailable:
                return number
        raise AssertionError("it does not become full")


class TestFailover:
    @pytest.fixture(scope="module")
    @staticmethod
    def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
        """A primary and its streaming standby."""
        with run_postgres(synchronous_commit="on") as primary:
            primary.server.sql(f"CREATE DATABASE {DATABASE}")
            directory = Path(f"{primary.directory}/standby")
            standby = primary.clone(directory, free_port())
            standby.start()
            try:
                yield primary, standby
            finally:
                standby.stop()

    def test_writes_go_where_they_are_accepted(
        self, cluster: tuple[Running, Running], open_at: Opener
    ) -> None:
        primary, standby = cluster
        store = open_at(standby.port, primary.port, timeout_s=10)
        store.insert("meta", {"_key": "a"})
        standby.wait_for_copy(primary)
        with pytest.raises(StoreUnavailable, match="accepts no writes"):
            open_at(standby.port).get("meta", "a")
        primary.stop(signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            store.insert("meta", {"_key": "b"})
        standby.server.sql("SELECT pg_promote(true, 60)")
        store.insert("meta", {"_key": "b"})
        assert len(store.find("meta")) == 2


class TestHostileServer:
    @pytest.fixture
    def flood(self) -> Iterator[int]:
        """A server that lets everybody in and never stops answering."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_flood, args=(listener,))
            thread.start()
            yield listener.getsockname()[1]
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()

    def test_an_answer_without_an_end(self, flood: int, open_at: Opener) -> None:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"more than \d+ bytes|in time"):
            open_at(flood, timeout_s=10).get("meta", "a")
        assert time.monotonic() - begun < HANGS_S


def _flood(listener: socket.socket) -> None:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack("!I", len(body) + 4) + body

    settings = {"client_encoding": "UTF8", "server_version": "15.1", "in_hot_standby": "off"}
    settings |= {"standard_conforming_strings": "on", "default_transaction_read_only": "off"}
    settings |= {"DateStyle": "ISO, MDY", "integer_datetimes": "on"}
    hello = message(b"R", struct.pack("!I", 0))
    for name, value in settings.items():
        hello += message(b"S", f"{name}\0{value}\0".encode())
    hello += message(b"K", struct.pack("!II", 1, 1)) + message(b"Z", b"I")
    column = b"x\0" + struct.pack("!IHIhih", 0, 0, 25, -1, -1, 0)
    rows = message(b"T", struct.pack("!H", 1) + column)
    row = message(b"D", struct.pack("!HI", 1, 1 << 16) + b"x" * (1 << 16))
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            client.recv(4096)
            client.sendall(hello)
            client.recv(65536)
            client.sendall(rows)
            while True:
                client.sendall(row)
