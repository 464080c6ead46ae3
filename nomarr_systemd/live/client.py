"""The one client of the supervisor's live socket: ask a question, or subscribe to events.

Answers and events are untrusted input.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

from nomarr_systemd.live.protocol import SUBSCRIBE

MAX_LINE: Final = 8 << 20  # one answer or event; a snapshot of 4,096 workers fits
_CONNECT_S: Final = 2.0
_PIECE: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")


class NoSupervisor(Exception):
    """The supervisor does not serve the socket, or another user's process does."""


class Subscription:
    """Events of some topics, on a descriptor to poll. Close it after use.

    NoSupervisor if the supervisor cannot be reached within ``timeout_s``.
    """

    def __init__(self, path: str, topics: Sequence[str], *, timeout_s: float = _CONNECT_S) -> None:
        self._rest = b""
        ends = time.monotonic() + timeout_s
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _send(self._connection, path, {"op": SUBSCRIBE, "topics": list(topics)}, ends)
            self._connection.setblocking(False)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, OSError):
                raise NoSupervisor(str(error)) from error
            raise

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[dict[str, Any]] | None:
        """The events that have come since the last call; None if the supervisor has left."""
        try:
            piece = self._connection.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if not piece or len(self._rest) > MAX_LINE:
            return None
        return [event for line in lines if (event := _parse(line))]

    def wait(self, timeout_s: float | None) -> list[dict[str, Any]] | None:
        """The same, waiting for at least one event. TimeoutError after ``timeout_s``."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._connection.settimeout(_left_s(ends))
            piece = self._connection.recv(1, socket.MSG_PEEK)
            self._connection.setblocking(False)
            events = self.read()
            if events or events is None or not piece:
                return events

    def close(self) -> None:
        self._connection.close()


def subscribe(
    path: str, topics: Sequence[str], *, timeout_s: float | None = None
) -> Generator[dict[str, Any], None, None]:
    """Events until the supervisor leaves. NoSupervisor if it is not there at first; TimeoutError
    after ``timeout_s`` without an event."""
    subscription = Subscription(path, topics, timeout_s=timeout_s or _CONNECT_S)
    try:
        while True:
            try:
                events = subscription.wait(timeout_s)
            except ConnectionError:
                return
            if events is None:
                return
            yield from events
    finally:
        subscription.close()


def ask(path: str, request: Mapping[str, object], *, timeout_s: float = 0.5) -> dict[str, Any]:
    """The supervisor's answer, or {} if it refused, or did not answer within ``timeout_s``."""
    ends = time.monotonic() + timeout_s
    pieces: list[bytes] = []
    size = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            _send(connection, path, request, ends)
            while not (pieces and pieces[-1].endswith(b"\n")):
                connection.settimeout(_left_s(ends))
                piece = connection.recv(_PIECE)
                size += len(piece)
                if not piece or size > MAX_LINE:
                    return {}
                pieces.append(piece)
    except (OSError, NoSupervisor):
        return {}
    answer = _parse(b"".join(pieces))
    return answer if answer.get("ok") is True else {}


def is_supervisor(connection: socket.socket) -> bool:
    """Whether systemd made the socket: the system's, or our own user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)  # of the process that called listen()
    return uid in (0, os.getuid())


def _send(connection: socket.socket, path: str, request: Mapping[str, object], ends: float) -> None:
    connection.settimeout(_left_s(ends))
    connection.connect(path)
    if not is_supervisor(connection):
        raise NoSupervisor(f"{path} is served by a process of another user")
    connection.settimeout(_left_s(ends))
    connection.sendall(json.dumps(request).encode() + b"\n")


def _left_s(ends: float | None) -> float | None:
    """Seconds until then; TimeoutError if there are none left."""
    if ends is None:
        return None
    left_s = ends - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _parse(line: bytes) -> dict[str, Any]:
    """A line's object; {} if it is none."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
