"""Each outage of ArangoDB by its name: what the caller is told, and that the next call works as
soon as the server does. PostgreSQL's are in test_postgres_faults.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.config.values import Copies
from nomarr_systemd.core.errors import StoreRefused, StoreUnavailable
from nomarr_systemd.store.arango import exchange
from nomarr_systemd.store.arango import schema as schema_module
from nomarr_systemd.store.arango.store import ArangoStore
from tests.arango_standin.running import PASSWORD, Server
from tests.support.places import DATABASE, SECRET, ArangoOpener
from tests.support.tcp_proxy import Proxy, run_proxy

TIMEOUT_S = 2.0
HANGS_S = 20.0  # a call that takes longer waits for something without a deadline


@pytest.fixture
def proxy(first: Server, open_arango: ArangoOpener) -> Iterator[Proxy]:
    """The network before the first server, which has the schema already."""
    open_arango(first).get("meta", "a")
    with run_proxy(first.port) as running:
        yield running


class TestNetwork:
    @pytest.mark.parametrize("mode", ["dead", "silent"])
    def test_a_connection_that_says_nothing_more(
        self, proxy: Proxy, open_arango: ArangoOpener, mode: str
    ) -> None:
        """Half-open, or an answer that takes 5 s: the caller has its answer after 2."""
        store = open_arango(proxy.port, timeout_s=TIMEOUT_S)
        rev = store.insert("meta", {"_key": "a"})
        calls: list[Callable[[], object]] = [
            lambda: store.get("meta", "a"),
            lambda: store.replace("meta", {"_key": "a", "_rev": rev}),
            lambda: store.find("meta"),
            lambda: store.update("job_crashes", {"status": "x"}, {"status": "y"}),
        ]
        for call in calls:
            assert store.get("meta", "a")
            proxy.mode = mode  # type: ignore[assignment]
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable, match="did not answer: timed out"):
                call()
            assert time.monotonic() - begun < HANGS_S
            proxy.mode = "pass"
        assert store.get("meta", "a")

    def test_a_connection_that_was_idle_is_not_relied_on(
        self,
        second: Server,
        proxy: Proxy,
        open_arango: ArangoOpener,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The host is gone without a word, the next one has taken over: no write is lost."""
        open_arango(second).get("meta", "a")
        monkeypatch.setattr(exchange, "_TRUSTED_S", -1.0)
        store = open_arango(proxy.port, second, timeout_s=TIMEOUT_S)
        assert store.get("meta", "b") is None
        proxy.mode = "dead"
        proxy._listener.close()  # and nobody answers there any more
        second.fault()
        store.insert("meta", {"_key": "b"})
        assert [seen.split()[0] for seen in second.seen()] == ["POST"]

    def test_a_resolver_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait() and [])
        url = ArangoUrl("root", (("db.example", 8529),), DATABASE, tls=False)
        try:
            with (
                closing(ArangoStore(url, "policy", password=PASSWORD)) as store,
                pytest.raises(StoreUnavailable, match="not resolved in time"),
            ):
                store.get("meta", "a")
        finally:
            released.set()


class TestServer:
    @pytest.mark.parametrize(
        ("status", "number", "words", "cure"),
        [
            (500, 1104, "its disk is full", "free space on the server's disk"),
            (500, 1305, "its disk fails", "the server's log"),
            (403, 1004, "it accepts no writes", "other servers back"),
            (500, 1487, "fewer servers than replication_factor", "lower replication_factor"),
        ],
    )
    def test_what_a_person_can_mend_is_named(
        self,
        first: Server,
        open_arango: ArangoOpener,
        status: int,
        number: int,
        words: str,
        cure: str,
    ) -> None:
        store = open_arango(first)
        store.get("meta", "a")
        first.fault(kind="answer", match="POST", status=status, number=number)
        with pytest.raises(StoreUnavailable, match=words) as caught:
            store.insert("meta", {"_key": "a"})
        assert cure in caught.value.hint
        first.fault()
        store.insert("meta", {"_key": "a"})  # as soon as the server does

    def test_a_wrong_password_is_named_while_others_work(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        right = open_arango(first)
        right.insert("meta", {"_key": "a"})
        with pytest.raises(StoreRefused, match="not authorized") as caught:
            open_arango(first, password="wrong").get("meta", "a")
        assert "check the password" in caught.value.hint
        assert right.get("meta", "a")

    def test_a_failover(self, first: Server, second: Server, open_arango: ArangoOpener) -> None:
        """The leader of a shard changes: away for a moment, and the other host is asked next."""
        for server in (first, second):
            open_arango(server).get("meta", "a")
        store = open_arango(first, second)
        store.get("meta", "a")
        first.fault(kind="answer", match="POST", status=503, number=1496, message="not a leader")
        with pytest.raises(StoreUnavailable, match="503 not a leader"):
            store.insert("meta", {"_key": "a"})
        store.insert("meta", {"_key": "a"})
        assert open_arango(second).get("meta", "a")

    @pytest.mark.parametrize("number", [1203, 1601, 1655, 1207, 1228])
    def test_a_cluster_that_does_not_agree_is_given_up(
        self,
        first: Server,
        open_arango: ArangoOpener,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
    ) -> None:
        monkeypatch.setattr(schema_module, "_TIMEOUT_S", 0.2)
        status = 409 if number == 1207 else 404
        first.fault(kind="answer", match="GET", status=status, number=number)
        with pytest.raises((StoreUnavailable, StoreRefused), match=f"{status}/{number}"):
            open_arango(first).get("meta", "a")
        assert len(first.seen()) > 2  # it was tried again


class TestCopies:
    COPIES = Copies(3, 2, "single")

    def test_a_database_and_its_collections_have_them(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        open_arango(first, copies=self.COPIES).get("meta", "a")
        api = f"/_db/{DATABASE}/_api"
        about = first.call("GET", f"{api}/database/current").body["result"]
        given = {"replicationFactor": 3, "writeConcern": 2, "sharding": "single"}
        assert {name: about[name] for name in given} == given
        meta = first.call("GET", f"{api}/collection/meta/properties").body
        assert (meta["replicationFactor"], meta["writeConcern"]) == (3, 2)

    def test_collections_in_a_database_that_is_there(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        first.call("POST", "/_api/database", {"name": DATABASE})
        open_arango(first, copies=Copies(3, 2)).get("meta", "a")
        meta = first.call("GET", f"/_db/{DATABASE}/_api/collection/meta/properties").body
        assert (meta["replicationFactor"], meta["writeConcern"]) == (3, 2)

    def test_nothing_is_said_of_them_unless_they_are_set(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        open_arango(first).get("meta", "a")
        about = first.call("GET", f"/_db/{DATABASE}/_api/database/current").body["result"]
        assert "replicationFactor" not in about

    def test_others_than_those_of_a_database_on_one_shard_are_refused(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        """As the server's source does; with "single" the database's own are taken."""
        options = {"replicationFactor": 3, "writeConcern": 1, "sharding": "single"}
        first.call("POST", "/_api/database", {"name": DATABASE, "options": options})
        with pytest.raises(StoreRefused) as caught:
            open_arango(first, copies=Copies(2)).get("meta", "a")
        assert "replication_factor" in caught.value.hint
        open_arango(first, copies=Copies(2, 1, "single")).get("meta", "a")
        meta = first.call("GET", f"/_db/{DATABASE}/_api/collection/meta/properties").body
        assert meta["replicationFactor"] == 3

    def test_what_a_person_is_told_to_do_has_them(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, user="app", password=SECRET, copies=self.COPIES)
        with pytest.raises(StoreRefused, match="may not create it") as caught:
            store.get("meta", "a")
        options = '{replicationFactor: 3, writeConcern: 2, sharding: "single"}'
        assert f'db._createDatabase("{DATABASE}", {options})' in caught.value.hint
