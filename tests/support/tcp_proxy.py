"""A TCP proxy in a thread, told to misbehave: the network between a client and a real server."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Literal

Mode = Literal["pass", "dead", "silent", "cut"]


class Proxy:
    """Forwards from ``port`` to the server's port.

    dead: nothing passes and nothing is closed, as if a host lost its power; new connections are
    accepted and hear nothing. silent: requests pass, answers do not. cut: a request passes, and the
    connection is closed in place of its answer.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.mode: Mode = "pass"
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._waker.close()
        self._thread.join()
        for each in (*self._peers, self._listener, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                if sock is self._woken:
                    return
                if sock is self._listener:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock in self._peers:
                    self._forward(sock)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=10)
        except OSError:
            client.close()
            return
        self._clients.add(client)
        for each, other in ((client, server), (server, client)):
            self._peers[each] = other
            self._selector.register(each, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        is_client = sock in self._clients
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data or (self.mode == "cut" and not is_client):
            self._close(sock)
            return
        if self.mode == "dead" or (self.mode == "silent" and not is_client):
            return
        try:
            self._peers[sock].sendall(data)
        except OSError:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        for each in (sock, self._peers.pop(sock)):
            self._peers.pop(each, None)
            self._clients.discard(each)
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()


@contextlib.contextmanager
def run_proxy(target: int) -> Iterator[Proxy]:
    proxy = Proxy(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
