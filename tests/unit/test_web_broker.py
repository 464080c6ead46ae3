"""The broker of the event stream: snapshots, coalescing, resuming, losses; and the guard."""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from nomarr_systemd.config.values import WebSettings
from nomarr_systemd.core.errors import BadName, ConfigError
from nomarr_systemd.host.scope import make_scope
from nomarr_systemd.web import site as site_module
from nomarr_systemd.web.broker import Broker, encode
from nomarr_systemd.web.guard import Guard, find_peer_uid, is_loopback, split_host
from nomarr_systemd.web.main import make_guard
from nomarr_systemd.web.site import Site
from nomarr_systemd.web.upstream import JobSeen, Upstream

HOSTS = frozenset(("localhost", "127.0.0.1"))


def update(number: int, kind: str = "worker_update", **more: object) -> dict[str, Any]:
    topic = f"worker:tag:{number}:status"
    return {"topic": topic, "type": kind, "timestamp": 1, "worker": {"id": number, **more}}


def read(pieces: Iterable[bytes]) -> list[dict[str, Any]]:
    lines = b"".join(pieces).decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def ids(pieces: Iterable[bytes]) -> list[str]:
    lines = b"".join(pieces).decode().split("\n")
    return [line[4:] for line in lines if line.startswith("id: ")]


def test_a_snapshot_then_changes_and_of_those_the_last() -> None:
    broker = Broker()
    broker.publish(update(0, seq=1))
    broker.publish(update(1, seq=1))
    reader, first = broker.add_reader(["worker:tag:0:status"], "")
    assert [event["type"] for event in read(first)] == ["snapshot"]
    assert broker.take(reader) == []
    for seq in range(2, 10):
        broker.publish(update(0, seq=seq))
        broker.publish(update(1, seq=seq))
    broker.publish(update(0, "worker:crash", seq=9))
    found = read(broker.take(reader))
    assert [(event["type"], event["worker"]["seq"]) for event in found] == [
        ("worker_update", 9),
        ("worker:crash", 9),
    ]


def test_crashes_are_never_merged() -> None:
    broker = Broker()
    reader, _ = broker.add_reader(["worker:*:status"], "")
    for seq in range(5):
        broker.publish(update(0, "worker:crash", seq=seq))
    assert [event["worker"]["seq"] for event in read(broker.take(reader))] == [0, 1, 2, 3, 4]


def test_a_reader_comes_back_to_where_it_was() -> None:
    broker = Broker()
    reader, _ = broker.add_reader(["worker:*:status"], "")
    broker.publish(update(0, seq=1))
    seen = ids(broker.take(reader))[-1]
    broker.remove_reader(reader)
    broker.publish(update(0, seq=2))
    back, first = broker.add_reader(["worker:*:status"], seen)
    assert read(first) == []
    assert [event["worker"]["seq"] for event in read(broker.take(back))] == [2]


@pytest.mark.parametrize("last", ["", "x", "deadbeef-1", "EPOCH-999", "EPOCH-x", "EPOCH-1"])
def test_an_id_that_is_not_known_any_more_gets_a_snapshot(last: str) -> None:
    broker = Broker(max_events=2)
    for seq in range(5):
        broker.publish(update(0, seq=seq))
    _, first = broker.add_reader(["worker:*:status"], last.replace("EPOCH", broker.epoch))
    assert [event["type"] for event in read(first)] == ["snapshot"]


def test_a_reader_that_does_not_read_is_told_how_many_it_lost() -> None:
    broker = Broker(max_events=10)
    slow, _ = broker.add_reader(["worker:tag:0:status"], "")
    other, _ = broker.add_reader(["worker:tag:1:status"], "")
    for seq in range(30):
        broker.publish(update(0, "worker:crash", seq=seq))
    found = read(broker.take(slow))
    assert (found[0]["type"], found[0]["count"]) == ("lost", 20)
    assert [event["worker"]["seq"] for event in found[1:]] == list(range(20, 30))
    assert broker.take(other) == []  # nothing of its topics was lost


def test_the_ring_is_bounded_by_bytes_as_well() -> None:
    broker = Broker(max_bytes=10_000)
    reader, _ = broker.add_reader(["worker:*:status"], "")
    for _ in range(100):
        broker.publish(update(0, "worker:crash", text="x" * 1000))
    assert len(b"".join(broker.take(reader))) < 12_000


def test_readers_share_what_they_are_sent() -> None:
    """A thousand that do not read hold no copies of the ring."""
    broker = Broker()
    readers = [broker.add_reader(topics, "")[0] for topics in (["worker:*:status"], ["*"])]
    broker.publish(update(0, "worker:crash", text="x" * 1000))
    (one,), (other,) = (broker.take(reader) for reader in readers)
    assert one is other


def test_a_snapshot_is_made_as_it_is_read() -> None:
    broker = Broker()
    for number in range(3):
        broker.publish(update(number, seq=1))
    reader, first = broker.add_reader(["worker:*:status"], "")
    pieces = iter(first)
    seen = read([next(pieces)])
    broker.publish(update(2, seq=2))
    seen += read(pieces)
    assert [event["worker"]["seq"] for event in seen] == [1, 1, 2]
    assert [event["worker"]["seq"] for event in read(broker.take(reader))] == [2]
    _, first = broker.add_reader(["worker:*:status"], "")
    broker.forget_states()
    assert read(first) == []


def test_jobs_in_hand_are_kept_up_to_date() -> None:
    broker = Broker()
    broker.publish({"topic": "queue:jobs", "type": "snapshot", "jobs": [{"id": "a"}]})
    running = {"id": "b", "status": "running"}
    broker.publish({"topic": "queue:jobs", "type": "job_update", "job": running})
    ended = {"id": "a", "status": "done"}
    broker.publish({"topic": "queue:jobs", "type": "job_update", "job": ended})
    _, first = broker.add_reader(["queue:jobs"], "")
    assert [job["id"] for job in read(first)[0]["jobs"]] == ["b"]


def test_a_job_is_timed_from_the_first_frame_that_names_it() -> None:
    upstream = Upstream("/nowhere", Broker())

    def see(kind: str, job: object, run: str) -> JobSeen | None:
        worker = {"component": "worker:tag:0", "current_job": job, "invocation": run}
        upstream._take({"topic": "worker:tag:0:status", "type": kind, "worker": worker})
        return upstream.find_job("worker:tag:0", str(job))

    first = see("snapshot", "a.flac", "r1")
    assert first
    assert not first.is_start  # it was in hand before
    assert see("snapshot", "a.flac", "r1") is first  # the supervisor was away
    begun = see("worker_update", 7, "r1")
    assert begun
    assert begun.is_start
    assert see("worker:crash", 7, "r1") is begun
    again = see("worker_update", 7, "r2")
    assert again is not begun
    assert upstream.find_job("worker:tag:0", "a.flac") is None
    assert see("worker_update", None, "r2") is None


def test_an_event_cannot_become_two() -> None:
    text = encode({"topic": "t", "type": "a\ndata: {}", "text": "\n\ndata: {}\u2028\r"})
    assert text.count(b"\n\n") == 1
    assert len(read([text])) == 1


def test_bad_topics_are_refused() -> None:
    for topics in (["A"], ["x" * 200], ["*" * 9], [""]):
        with pytest.raises(BadName):
            Broker().add_reader(topics, "")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8765", "localhost"),
        ("[::1]:8765", "::1"),
        ("[::1]", "::1"),
        ("[::1", ""),
        ("[::1]x", ""),
        ("127.0.0.1:80:80", ""),
        ("a" * 400, ""),
        ("", ""),
    ],
)
def test_hosts_are_taken_apart(text: str, name: str) -> None:
    assert split_host(text) == name


@pytest.mark.parametrize(
    ("headers", "page", "data"),
    [
        ({}, 0, 0),
        ({"Host": "127.0.0.1:8765"}, 0, 0),
        ({"Host": ""}, 421, 421),
        ({"Host": "evil.example"}, 421, 421),  # a name that points here by now
        ({"Host": "localhost.evil.example"}, 421, 421),
        ({"Host": "localhost,evil.example"}, 421, 421),  # two headers of this name
        ({"Host": "localhost:80@evil.example"}, 421, 421),
        ({"Origin": "http://localhost"}, 0, 0),
        ({"Origin": "http://evil.example"}, 403, 403),
        ({"Origin": "http://localhost.evil.example"}, 403, 403),
        ({"Origin": "null"}, 403, 403),
        ({"Origin": ""}, 403, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 0, 0),
        ({"Sec-Fetch-Site": "same-site"}, 0, 403),  # another port of this machine
        ({"Sec-Fetch-Site": "cross-site"}, 0, 403),  # a link to the page is fine
    ],
)
def test_other_sites_are_refused(headers: dict[str, str], page: int, data: int) -> None:
    guard = Guard(HOSTS)
    for asks_data, status in ((False, page), (True, data)):
        refusal = guard.check("GET", {"Host": "localhost"} | headers, data=asks_data)
        assert (refusal.status if refusal else 0) == status
    for method in ("POST", "PUT", "OPTIONS", "get", ""):
        refused = guard.check(method, {"Host": "localhost"}, data=False)
        assert refused
        assert refused.status == 405


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison takes as long for a token that is wrong in its first character."""
    asked: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        asked.append((one, other))
        return digest(one, other)

    digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    token = b"0123456789abcdef"
    for given in (token, b"x" * 16, b"0", b""):
        header = {"Host": "localhost", "Authorization": f"Bearer {given.decode()}"}
        refusal = Guard(HOSTS, token).check("GET", header, data=True)
        assert (refusal is None) == (given == token)
        assert asked.pop() == (given, token)
    assert asked == []


def test_the_token_is_asked_for_data_and_not_for_the_page() -> None:
    guard = Guard(HOSTS, b"0123456789abcdef")
    asked = {"Host": "localhost"}
    assert guard.check("GET", asked, data=False) is None
    refusal = guard.check("GET", asked, data=True)
    assert refusal
    assert refusal.status == 401
    for given in ("Bearer 0123456789abcdeF", "Basic 0123456789abcdef", "Bearer é", "Bearer"):
        refusal = guard.check("GET", asked | {"Authorization": given}, data=True)
        assert refusal
    right = asked | {"Authorization": "Bearer 0123456789abcdef"}
    assert guard.check("GET", right, data=True) is None


def test_other_machines_need_a_token() -> None:
    for listen in ("0.0.0.0:80", "192.0.2.1:80", "[::]:80"):
        with pytest.raises(ConfigError, match="no token"):
            make_guard(WebSettings(listen), b"")
        assert make_guard(WebSettings(listen), b"x" * 16).hosts
    assert make_guard(WebSettings("/run/nomarr-web/http.sock"), b"").hosts is None
    named = make_guard(WebSettings(hosts="Status.example"), b"")
    assert named.hosts
    assert "status.example" in named.hosts
    assert is_loopback("127.8.9.1")
    assert not is_loopback("example")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_knows_the_user_of_a_client(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen()
        port = listening.getsockname()[1]
        address = listening.getsockname()[0]
        client = socket.create_connection((address, port))
        server, peer = listening.accept()
        with client, server:
            local = server.getsockname()
            assert find_peer_uid(family, peer[:2], local[:2]) == os.getuid()
            assert find_peer_uid(family, (peer[0], 1), local[:2]) is None


def test_the_kernel_knows_who_comes_by_a_socket_of_another_family() -> None:
    """It is in the other table, and was anybody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        try:
            client = socket.create_connection(("::ffff:127.0.0.1", port))
        except OSError:
            pytest.skip("no IPv6 here")
        server, peer = listening.accept()
        with client, server:
            assert find_peer_uid(socket.AF_INET, peer, server.getsockname()) == os.getuid()


def test_a_client_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "find_peer_uid", lambda *_: None)
    site = Site(make_scope(None, user=True), Guard(HOSTS), checks_peer=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
        with client, server:
            connection = SimpleNamespace(
                context=SimpleNamespace(), stream=SimpleNamespace(socket=server)
            )
            refused = site.check_peer(SimpleNamespace(connection=connection))  # type: ignore[arg-type]
    site.close()
    assert refused
    assert refused.status == 403
