"""The helper that uses the store, as the loop sees it: when it is started, ended, and replaced.

All work on the store happens there (store_child.py): a store that is slow or hostile neither delays
the supervisor nor takes its memory, and modules that read stores are not loaded in it. The helper
keeps nothing that matters: each Task of the loop knows what is not answered yet, and sends it again
if a helper is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from nomarr_systemd.host.log import WARNING, RateLimit
from nomarr_systemd.supervisor.helper import Channel, Helper, Message
from nomarr_systemd.supervisor.loop import Loop, Timer

LINGER_S: Final = 5.0  # it stays after an event that others may follow
PING_S: Final = 15.0  # one that sends nothing for as long after a ping is killed
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 15.0
_SOUND_S: Final = 60.0  # after this its end is not a reason to wait longer before the next

_AT_ONCE: Final = 20
_Value = TypeVar("_Value")

Taker = Callable[..., None]  # gets the rest of the message; ``answer`` the body as well


class Task(Protocol):
    """Something that the helper is needed for."""

    def is_busy(self) -> bool:
        """Return True if an answer is missing."""

    def resend(self) -> None:
        """Send to a new helper all that an answer is missing for."""

    def lose(self) -> None:
        """Take notice that the helper is lost. Another is started if a Task is still busy."""


class StoreProcess:
    """``add`` every Task before the first ``send``. The helper runs ``main``. ``is_kept``: it stays
    when nothing is asked, as for a store that is used every few seconds."""

    def __init__(self, loop: Loop, main: Callable[[Channel], None]) -> None:
        self.is_kept = False
        self._loop = loop
        self._main = main
        self._tasks: list[Task] = []
        self._takers: dict[str, Taker] = {"pong": lambda: None}
        self._helper: Helper | None = None
        self._started_at = 0.0
        self._linger_until = 0.0
        self._idle_timer: Timer | None = None
        self._has_answered = False  # since the last ping
        self._retry_s = 0.0
        self._retry: Timer | None = None
        self._rate = RateLimit(burst=3, every_s=60)

    def add(self, task: Task, takers: Mapping[str, Taker]) -> None:
        """Add a Task; ``takers`` are called with the messages for it, by their first item."""
        self._tasks.append(task)
        self._takers.update(takers)

    def send(self, messages: Iterable[Message]) -> None:
        """Send what a Task is busy with. If there is no helper, one is started, now or after a
        pause, and every Task is asked to send all again."""
        if self._helper is not None:
            for message in messages:
                self._helper.send(message)
        elif self._retry is None:
            self._start()

    @property
    def is_up(self) -> bool:
        """True if there is a helper."""
        return self._helper is not None

    def linger(self) -> None:
        """Keep the helper that is there, or is started next, for LINGER_S."""
        self._linger_until = self._loop.now + LINGER_S

    def warm(self) -> None:
        """Have a helper for the next LINGER_S: it will be needed, and quickly."""
        self.linger()
        self.send(())

    def _start(self) -> None:
        self._retry = None
        try:
            self._helper = Helper(self._loop, self._main, self._take, self._lose)
        except OSError as error:
            self._wait(str(error))
            return
        self._started_at = self._loop.now
        self._has_answered = True
        self._loop.at(self._loop.now + PING_S, partial(self._ping, self._helper))
        for task in self._tasks:
            task.resend()
        self._end_if_idle()

    def _take(self, message: list[Any], body: bytes) -> None:
        self._has_answered = True
        kind, *rest = message
        if body:
            rest.append(body)
        self._takers[kind](*rest)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._helper is None or self.is_kept or any(task.is_busy() for task in self._tasks):
            return
        if self._loop.now < self._linger_until:
            if self._idle_timer is None:
                self._idle_timer = self._loop.at(self._linger_until, self._be_idle)
            return
        self._helper.leave()
        self._helper = None
        self._retry_s = 0.0

    def _be_idle(self) -> None:
        self._idle_timer = None
        self._end_if_idle()

    def _ping(self, helper: Helper) -> None:
        if helper is not self._helper:
            return
        if not self._has_answered:
            helper.give_up()
            return
        self._has_answered = False
        helper.send(["ping"])
        self._loop.at(self._loop.now + PING_S, partial(self._ping, helper))

    def _lose(self) -> None:
        self._helper = None
        if self._loop.now - self._started_at > _SOUND_S:
            self._retry_s = 0.0
        self._wait("it was killed, or hung")

    def _wait(self, error: str) -> None:
        """Start another helper after a pause, if it is needed then."""
        self._retry_s = min(max(2 * self._retry_s, _FIRST_RETRY_S), _LAST_RETRY_S)
        self._rate.log(
            WARNING, "the process for the store is lost", error=error, retry_s=self._retry_s
        )
        self._retry = self._loop.at(self._loop.now + self._retry_s, self._start_again)
        for task in self._tasks:
            task.lose()

    def _start_again(self) -> None:
        self._retry = None
        if self.is_kept or any(task.is_busy() for task in self._tasks):
            self._start()


def split(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Yield parts for one message each: encoding all workers' frames at once takes memory, which
    the allocator keeps."""
    for begin in range(0, len(values), _AT_ONCE):
        yield values[begin : begin + _AT_ONCE]
