"""The one client of the supervisor's live socket: ask a question, or subscribe to events.

What comes back is untrusted input.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final

MAX_EVENT: Final = 4 << 20
MAX_ANSWER: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("3i")
USER: Final = "nomarr"


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


def ask(
    path: str,
    request: Mapping[str, object],
    *,
    timeout_s: float = 0.5,
    max_answer: int = MAX_ANSWER,
) -> dict[str, Any]:
    """The supervisor's answer, or {} if there is none worth having."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            if not is_the_supervisors(connection):
                return {}
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n") and len(answer) < max_answer:
                piece = connection.recv(65536)
                if not piece:
                    break
                answer += piece
        parsed = json.loads(answer)
    except (OSError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) and parsed.get("ok") is True else {}


def is_the_supervisors(connection: socket.socket) -> bool:
    """Whether the peer runs as nomarr, or as we do."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid == os.getuid():
        return True
    try:
        return bool(uid == pwd.getpwnam(USER).pw_uid)
    except KeyError:
        return False
