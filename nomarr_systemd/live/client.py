"""The one client of the supervisor's live socket: ask a question, or subscribe to events.

Answers and events are untrusted: each has one deadline and one limit of size, and
``live.answers`` converts them to values.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

from nomarr_systemd.core.errors import NotPermitted
from nomarr_systemd.core.json import JsonError, decode
from nomarr_systemd.host.layout import JOIN
from nomarr_systemd.live.protocol import MAX_LINE, SUBSCRIBE

MAX_BRIEF: Final = 65_536  # the same for the controller, and MAX_ABOUT for each run it asks about
MAX_ABOUT: Final = 1024
ANSWER_S: Final = 0.5
_CONNECT_S: Final = 2.0
_ASK_AGAIN_S: Final = (0.0, 0.02, 0.0)  # pauses before a retry, if there was no answer
_PIECE: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")


class NoSupervisor(Exception):
    """The supervisor does not serve the socket, or another user's process does."""


class Subscription:
    """Events of some topics, on a descriptor to poll. Close it after use.

    NoSupervisor if the supervisor cannot be reached within ``timeout_s``.
    """

    def __init__(self, path: str, topics: Sequence[str], *, timeout_s: float = _CONNECT_S) -> None:
        self._rest = bytearray()  # the beginning of a line
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
        """Return the events since the last call; None if the supervisor has ended."""
        try:
            piece = self._connection.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not piece:
            return None
        self._rest += piece
        if b"\n" not in piece:  # a line is split when it is complete: it may come byte by byte
            return [] if len(self._rest) <= MAX_LINE else None
        *lines, self._rest = self._rest.split(b"\n")
        return [event for line in lines if (event := _parse(line))]

    def wait(self, timeout_s: float | None) -> list[dict[str, Any]] | None:
        """As ``read``, but wait for at least one event. TimeoutError after ``timeout_s``."""
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
    path: str,
    topics: Sequence[str],
    *,
    timeout_s: float | None = None,
    total_s: float | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Yield events until the supervisor ends. NoSupervisor if it does not run; TimeoutError
    after ``timeout_s`` without an event, and after ``total_s`` in any case."""
    ends = None if total_s is None else time.monotonic() + total_s
    subscription = Subscription(path, topics, timeout_s=timeout_s or total_s or _CONNECT_S)
    try:
        while True:
            left_s = _left_s(ends)
            if left_s is None or (timeout_s is not None and timeout_s < left_s):
                left_s = timeout_s
            try:
                events = subscription.wait(left_s)
            except ConnectionError:
                return
            if events is None:
                return
            yield from events
    finally:
        subscription.close()


def check_access(path: str) -> None:
    """Raise NotPermitted if the socket is there and this user may not connect to it."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise NotPermitted(f"this user may not ask the supervisor ({path})", hint=JOIN)


def ask(
    path: str,
    request: Mapping[str, object],
    *,
    timeout_s: float = ANSWER_S,
    max_bytes: int = MAX_LINE,
) -> dict[str, Any]:
    """Return the supervisor's answer, or {} if it refused, or did not answer within
    ``timeout_s``."""
    answer = _ask(path, request, timeout_s, max_bytes)
    return answer if answer.get("ok") is True else {}


class Batch:
    """Questions that belong together: after one without an answer no more are asked.

    A supervisor that hangs costs the caller one timeout, however many questions there are.
    """

    def __init__(self, path: str, *, max_bytes: int = MAX_LINE) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self.is_silent = False

    def ask(
        self, request: Mapping[str, object], *, about: int = 0, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """As ``ask``; the answer may be longer by MAX_ABOUT for each run that it is ``about``."""
        if self.is_silent:
            return {}
        most = min(self._max_bytes + about * MAX_ABOUT, MAX_LINE)
        answer = _ask(self._path, request, timeout_s, most)
        self.is_silent = not isinstance(answer.get("ok"), bool)  # a refusal is an answer
        return answer if answer.get("ok") is True else {}


def _ask(
    path: str, request: Mapping[str, object], timeout_s: float, max_bytes: int
) -> dict[str, Any]:
    """Return the answer as it came; {} if none came in time, or it is not an object.

    A supervisor that is started again gets a new socket: a request in the old one is sent again.
    """
    ends = time.monotonic() + timeout_s
    for pause_s in _ASK_AGAIN_S:
        try:
            return _parse(_exchange(path, request, ends, max_bytes))
        except ConnectionError:
            time.sleep(pause_s)
        except (OSError, NoSupervisor):
            break
    return {}


def _exchange(path: str, request: Mapping[str, object], ends: float, max_bytes: int) -> bytearray:
    """Return a whole line; empty if it is too long or cut off. ConnectionError if nothing came."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _send(connection, path, request, ends)
        while not answer.endswith(b"\n"):
            connection.settimeout(_left_s(ends))
            piece = connection.recv(_PIECE)
            if not piece and not answer:
                raise ConnectionResetError
            answer += piece
            if not piece or len(answer) > max_bytes:
                return bytearray()
    return answer


def is_supervisor(connection: socket.socket) -> bool:
    """Return True if systemd made the socket: the system's, or our own user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)  # of the process that called listen()
    return uid in (0, os.getuid())


def _send(connection: socket.socket, path: str, request: Mapping[str, object], ends: float) -> None:
    connection.settimeout(_left_s(ends))
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise NoSupervisor(f"{path} is a link to another socket")
    connection.connect(path)
    if not is_supervisor(connection):
        raise NoSupervisor(f"{path} is served by a process of another user")
    connection.settimeout(_left_s(ends))
    connection.sendall(json.dumps(request).encode() + b"\n")


def _left_s(ends: float | None) -> float | None:
    """Return the seconds until ``ends``; TimeoutError if none are left."""
    if ends is None:
        return None
    left_s = ends - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _parse(line: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a line; {} if it has none."""
    try:
        parsed = decode(bytes(line))
    except JsonError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
