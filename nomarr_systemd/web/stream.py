"""``/events``: the broker's events and frames of single workers, to one client as it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from itertools import chain
from typing import Final

from tornado.iostream import StreamClosedError

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.live.client import NoSupervisor
from nomarr_systemd.live.protocol import SYSTEM, make_event
from nomarr_systemd.web.broker import Reader, encode
from nomarr_systemd.web.handlers import Handler
from nomarr_systemd.web.ticker import EVERY_S
from nomarr_systemd.web.upstream import LOST, subscribed

MAX_CLIENTS: Final = 1000
MAX_FRAME_CLIENTS: Final = 32  # each has a connection of its own to the supervisor
HEARTBEAT_S: Final = 15.0
_BLOCK: Final = 1 << 16  # bytes that are copied for a client at a time
_MAX_FRAMES: Final = 200  # events with frames that wait for a client


class Frames:
    """The frames of one client's topics, from a subscription of its own. A new one begins with
    a snapshot; it is renewed if the supervisor ends."""

    def __init__(self, path: str, topics: list[str]) -> None:
        self._path = path
        self._topics = topics
        self._waiting: list[bytes] = []
        self._lost = 0
        self.arrived = asyncio.Event()

    def take(self) -> list[bytes]:
        pieces, self._waiting = self._waiting, []
        if self._lost:
            notice = {"topic": self._topics[0], "type": "lost", "count": self._lost}
            pieces.insert(0, encode(notice))
            self._lost = 0
        self.arrived.clear()
        return pieces

    async def run(self) -> None:
        while True:
            with contextlib.suppress(NoSupervisor, OSError):
                await self._follow()
            await asyncio.sleep(1.0)

    async def _follow(self) -> None:
        with subscribed(self._path, self._topics) as read:
            while (events := await read()) is not None:
                self._waiting += map(encode, events)
                while len(self._waiting) > _MAX_FRAMES:
                    self._waiting.pop(0)
                    self._lost += 1
                self.arrived.set()


class EventsHandler(Handler):
    """One client of the stream, for as long as it stays."""

    _task: asyncio.Task[None] | None = None

    async def get(self) -> None:
        site = self.site
        topics = [topic for each in self.get_query_arguments("topics") for topic in each.split(",")]
        frames = [topic for topic in topics if topic.endswith(":frames")]
        others = [topic for topic in topics if topic not in frames]
        if not topics:
            raise BadName("topics are missing", hint="as in /events?topics=worker:*:status")
        if any("*" in topic for topic in frames) or len(frames) > 4:
            raise BadName("frames are streamed of up to four workers, each by its full topic")
        if len(site.broker.readers) >= MAX_CLIENTS or (
            frames and site.frame_clients >= MAX_FRAME_CLIENTS
        ):
            self.refuse(503, "too many clients of the stream", "close some, or retry later")
            return
        reader, first = site.broker.add_reader(
            others or ["none"], self.request.headers.get("Last-Event-ID", "")
        )
        notices = [b"retry: 2000\n\n"]
        if not site.upstream.is_connected and reader.patterns.match(SYSTEM):
            notices.append(encode(make_event(SYSTEM, LOST)))
        site.frame_clients += bool(frames)
        self._task = asyncio.current_task()
        source = Frames(site.scope.paths.live, frames) if frames else None
        following = asyncio.ensure_future(source.run()) if source else None
        try:
            self.set_header("Content-Type", "text/event-stream; charset=utf-8")
            self.set_header("X-Accel-Buffering", "no")  # for nginx
            await self._send(chain(notices, first))
            await self._stream(reader, source)
        except (StreamClosedError, asyncio.CancelledError):
            pass  # the client has left, or this program ends
        finally:
            site.broker.remove_reader(reader)
            site.frame_clients -= bool(frames)
            if following:
                following.cancel()

    def on_connection_close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _stream(self, reader: Reader, source: Frames | None) -> None:
        broker, loop = self.site.broker, asyncio.get_running_loop()
        while True:
            quiet_until = loop.time() + HEARTBEAT_S
            if not broker.has_news(reader):
                await self._wait(HEARTBEAT_S, source)
            pieces = broker.take(reader) + (source.take() if source else [])
            if not pieces and loop.time() < quiet_until:
                continue
            await self._send(pieces or [b": still here\n\n"])
            if broker.has_news(reader):
                await asyncio.sleep(EVERY_S)

    async def _send(self, pieces: Iterable[bytes]) -> None:
        """Write in blocks, each when the client has read the one before. Meanwhile its events
        wait in the ring, or are lost."""
        block: list[bytes] = []
        size = 0
        for piece in pieces:
            block.append(piece)
            size += len(piece)
            if size >= _BLOCK:
                self.write(b"".join(block))
                await self.flush()
                block, size = [], 0
        if block:
            self.write(b"".join(block))
            await self.flush()

    async def _wait(self, timeout_s: float, source: Frames | None) -> None:
        if source is None:
            await self.site.ticker.wait(timeout_s)
            return
        waits = [
            asyncio.ensure_future(self.site.ticker.wait(timeout_s)),
            asyncio.ensure_future(source.arrived.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if source.arrived.is_set():
            await asyncio.sleep(EVERY_S / 2)  # a few frames at once
