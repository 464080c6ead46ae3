"""Connections to the live socket: requests in, answers and events out, both bounded.

A peer that does not read costs a fixed amount of memory: answers are produced as they are sent,
and of events the oldest are dropped and counted.
"""

from __future__ import annotations

import collections
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from nomarr_systemd.live.protocol import MAX_LINE, Patterns
from nomarr_systemd.supervisor.loop import Loop

MAX_REQUEST: Final = 16_384
MAX_TRUSTED_REQUEST: Final = 4 << 20  # of root: a report of every worker's death fits
MAX_EVENTS: Final = 1000
MAX_EVENT_BYTES: Final = 1 << 20
_PIECE: Final = 65_536
_TURN: Final = 4 * _PIECE  # sent to one peer before others get a turn
_CREDENTIALS: Final = struct.Struct("3i")


def encode(message: Mapping[str, Any]) -> bytes:
    """One line of JSON, in ASCII: texts of workers may have any character."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def refuse(why: str) -> Iterator[bytes]:
    yield encode({"ok": False, "error": why})


class Connection:
    """One peer. ``answer(connection, line)`` returns the pieces of the answer to a request, or
    None: then ``reply`` is called later, and until then no other request is read."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        answer: Callable[[Connection, bytes], Iterator[bytes] | None],
        on_close: Callable[[Connection], None],
        trusted: frozenset[int],
    ) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.uid = _CREDENTIALS.unpack(raw)[1]
        self.is_trusted = self.uid in trusted
        self.asked_at = loop.now
        self.patterns: Patterns | None = None  # of a subscriber
        self.cursor = 0  # how many workers it was shown; of the others it gets no events yet
        self._max_request = MAX_TRUSTED_REQUEST if self.is_trusted else MAX_REQUEST
        self._loop = loop
        self._connection = connection
        self._answer = answer
        self._on_close = on_close
        self._inbox = b""
        self._source: Iterator[bytes] | None = None  # the answer that is being sent
        self._is_waiting = False  # for reply()
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
        """Read requests that were sent before the connection was accepted."""
        self._be_ready(select.EPOLLIN)

    def reply(self, message: Mapping[str, Any]) -> None:
        """Send an answer that was deferred. One that no client reads is not kept for it."""
        self.reply_line(encode(message))

    def reply_line(self, line: bytes) -> None:
        """Send an answer that is encoded already."""
        if self._is_waiting and not self._closed:
            self._is_waiting = False
            too_long = refuse(f"the answer is longer than {MAX_LINE} bytes; ask for less")
            self._source = iter([line]) if len(line) <= MAX_LINE else too_long
            self._flush()

    def push(self, event: bytes) -> None:
        """Send an event, or keep it until the peer reads, and drop the oldest if there are too
        many."""
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

    def finish(self, deadline: float) -> None:
        """Send what is there, until ``deadline`` at the latest (``time.monotonic``), and close."""
        if self._closed:
            return
        try:
            while (left_s := deadline - time.monotonic()) > 0 and self._load():
                self._connection.settimeout(left_s)
                self._connection.sendall(self._out)
                self._out = memoryview(b"")
        except OSError:
            pass
        self.close()

    def _be_ready(self, events: int) -> None:
        gone = events & (select.EPOLLERR | select.EPOLLHUP)
        if events & select.EPOLLIN and not self._read():
            return
        self._flush()  # also if the peer has closed: its request is carried out
        if gone:
            self.close()

    def _read(self) -> bool:
        """False if the connection was closed."""
        try:
            data = self._connection.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            self.close()
            return False
        if data:
            if self.patterns is None:  # a subscriber makes no more requests
                self._inbox += data
        else:
            self._no_more_requests = True
        return True

    def _next_request(self) -> None:
        """Begin the answer to the next request, if there is one."""
        line, newline, rest = self._inbox.partition(b"\n")
        if len(line) > self._max_request:
            self._inbox = b""
            self._no_more_requests = True
            self._source = refuse(f"the request is longer than {self._max_request} bytes")
        elif newline:
            self._inbox = rest
            self.asked_at = self._loop.now
            self._is_waiting = True  # a reply may come before the call returns
            source = self._answer(self, line)
            if source is not None:
                self._is_waiting = False
                self._source = source

    def _load(self) -> bool:
        """Put the next bytes to send into ``_out``; False if there are none."""
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
            if self._is_waiting:
                return False
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
        if self._flushing or self._closed:  # making an answer may publish events
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
        if self.patterns is None and not self._is_waiting:
            busy = busy or b"\n" in self._inbox
            if self._no_more_requests and not busy:
                self.close()
                return
        # While an answer is made or sent, no request is read.
        wanted = select.EPOLLOUT if busy else 0
        if not busy and not self._no_more_requests and not self._is_waiting:
            wanted |= select.EPOLLIN
        if wanted != self._mask:
            self._mask = wanted
            self._loop.change(self._connection.fileno(), wanted)


class Subscribers:
    """The connections that have subscribed, and the events for them."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()

    def want(self, topic: str) -> bool:
        """Whether a subscriber wants the topic; other events need not be made."""
        return any(each.patterns and each.patterns.match(topic) for each in self.connections)

    def want_queues(self) -> bool:
        return any(each.patterns and each.patterns.wants_queues for each in self.connections)

    def publish(self, event: Mapping[str, Any], order: int = -1) -> None:
        """Send an event to the topic's subscribers. ``order`` is that of the event's worker."""
        line = b""
        for each in tuple(self.connections):
            if order >= each.cursor:
                continue  # its first snapshot will show this worker as it is then
            if each.patterns is not None and each.patterns.match(event["topic"]):
                line = line or encode(event)
                each.push(line)
