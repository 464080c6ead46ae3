"""nomarr-web as a process: a token, a Unix socket, and clients that never come to the point."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from nomarr_systemd.config.values import WebSettings
from nomarr_systemd.host.scope import make_scope
from nomarr_systemd.web import stream as stream_module
from nomarr_systemd.web.guard import LOCAL_NAMES, Guard
from nomarr_systemd.web.server import make_server, open_sockets
from nomarr_systemd.web.site import Site
from tests.support.supervision import Lab, make_lab
from tests.support.waiting import PATIENCE_S
from tests.support.web_process import serve
from tests.support.web_site import Client, find_port

TOKEN = "0123456789abcdef0123456789abcdef"
RIGHT = f"Bearer {TOKEN}"
WRONG = ("", TOKEN, f"Basic {TOKEN}", f"{RIGHT}0", RIGHT[:-1], "Bearer ")
TOPICS = "worker:*:status,worker:tag:0:frames"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        lab.configure(tag=1)
        lab.start()
        lab.begin_run("tag-0")
        yield lab


def follow(lab: Lab, client: Client, **headers: str) -> None:
    """A frame of a worker is seen by a client of the stream, and one that was away catches up."""
    writer = lab.writer("tag-0")
    with closing(client.events(TOPICS, **headers)) as stream:
        assert stream.answer.status == 200
        assert stream.answer.headers["Content-Type"].startswith("text/event-stream")
        stream.until(type="snapshot", topic="worker:tag:0:status")
        writer.frame(job="first.flac")
        while stream.until(type="worker_update")["worker"]["current_job"] != "first.flac":
            pass
        last_id = stream.last_id
        writer.frame(job="second.flac")
        while "second.flac" not in "".join(stream.until(type="frames")["frames"]):
            pass
    with closing(client.events("worker:*:status", Last_Event_ID=last_id, **headers)) as stream:
        event = next(iter(stream))
        assert (event["type"], event["worker"]["current_job"]) == ("worker_update", "second.flac")


def test_the_stream_needs_the_token(lab: Lab) -> None:
    path = Path(lab.root, "token")
    path.write_text(f"{TOKEN}\n")
    client = Client(find_port())
    settings = WebSettings(f"127.0.0.1:{client.port}", token_file=str(path))
    with serve(lab, settings, client):
        for given in WRONG:
            status, headers, body = client.ask(f"/events?topics={TOPICS}", Authorization=given)
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), given
            assert b"tag" not in body
        assert client.ask(f"/events?topics={TOPICS}&token={TOKEN}")[0] == 401
        follow(lab, client, Authorization=RIGHT)


@pytest.mark.parametrize("token", [False, True])
def test_the_stream_over_a_unix_socket(lab: Lab, *, token: bool) -> None:
    path = Path(lab.root, "token")
    path.write_text(TOKEN)
    listen = f"{lab.root}/web/http.sock"
    client = Client(0, listen)
    settings = WebSettings(listen, token_file=str(path) if token else "")
    with serve(lab, settings, client):
        assert stat.S_IMODE(os.stat(listen).st_mode) == 0o660
        if token:
            assert client.ask(f"/events?topics={TOPICS}")[0] == 401
        follow(lab, client, **({"Authorization": RIGHT} if token else {}))
        # Nobody's browser gets here, so a proxy may send any Host; another site's page may not ask.
        given = {"Authorization": RIGHT, "Host": "page.example"}
        assert client.ask("/api/openapi.json", **given)[0] == 200
        assert client.ask("/api/openapi.json", **given, Origin="http://evil.example")[0] == 403


def test_changes_of_a_worker_come_four_times_a_second(lab: Lab) -> None:
    client = Client(find_port())
    writer = lab.writer("tag-0")
    with (
        serve(lab, WebSettings(f"127.0.0.1:{client.port}"), client),
        closing(client.events("worker:tag:0:status")) as stream,
    ):
        stream.until(type="snapshot")
        began, changes = time.monotonic(), 0
        for number in range(200):
            writer.frame(job=f"{number}.flac")
            time.sleep(0.01)
        for event in stream:
            changes += 1
            if event["worker"]["current_job"] == "199.flac":  # the last one is never left out
                break
        assert 2 <= changes <= 4 * (time.monotonic() - began) + 2


def test_a_quiet_stream_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.2)
    with serve_here() as port, closing(Client(port).events("system:health")) as stream:
        while stream.answer.readline() != b": still here\n":
            pass


def test_who_comes_without_a_supervisor_is_told() -> None:
    with serve_here() as port, closing(Client(port).events("system:health")) as stream:
        assert stream.until(type="supervisor_lost")["topic"] == "system:health"


@contextmanager
def serve_here(
    idle_s: float = 30.0, max_connections: int = 100, unread_s: float = 30.0
) -> Iterator[int]:
    """The server itself in a thread, with lower limits; its port."""
    address = f"127.0.0.1:{find_port()}"
    sockets = open_sockets(address, unread_s=unread_s)  # from here on clients may connect
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        site = Site(make_scope(None, user=True), Guard(LOCAL_NAMES), checks_peer=False)
        server = make_server(site, idle_s=idle_s, max_connections=max_connections)
        server.add_sockets(sockets)
        await ended.wait()
        server.stop()
        await server.close_all_connections()
        site.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        yield sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
        b"",
    ],
    ids=["headers", "body", "first line"],
)
def test_who_sends_byte_by_byte_is_cut_off(start: bytes) -> None:
    with serve_here(idle_s=1.0) as port, socket.create_connection(("127.0.0.1", port)) as link:
        others = Client(port)
        link.sendall(start)
        sent, ends = 0, time.monotonic() + PATIENCE_S
        while not select.select([link], [], [], 0.05)[0]:  # until it is closed
            assert time.monotonic() < ends, "it was never cut off"
            link.sendall(b"x")
            sent += 1
            assert others.ask("/healthz")[0] == 200
        assert sent < 900, "it is the time that has run out, not the space"
        with suppress(ConnectionResetError):  # it hung up with a byte of ours unread
            assert b" 200 " not in link.recv(65_536)


def test_who_says_nothing_is_cut_off() -> None:
    with serve_here(idle_s=1.0) as port, socket.create_connection(("127.0.0.1", port)) as link:
        link.settimeout(PATIENCE_S)
        assert link.recv(1) == b""


def test_who_reads_nothing_is_cut_off() -> None:
    """Of answers that are larger than the buffers between; it has the only place."""
    with serve_here(max_connections=1, unread_s=1.0) as port, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", port))
        link.sendall(b"GET /api/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        assert link.recv(1) == b"H"
        client = Client(port)
        assert not is_served(client)
        ends = time.monotonic() + PATIENCE_S
        while not is_served(client):
            assert time.monotonic() < ends, "it was never cut off"
            time.sleep(0.05)


def is_served(client: Client) -> bool:
    try:
        return client.ask("/healthz")[0] == 200
    except OSError:
        return False


def test_connections_are_bounded_and_their_places_are_free_again() -> None:
    with serve_here(max_connections=5) as port:
        client = Client(port)
        for path in ("/healthz", "/metrics", "/nothing", "/static/app.js") * 5:
            assert client.ask(path)[0] in (200, 404), path
        with ExitStack() as stack:
            links = 0
            while is_served(client):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                links += 1
                assert links < 20, "there is no bound"
        ends = time.monotonic() + PATIENCE_S
        while not is_served(client):
            assert time.monotonic() < ends, "places are not given back"
