"""When clients of the stream are woken: soon after an event, and not more often than EVERY_S."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from nomarr_systemd.web.broker import Broker

EVERY_S: Final = 0.25  # at most 4 changes of a worker per second


class Ticker:
    """Wakes all clients that wait, soon after an event and at most every EVERY_S."""

    def __init__(self, broker: Broker) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_due = False
        self._last = 0.0
        broker.on_event = self._be_told

    async def wait(self, timeout_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, timeout_s)
        finally:
            self._waiting.discard(future)

    def _be_told(self) -> None:
        if self._waiting and not self._is_due:
            loop = asyncio.get_running_loop()
            self._is_due = True
            loop.call_at(max(loop.time(), self._last + EVERY_S), self._wake)

    def _wake(self) -> None:
        self._is_due = False
        self._last = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)
