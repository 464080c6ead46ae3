"""ArangoDB's hosts hang, refuse, break off and give strange answers, and what becomes of it.

The servers here are stand-ins in processes of their own, told to misbehave.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.core.errors import (
    BadDocument,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.protocol import POLICY_LEDGER
from tests.arango_standin.running import PASSWORD, Server
from tests.support.places import DATABASE, ArangoOpener

TIMEOUT_S = 1.0  # long enough for a healthy stand-in on a busy machine


@pytest.fixture
def ready(pair: tuple[Server, Server], open_arango: ArangoOpener) -> None:
    """Both servers have the schema, and a document that says whose it is."""
    for number, server in enumerate(pair, start=1):
        open_arango(server).insert("meta", {"_key": "who", "server": number})
        server.fault()


@pytest.fixture
def unresponsive() -> Iterator[int]:
    """A port that completes no connection: its queue is full and never emptied."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(20):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        else:
            pytest.skip("this system's loopback accepts any number of connections")
        yield port


def documents(server: Server) -> list[str]:
    """The writes and reads of documents that reached the server."""
    return [seen for seen in server.seen() if "/_api/document" in seen]


@pytest.mark.usefixtures("ready")
class TestHosts:
    def test_a_host_that_refuses_is_passed_over(
        self, second: Server, open_arango: ArangoOpener, refusing: int
    ) -> None:
        store = open_arango(refusing, second)
        rev = store.insert("meta", {"_key": "a"})
        assert store.get("meta", "a") == {"_key": "a", "_rev": rev}

    def test_a_host_that_completes_no_connection_is_passed_over(
        self, second: Server, open_arango: ArangoOpener, unresponsive: int
    ) -> None:
        store = open_arango(unresponsive, second, timeout_s=TIMEOUT_S)
        store.insert("meta", {"_key": "a"})
        assert len(documents(second)) == 1

    def test_a_read_goes_on_from_a_host_that_hangs_and_stays_away_from_it(
        self, first: Server, second: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, second, timeout_s=TIMEOUT_S)
        assert store.find("meta", {"server": 1})
        first.fault(kind="hang")
        assert store.find("meta", {"server": 2})
        assert len(first.seen()) == 1
        doc = store.get("meta", "who")
        assert doc is not None
        assert doc["server"] == 2
        assert len(first.seen()) == 1

    def test_a_write_to_a_host_that_hangs_is_not_sent_to_another(
        self, first: Server, second: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, second, timeout_s=TIMEOUT_S)
        store.get("meta", "who")
        first.fault(kind="hang")
        with pytest.raises(StoreUnavailable):
            store.insert("meta", {"_key": "a"})
        assert documents(second) == []
        store.insert("meta", {"_key": "a"})
        assert len(documents(first)) == 1
        assert len(documents(second)) == 1

    def test_it_comes_back_when_the_other_fails(
        self, first: Server, second: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, second)
        first.fault(kind="drop")
        assert store.find("meta", {"server": 2})
        first.fault()
        second.fault(kind="drop")
        assert store.find("meta", {"server": 1})

    def test_with_all_hosts_away_each_is_asked_once(
        self, first: Server, second: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, second, timeout_s=TIMEOUT_S)
        store.get("meta", "who")
        for server in (first, second):
            server.fault(kind="hang")
        with pytest.raises(StoreUnavailable, match=f"{first.port}.*{second.port}"):
            store.get("meta", "who")
        assert len(first.seen()) == len(second.seen()) == 1

    def test_nobody_listens_anywhere(self, open_arango: ArangoOpener, refusing: int) -> None:
        with pytest.raises(StoreUnavailable, match="refused"):
            open_arango(refusing, refusing).get("meta", "who")

    def test_a_name_that_leads_nowhere(self) -> None:
        url = ArangoUrl("root", (("host.invalid", 8529),), DATABASE, tls=False)
        with (
            contextlib.closing(ArangoStore(url, "policy", password=PASSWORD)) as store,
            pytest.raises(StoreUnavailable, match=r"host\.invalid"),
        ):
            store.get("meta", "a")


@pytest.mark.usefixtures("ready")
class TestAnswers:
    @pytest.mark.parametrize("kind", ["apply-then-drop", "drop"])
    def test_a_write_without_an_answer_is_unavailable_and_sent_once(
        self, first: Server, second: Server, open_arango: ArangoOpener, kind: str
    ) -> None:
        store = open_arango(first, second)
        rev = store.insert("meta", {"_key": "there", "n": 1})
        writes: list[Callable[[ArangoStore], object]] = [
            lambda store: store.insert("meta", {"_key": "a"}),
            lambda store: store.replace("meta", {"_key": "there", "_rev": rev, "n": 2}),
            lambda store: store.append("job_crashes", [{"n": 1}]),
            lambda store: store.prune("job_crashes", "n", 5),
            lambda store: store.delete("meta", "there"),
        ]
        for write in writes:
            again = open_arango(first, second)
            again.get("meta", "who")
            first.fault(kind=kind)
            with pytest.raises(StoreUnavailable):
                write(again)
            assert len(first.seen()) == 1
            first.fault()
        applied = kind == "apply-then-drop"
        assert (store.get("meta", "a") is not None) is applied
        assert (store.get("meta", "there") is None) is applied
        assert store.find("job_crashes") == []
        assert documents(second) == []

    def test_whoever_reads_again_finds_what_a_lost_answer_was_about(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        """How the ledger stays exact: an invocation that is recorded is not recorded again."""
        store = open_arango(first)
        store.insert("meta", {"_key": "ledger", "invocations": []})

        def record(invocation: str) -> None:
            doc = store.get("meta", "ledger")
            assert doc is not None
            if invocation not in doc["invocations"]:
                doc["invocations"].append(invocation)
                store.replace("meta", doc)

        first.fault(kind="apply-then-drop", match="PUT", times=1)
        with pytest.raises(StoreUnavailable):
            record("f00")
        record("f00")
        doc = store.get("meta", "ledger")
        assert doc is not None
        assert doc["invocations"] == ["f00"]

    @pytest.mark.parametrize(
        ("status", "number", "expected"),
        [
            (503, 503, StoreUnavailable),
            (503, 1496, StoreUnavailable),
            (500, 4, StoreUnavailable),
            (403, 1004, StoreUnavailable),
            (412, 21004, StoreUnavailable),
            (429, 429, StoreUnavailable),
            (401, 11, StoreRefused),
            (403, 11, StoreRefused),
            (404, 1203, StoreUnavailable),
            (404, 1228, StoreRefused),
            (400, 600, BadDocument),
            (409, 1200, StaleRevision),
            (412, 1200, StaleRevision),
            (404, 1202, StaleRevision),
        ],
    )
    def test_errors_in_our_own_words(
        self,
        first: Server,
        open_arango: ArangoOpener,
        status: int,
        number: int,
        expected: type[StoreError],
    ) -> None:
        store = open_arango(first)
        rev = store.insert("meta", {"_key": "a"})
        first.fault(kind="answer", status=status, number=number)
        with pytest.raises(expected) as caught:
            store.replace("meta", {"_key": "a", "_rev": rev})
        assert type(caught.value) is expected
        assert len(first.seen()) == 1

    def test_a_read_goes_on_from_a_host_that_is_unavailable_a_write_does_not(
        self, first: Server, second: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, second)
        store.get("meta", "who")
        first.fault(kind="answer", status=503, number=503)
        with pytest.raises(StoreUnavailable, match="503"):
            store.insert("meta", {"_key": "a"})
        assert documents(second) == []
        assert len(open_arango(first, second).find("meta", {"server": 2})) == 1

    def test_writers_who_met_try_again(self, first: Server, open_arango: ArangoOpener) -> None:
        store = open_arango(first)
        store.get("meta", "who")
        writes: list[Callable[[], object]] = [
            lambda: store.insert("meta", {"_key": "a"}),
            lambda: store.append("job_crashes", [{"n": 1}]),
            lambda: store.prune("job_crashes", "n", 5),
            lambda: store.delete("meta", "a"),
        ]
        for write in writes:
            first.fault(kind="answer", status=409, number=1200, times=2)
            write()
            assert len(first.seen()) == 3

    def test_writers_who_meet_for_ever_give_up(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first)
        store.get("meta", "who")
        first.fault(kind="answer", status=409, number=1200)
        with pytest.raises(StoreUnavailable, match="too many writers"):
            store.insert("meta", {"_key": "a"})
        assert len(first.seen()) == 6

    def test_a_cursor_that_is_gone(self, first: Server, open_arango: ArangoOpener) -> None:
        store = open_arango(first)
        store.append("job_crashes", [{"n": n} for n in range(2500)])
        first.fault(kind="answer", match="/_api/cursor/", status=404, number=1600)
        with pytest.raises(StoreUnavailable, match="1600"):
            store.find("job_crashes")
        first.fault()
        assert len(store.find("job_crashes")) == 2500
        assert len(first.seen()) == 313  # 8 at once: each answer has a limited size

    def test_a_write_stands_even_if_it_cannot_be_published(
        self, first: Server, open_arango: ArangoOpener, tmp_path: Path
    ) -> None:
        store = open_arango(first, publisher=Publisher(str(tmp_path)))
        store.get("meta", "who")
        first.fault(kind="drop", match="GET")
        assert store.insert(POLICY_LEDGER, {"_key": "worker:tag:0", "host": ""})
        assert not (tmp_path / "tag-0.json").exists()
        first.fault()
        store.publish_all()
        assert (tmp_path / "tag-0.json").exists()

    @pytest.mark.parametrize(
        ("status", "expected"),
        [(200, StoreRefused), (401, StoreRefused), (404, StoreRefused), (502, StoreUnavailable)],
    )
    def test_something_else_answers(
        self, open_arango: ArangoOpener, status: int, expected: type[StoreError]
    ) -> None:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<p>Hello")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Quietly."""

        with HTTPServer(("127.0.0.1", 0), Page) as other:
            thread = threading.Thread(target=other.serve_forever, args=(0.01,))
            thread.start()
            try:
                with pytest.raises(expected):
                    open_arango(other.server_address[1]).get("meta", "a")
            finally:
                other.shutdown()
                thread.join()
