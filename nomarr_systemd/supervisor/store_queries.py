"""Questions of the live socket that the work store answers: history of health, lists of jobs. The
store's helper answers them (query_thread.py): neither the loop nor the settling of jobs waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.live_connection import encode
from nomarr_systemd.supervisor.store_process import StoreProcess

JOB_OF_RUN: Final = "job_of_run"  # besides the operations of the live socket
MAX_WAITING: Final = 64

Reply = Callable[[bytes], None]  # gets a line of JSON


class StoreQueries:
    """Passes questions to the helper, and its answers to those who asked."""

    def __init__(self, process: StoreProcess) -> None:
        self._process = process
        self._numbers = count()
        self._waiting: dict[int, tuple[Message, Reply]] = {}
        process.add(self, {"answer": self._answer})

    def ask(
        self, settings: StoreSettings, operation: str, request: Mapping[str, Any], reply: Reply
    ) -> None:
        """Pass a question on. If too many wait, refuse it at once."""
        if len(self._waiting) >= MAX_WAITING:
            reply(_refuse("too many questions wait for the store; retry later"))
            return
        number = next(self._numbers)
        message = ["ask", number, settings, operation, request]
        self._waiting[number] = (message, reply)
        self._process.linger()
        self._process.send([message])

    def is_busy(self) -> bool:
        return bool(self._waiting)

    def resend(self) -> None:
        self._process.send([message for message, _ in self._waiting.values()])

    def lose(self) -> None:
        """Refuse all: a question may be what it has ended of."""
        waiting, self._waiting = self._waiting, {}
        for _, reply in waiting.values():
            reply(_refuse("the process that reads the store has ended; retry later"))

    def _answer(self, number: int, line: bytes) -> None:
        _, reply = self._waiting.pop(number)
        reply(line)


def _refuse(why: str) -> bytes:
    return encode({"ok": False, "error": why})
