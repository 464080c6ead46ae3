"""Events for many readers: a bounded ring, coalescing, resuming, and what a slow reader lost.

No socket and no clock. A reader is a place in the ring. Events are encoded once; what a reader is
sent are references to them, so one that does not read holds no copies.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from nomarr_systemd.live.protocol import Patterns

MAX_EVENTS: Final = 5000
MAX_BYTES: Final = 8 << 20
# Of these only the last in a batch is sent: each has the whole state of its topic.
_STATES: Final = frozenset(("worker_update", "queue_update", "system_update"))


class Event(NamedTuple):
    number: int
    topic: str
    type: str
    text: bytes  # as it is sent


class Reader:
    """One client: what it wants, how far it has read, and how many events it has missed."""

    def __init__(self, topics: list[str], place: int) -> None:
        """Raise BadName unless the topics are well formed."""
        self.patterns = Patterns(topics)
        self.key = tuple(sorted(topics))
        self.place = place  # the number of the last event that it was sent
        self.lost = 0


class Broker:
    """The ring, and the latest state of every topic, from which a snapshot is made."""

    def __init__(self, *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        self.epoch = os.urandom(4).hex()  # ids of another process mean nothing here
        self.last = 0
        self.readers: set[Reader] = set()
        self.on_event: Callable[[], None] = lambda: None
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._ring: deque[Event] = deque()
        self._bytes = 0
        self._state: dict[str, dict[str, Any]] = {}
        self._made: dict[tuple[tuple[str, ...], int], tuple[list[bytes], int]] = {}

    def add_reader(self, topics: list[str], last_event_id: str) -> tuple[Reader, Iterable[bytes]]:
        """Return a new reader, and what it gets first: what it missed, or a snapshot of each
        topic."""
        epoch, _, number = last_event_id.partition("-")
        known = epoch == self.epoch and number.isascii() and number.isdigit()
        first = self._ring[0].number if self._ring else self.last + 1
        if known and first - 1 <= int(number[:18]) <= self.last:
            reader = Reader(topics, int(number))
            self.readers.add(reader)
            return reader, [b": resumed\n\n"]
        reader = Reader(topics, self.last)
        self.readers.add(reader)
        return reader, self.snapshot(reader)

    def remove_reader(self, reader: Reader) -> None:
        self.readers.discard(reader)

    def publish(self, event: Mapping[str, Any]) -> None:
        """Take an event of the live socket."""
        topic, kind = str(event.get("topic", "")), str(event.get("type", ""))
        self._keep(topic, kind, event)
        self.last += 1
        text = encode(event, f"{self.epoch}-{self.last}")
        self._ring.append(Event(self.last, topic, kind, text))
        self._bytes += len(text)
        self._made.clear()
        while len(self._ring) > self._max_events or self._bytes > self._max_bytes:
            self._drop(self._ring.popleft())
        self.on_event()

    def has_news(self, reader: Reader) -> bool:
        return reader.place < self.last

    def take(self, reader: Reader) -> list[bytes]:
        """Return all that is new for a reader, as pieces to send."""
        if reader.place >= self.last:
            return []
        key = (reader.key, reader.place)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = (self._make(reader), self.last)
        pieces, reader.place = made
        if reader.lost:
            notice = {"topic": reader.patterns.first, "type": "lost", "count": reader.lost}
            reader.lost = 0
            pieces = [encode(notice), *pieces]
        return pieces

    def snapshot(self, reader: Reader) -> Iterator[bytes]:
        """Yield the state of each topic that a reader wants, at the moment when it is asked for: a
        client that reads slowly gets newer states, and then their changes once more."""
        number = f"{self.epoch}-{reader.place}"
        topics = [topic for topic in self._state if reader.patterns.match(topic)]
        for topic in topics:
            if topic in self._state:
                yield encode({**self._state[topic], "type": "snapshot"}, number)
        if not topics:
            yield b": nothing yet\n\n"

    def states(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the latest ``worker``, ``queue`` or ``system`` of every topic that has one."""
        for event in self._state.values():
            if isinstance(event.get(name), dict):
                yield event[name]

    def forget_states(self) -> None:
        """Forget all states: after an absence the supervisor sends all of them again."""
        self._state.clear()

    def _keep(self, topic: str, kind: str, event: Mapping[str, Any]) -> None:
        for name in ("worker", "queue", "system"):
            if isinstance(event.get(name), dict):
                self._state[topic] = {
                    "topic": topic,
                    "type": "snapshot",
                    "timestamp": event.get("timestamp"),
                    name: event[name],
                }
        if kind == "snapshot" and isinstance(event.get("jobs"), list):
            self._state[topic] = dict(event)
        job = event.get("job")
        if isinstance(job, dict) and topic in self._state:
            jobs = [j for j in self._state[topic].get("jobs", []) if j.get("id") != job.get("id")]
            if job.get("status") == "running":
                jobs.append(job)
            self._state[topic] = {**self._state[topic], "jobs": jobs}

    def _make(self, reader: Reader) -> list[bytes]:
        first = self._ring[0].number
        skipped = max(0, reader.place - first + 1)
        found: dict[Any, bytes] = {}
        for event in islice(self._ring, skipped, None):
            if not reader.patterns.match(event.topic):
                continue
            key: Any = event.topic if event.type in _STATES else event.number
            found.pop(key, None)  # the order is that of the last one
            found[key] = event.text
        return list(found.values())

    def _drop(self, event: Event) -> None:
        self._bytes -= len(event.text)
        for reader in self.readers:
            if reader.place < event.number:
                reader.place = event.number
                reader.lost += reader.patterns.match(event.topic)


def encode(event: Mapping[str, Any], number: str = "") -> bytes:
    """Return an event in the form of server-sent events. JSON in ASCII has no line break."""
    head = f"id: {number}\n" if number else ""
    kind = str(event.get("type")).partition("\n")[0]
    return f"{head}event: {kind}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
