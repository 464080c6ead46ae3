"""The client of the live socket beside servers that misbehave: bounded in time and in size."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nomarr_systemd.live import client
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY, open_to_all

Serve = Callable[[socket.socket], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Serve], str]]:
    """Start a server of one connection; returns its path."""
    threads: list[threading.Thread] = []
    path = str(tmp_path / "live.sock")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()

    def start(answer: Serve) -> str:
        def run() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.makefile("rb").readline()
                answer(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return path

    yield start
    for thread in threads:
        thread.join()
    listening.close()


def test_an_answer_in_pieces(serve: Callable[[Serve], str]) -> None:
    def answer(connection: socket.socket) -> None:
        for byte in b'{"ok":true,"n":7}\n':
            connection.sendall(bytes([byte]))

    assert client.ask(serve(answer), {"op": "snapshot"}, timeout_s=20) == {"ok": True, "n": 7}


@pytest.mark.parametrize("text", [b"", b"\n", b"[]\n", b"{\n", b'{"ok":false}\n', b'{"ok":true}'])
def test_what_is_no_answer_is_empty(serve: Callable[[Serve], str], text: bytes) -> None:
    path = serve(lambda connection: connection.sendall(text))
    assert client.ask(path, {"op": "snapshot"}, timeout_s=20) == {}


def test_one_deadline_for_all(serve: Callable[[Serve], str]) -> None:
    """A server that sends a byte now and then does not keep the client waiting."""
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not done.wait(0.05):
            connection.sendall(b" ")

    begun = time.monotonic()
    assert client.ask(serve(drip), {"op": "snapshot"}, timeout_s=0.3) == {}
    assert 0.3 <= time.monotonic() - begun < 5
    done.set()


def test_an_answer_without_end_is_given_up(serve: Callable[[Serve], str]) -> None:
    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x" * 65_536)

    assert client.ask(serve(flood), {"op": "snapshot"}, timeout_s=20) == {}
    with pytest.raises(client.NoSupervisor):
        client.Subscription("/nonexistent", ["system:health"])
    assert client.ask("/nonexistent", {"op": "snapshot"}) == {}


def test_events_can_be_polled_and_waited_for(serve: Callable[[Serve], str]) -> None:
    def publish(connection: socket.socket) -> None:
        for n in range(3):
            connection.sendall(json.dumps({"n": n}).encode() + b"\nno event\n")
        connection.sendall(b'{"n":')
        connection.recv(1)  # until the client has left

    subscription = client.Subscription(serve(publish), ["system:health"])
    seen: list[dict[str, object]] = []
    while len(seen) < 3:
        assert select.select([subscription], [], [], 20)[0]
        seen += subscription.read() or []
    assert seen == [{"n": 0}, {"n": 1}, {"n": 2}]
    with pytest.raises(TimeoutError):
        subscription.wait(0.05)
    subscription.close()


def test_the_end_of_the_supervisor_ends_the_events(serve: Callable[[Serve], str]) -> None:
    path = serve(lambda connection: connection.sendall(b'{"n":1}\n{"n":2}\n{"n"'))
    assert list(client.subscribe(path, ["system:health"], timeout_s=20)) == [{"n": 1}, {"n": 2}]


@needs_root
def test_a_server_of_another_user_is_not_believed(tmp_path: Path) -> None:
    path = str(tmp_path / "live.sock")
    open_to_all(tmp_path)
    tmp_path.chmod(0o777)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ready)
            os.setuid(NOBODY)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(path)
            listening.listen()
            os.chmod(path, 0o777)
            os.write(tell, b"x")
            listening.accept()
            listening.accept()
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    assert client.ask(path, {"op": "snapshot"}, timeout_s=20) == {}
    with pytest.raises(client.NoSupervisor, match="another user"):
        client.Subscription(path, ["system:health"])
    os.waitpid(child, 0)
    os.close(ready)


def test_who_waited_in_a_socket_that_is_made_anew_asks_again(tmp_path: Path) -> None:
    """As when the supervisor is started again: what waits in the old socket gets no answer."""
    path = str(tmp_path / "live.sock")

    def serve() -> None:
        for answer in (b"", b'{"ok":true,"n":1}\n'):
            with listening.accept()[0] as peer:
                peer.recv(65536)
                peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        assert client.ask(path, {"op": "snapshot"}, timeout_s=20) == {"ok": True, "n": 1}
        thread.join(20)
