"""One connection to the live socket: requests in, answers and events out, both bounded.

A peer that does not read costs a fixed amount of memory: answers are made as they are taken, and
of events it loses the oldest and is told how many.
"""

from __future__ import annotations

import collections
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.supervisor.loop import Loop

MAX_REQUEST: Final = 16_384
MAX_EVENTS: Final = 1000
MAX_EVENT_BYTES: Final = 1 << 20
_PIECE: Final = 65_536
_TURN: Final = 4 * _PIECE  # sent to one peer before the others have their turn
_CREDENTIALS: Final = struct.Struct("3i")


def encode(message: dict[str, Any]) -> bytes:
    """One line of JSON. What workers said may have any character: ASCII carries all of them."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def refuse(why: str) -> Iterator[bytes]:
    yield encode({"ok": False, "error": why})


class Client:
    """``answer(client, line)`` gives the pieces of the answer to a request."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        answer: Callable[[Client, bytes], Iterator[bytes]],
        on_close: Callable[[Client], None],
    ) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.uid: int = _CREDENTIALS.unpack(raw)[1]
        self.patterns: Patterns | None = None  # of a subscriber
        self.cursor = 0  # how far it has been shown the workers; of the rest it needs no events
        self._loop = loop
        self._connection = connection
        self._answer = answer
        self._on_close = on_close
        self._inbox = b""
        self._source: Iterator[bytes] | None = None  # the answer under way
        self._out = memoryview(b"")
        self._events: collections.deque[bytes] = collections.deque()
        self._event_bytes = 0
        self._lost = 0
        self._no_more_requests = False
        self._closed = False
        self._flushing = False
        self._mask = select.EPOLLIN
        connection.setblocking(False)
        loop.watch(connection.fileno(), self._mask, self._be_ready, first=True)

    def serve(self) -> None:
        """Take what has been asked already."""
        self._be_ready(select.EPOLLIN)

    def push(self, event: bytes) -> None:
        """Send an event, or keep it until the peer reads, or give up the oldest for it."""
        self._events.append(event)
        self._event_bytes += len(event)
        while len(self._events) > MAX_EVENTS or self._event_bytes > MAX_EVENT_BYTES:
            self._event_bytes -= len(self._events.popleft())
            self._lost += 1
        if not self._mask & select.EPOLLOUT:
            self._flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._on_close(self)

    def finish(self, patience_s: float) -> None:
        """At our own end: hand over what is already there, but do not wait for long."""
        if self._closed:
            return
        self._connection.settimeout(patience_s)
        try:
            while self._load():
                self._connection.sendall(self._out)
                self._out = memoryview(b"")
        except OSError:
            pass
        self.close()

    def _be_ready(self, events: int) -> None:
        gone = events & (select.EPOLLERR | select.EPOLLHUP)
        if events & select.EPOLLIN and not self._read():
            return
        self._flush()  # also for a peer that did not wait: what it told us counts
        if gone:
            self.close()

    def _read(self) -> bool:
        """False when the connection is closed."""
        try:
            data = self._connection.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            self.close()
            return False
        if data:
            if self.patterns is None:  # a subscriber has nothing more to ask
                self._inbox += data
        else:
            self._no_more_requests = True
        return True

    def _next_request(self) -> None:
        """Begin the answer to the next request, if one is there."""
        line, newline, rest = self._inbox.partition(b"\n")
        if len(line) > MAX_REQUEST:
            self._inbox = b""
            self._no_more_requests = True
            self._source = refuse(f"the request is longer than {MAX_REQUEST} bytes")
        elif newline:
            self._inbox = rest
            self._source = self._answer(self, line)

    def _load(self) -> bool:
        """Have something to send in ``_out``; False when there is nothing."""
        while not self._out:
            if self._source is not None:
                piece = next(self._source, None)
                if piece is None:
                    self._source = None
                else:
                    self._out = memoryview(piece)
                continue
            if self.patterns is not None:
                return self._load_events()
            self._next_request()
            if self._source is None:
                return False
        return True

    def _load_events(self) -> bool:
        pieces: list[bytes] = []
        size = 0
        if self._lost and self.patterns is not None:
            notice = {"topic": self.patterns.first, "type": "lost", "count": self._lost}
            pieces.append(encode(notice))
            self._lost = 0
        while self._events and size < _PIECE:
            event = self._events.popleft()
            size += len(event)
            pieces.append(event)
        self._event_bytes -= size
        self._out = memoryview(b"".join(pieces))
        return bool(self._out)

    def _flush(self) -> None:
        if self._flushing or self._closed:  # an answer may have events of its own
            return
        self._flushing = True
        room = _TURN
        try:
            while room > 0 and self._load():
                sent = self._connection.send(self._out)
                self._out = self._out[sent:]
                room -= sent
        except BlockingIOError:
            pass
        except OSError:
            self._flushing = False
            self.close()
            return
        self._flushing = False
        busy = bool(self._out) or self._source is not None or bool(self._events)
        if self.patterns is None:
            busy = busy or b"\n" in self._inbox
        if self._no_more_requests and not busy and self.patterns is None:
            self.close()
            return
        # While an answer is under way nothing more is taken in.
        wanted = select.EPOLLOUT if busy else 0
        if not busy and not self._no_more_requests:
            wanted |= select.EPOLLIN
        if wanted != self._mask:
            self._mask = wanted
            self._loop.change(self._connection.fileno(), wanted)
