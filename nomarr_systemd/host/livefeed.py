"""The supervisor's events, as they come. What they say is untrusted."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from nomarr_systemd.host.control import is_the_supervisors

MAX_EVENT: Final = 4 << 20


class NoSupervisor(Exception):
    """Nobody serves the socket, or not somebody to be believed."""


def subscribe(
    path: str, topics: Sequence[str], *, timeout_s: float | None = None
) -> Generator[dict[str, Any], None, None]:
    """Events until the supervisor leaves. NoSupervisor if it was not there at first; TimeoutError
    after ``timeout_s`` without an event."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s or 2.0)
        try:
            connection.connect(path)
            if not is_the_supervisors(connection):
                raise NoSupervisor(f"{path} is served by somebody else's process")
            request = {"op": "subscribe", "topics": list(topics)}
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NoSupervisor(str(error)) from error
        connection.settimeout(timeout_s)
        yield from _parse(_lines(connection))


def _lines(connection: socket.socket) -> Iterator[bytes]:
    rest = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionError:
            return
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_EVENT:
            return


def _parse(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
