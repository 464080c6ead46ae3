"""A subscriber that comes back to each supervisor in turn, and accounts for every frame."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.waiting import PATIENCE_S


class Seen(NamedTuple):
    """A frame, and the connection on which it came."""

    connection: int
    seq: int


class Gap(NamedTuple):
    """Frames of one worker that nobody saw: behind one of connection ``after``, before one of
    connection ``before``."""

    component: str
    first: int
    last: int
    after: int
    before: int


class Subscriber:
    """Reads in a thread of its own; what it read is taken apart afterwards.

    ``on_data(connection, piece)`` is called there with the number of each piece that has come.
    """

    def __init__(self, path: str, on_data: Callable[[int, int], None]) -> None:
        self._path = path
        self._on_data = on_data
        self._read: list[list[bytes]] = []
        self._changed = threading.Condition()
        self._ending = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def connection(self) -> int:
        """The number of the one that is open."""
        return len(self._read) - 1

    def wait_for(self, text: bytes, count: int) -> None:
        """Until ``text`` has come so often on the connection that is open."""

        def has_come() -> bool:
            return b"".join(self._read[-1]).count(text) >= count

        with self._changed:
            assert self._changed.wait_for(has_come, PATIENCE_S), f"not {count} times {text!r}"

    def wait_for_data(self, connection: int) -> None:
        """Until this connection, or a later one, has brought something."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(self._read[connection:]), PATIENCE_S)

    def close(self) -> None:
        self._ending = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def frames(self) -> dict[str, list[Seen]]:
        """By component, in the order of their coming."""
        seen: dict[str, list[Seen]] = {}
        for number, pieces in enumerate(self._read):
            for event in _events(b"".join(pieces)):
                assert event["type"] != "lost", f"the subscriber was too slow: {event}"
                for line in event["frames"]:
                    fields = json.loads(line.removeprefix("HEALTH|"))
                    seen.setdefault(fields["component_id"], []).append(Seen(number, fields["seq"]))
        return seen

    def _run(self) -> None:
        # It keeps up with what is sent, however busy the machine: what a slow subscriber has not
        # taken yet when a supervisor is killed is another matter.
        with contextlib.suppress(PermissionError):  # a plain user's is as it is
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        request = json.dumps({"op": "subscribe", "topics": ["worker:*:frames"]}).encode() + b"\n"
        while not self._ending:
            with self._changed:
                if not self._read or self._read[-1]:  # else nobody was there: the same again
                    self._read.append([])
            try:
                self._socket.connect(self._path)
                self._socket.sendall(request)
                while data := self._socket.recv(1 << 20):
                    with self._changed:
                        self._read[-1].append(data)
                        self._changed.notify_all()
                    self._on_data(self.connection, len(self._read[-1]))
            except OSError:  # killed before it had read what we ask, or its socket is made anew
                pass
            self._socket.close()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.close()


def _events(data: bytes) -> Iterator[dict[str, Any]]:
    lines = data.split(b"\n")
    lines.pop()  # empty, or cut by a kill
    yield from map(json.loads, lines)


def find_gaps(component: str, frames: list[Seen]) -> list[Gap]:
    """What is missing between frames that were seen; none may come twice or too late."""
    gaps = []
    before = Seen(0, 0)
    for frame in frames:
        assert frame.seq > before.seq, f"{component}: {frame} after {before}"
        if frame.seq > before.seq + 1:
            gap = Gap(component, before.seq + 1, frame.seq - 1, before.connection, frame.connection)
            gaps.append(gap)
        before = frame
    return gaps


def match_gaps(gaps: list[Gap], kills: set[int]) -> list[Gap]:
    """Give each gap a kill of its own, named by the connection that it ended; those left over."""
    free = sorted(kills)
    left = []
    for gap in sorted(gaps, key=lambda gap: gap.before):  # who has the least choice chooses first
        kill = next((kill for kill in free if gap.after <= kill < gap.before), None)
        if kill is None:
            left.append(gap)
        else:
            free.remove(kill)
    return left
