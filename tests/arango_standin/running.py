"""For tests: a stand-in in a process of its own, and plain HTTP requests to a server.

The requests go by ``http.client``, so that a test of the stand-in or of a real server owes
nothing to python-arango.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

USER, PASSWORD = "root", "open sesame"


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]

    @property
    def number(self) -> int | None:
        return self.body.get("errorNum") if isinstance(self.body, dict) else None


class Server(NamedTuple):
    """Where a server listens and who may use it: a stand-in, or a real one for the tests' use."""

    host: str
    port: int
    user: str
    password: str
    standin: bool = True

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own; a body that is bytes goes as it is."""
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        with contextlib.closing(connection):
            head = {"Authorization": f"Basic {token}", **(headers or {})}
            connection.request(method, path, content, head)
            answer = connection.getresponse()
            text = answer.read()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, json.loads(text) if text else None, names)

    def fault(self, **wanted: Any) -> None:
        """Put a fault into force (see ``faults``), or none; forgets the requests seen so far."""
        self.call("POST", "/_standin/fault", wanted)

    def seen(self) -> list[str]:
        """The requests since the last ``fault()``, as ``METHOD /path``."""
        seen: list[str] = self.call("GET", "/_standin/seen").body
        return seen


def parse_server(url: str) -> Server:
    """A real server from ``http://user:password@host:port``."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.username:
        raise ValueError("NOMARR_TEST_ARANGO_URL is written http://user:password@host:8529")
    password = unquote(parts.password or "")
    return Server(parts.hostname, parts.port or 8529, unquote(parts.username), password, False)


@contextlib.contextmanager
def open_server() -> Iterator[Server]:
    """The server that NOMARR_TEST_ARANGO_URL names, or a stand-in."""
    url = os.environ.get("NOMARR_TEST_ARANGO_URL")
    if url:
        yield parse_server(url)
        return
    with run_standin() as server:
        yield server


@contextlib.contextmanager
def run_standin(*options: str) -> Iterator[Server]:
    """A stand-in on a port the system chose; it ends with its input, and is waited for."""
    command = [sys.executable, "-m", "tests.arango_standin", "--account", f"{USER}:{PASSWORD}"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, *options], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline()
        assert port.strip(), "the stand-in did not start"
        yield Server("127.0.0.1", int(port), USER, PASSWORD)
