"""The event loop: file descriptors by epoll, timers by a heap.

It sleeps until a descriptor is ready or a timer is due. In every turn timers fire after input was
handled, so that unread input is never taken for silence.

Pipes are watched by ``watch_gently``: one that becomes readable is read at once, but if there are
more than FEW, they are read together, READ_S apart. Two hundred workers then cost a few wakeups a
second and not eighty.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Final

READ_S: Final = 0.5  # between two reads of pipes, while there is something to read each time
GENTLE_S: Final = 0.25  # READ_S is a multiple of it: deadlines share wakeups with reads
FEW: Final = 24  # pipes that are read at once: with default frames they cost no more wakeups

Handler = Callable[[int], None]
Callback = Callable[[], None]


class Timer:
    """An entry of the heap. A cancelled one stays there and is skipped."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callback | None) -> None:
        self.when = when
        self.callback = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """The loop of a program with one thread."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._first: set[int] = set()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._soon: collections.deque[Callback] = collections.deque()
        self._running = False
        self._signals: tuple[int, int] | None = None
        self._gentle = _Gentle(self, self._epoll)
        self.turns = 0

    def watch(self, fd: int, mask: int, handler: Handler, *, first: bool = False) -> None:
        """Call ``handler(events)`` when ``fd`` is ready; those with ``first`` are called first."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler
        if first:
            self._first.add(fd)

    def watch_gently(self, fd: int, mask: int, handler: Handler) -> None:
        """Call ``handler(events)`` when ``fd`` is ready, or up to READ_S later."""
        self._gentle.add(fd, mask, handler)

    def hurry(self) -> None:
        """Do not wait for READ_S before the next read: a pipe is filling up."""
        self._gentle.hurry()

    def change(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def forget(self, fd: int) -> None:
        """Stop watching; call it before ``fd`` is closed."""
        if self._handlers.pop(fd, None):
            self._first.discard(fd)
            self._epoll.unregister(fd)
        else:
            self._gentle.forget(fd)

    def at(self, when: float, callback: Callback) -> Timer:
        """Call ``callback`` once, not before ``when`` (monotonic seconds)."""
        timer = Timer(when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def at_about(self, when: float, callback: Callback) -> None:
        """Call ``callback`` up to GENTLE_S later than ``when``, in a wakeup with others."""
        self.at(when + -when % GENTLE_S, callback)

    def at_next(self, interval_s: float, callback: Callback) -> Timer:
        """Call ``callback`` at the next multiple of ``interval_s``, so that what has the same
        interval, or a multiple of it, is called in the same turn."""
        when = self.now + interval_s
        return self.at(when - when % interval_s, callback)

    def soon(self, callback: Callback) -> None:
        """Call ``callback`` after all input of this turn was handled."""
        self._soon.append(callback)

    def catch(self, handlers: Mapping[int, Callback]) -> None:
        """Call a handler in the loop when its signal arrives."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in handlers:
            signal.signal(number, _ignore_here)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def dispatch(_events: int) -> None:
            with contextlib.suppress(BlockingIOError):
                for number in set(os.read(read, 4096)):
                    handler = handlers.get(number)
                    if handler:
                        handler()

        self.watch(read, select.EPOLLIN, dispatch)
        self._signals = (read, write)

    def run(self) -> None:
        """Run turns until ``stop``."""
        self._running = True
        while self._running:
            self.turn()

    def stop(self) -> None:
        self._running = False

    def turn(self) -> None:
        """Wait for input or a timer, and handle all that is there."""
        self.turns += 1
        ready = self._epoll.poll(self._patience(), 1024)
        self.now = time.monotonic()
        handlers = self._handlers
        for fd, events in ready:
            if fd in self._first and fd in handlers:
                handlers[fd](events)
        for fd, events in ready:
            if fd not in self._first and fd in handlers:
                handlers[fd](events)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self._fire()

    def close(self) -> None:
        if self._signals:
            signal.set_wakeup_fd(-1)
            for fd in self._signals:
                os.close(fd)
        self._gentle.close()
        self._epoll.close()

    def _patience(self) -> float | None:
        if self._soon:
            return 0
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return max(0.0, heap[0][0] - time.monotonic()) if heap else None

    def _fire(self) -> None:
        heap = self._heap
        while heap and heap[0][0] <= self.now:
            timer = heapq.heappop(heap)[2]
            if timer.callback:
                timer.callback()


class _Gentle:
    """Descriptors in an epoll of their own, which the loop's epoll watches except in a pause."""

    def __init__(self, loop: Loop, outer: select.epoll) -> None:
        self._loop = loop
        self._outer = outer
        self._inner = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._is_hurried = False
        self._next = 0.0  # not before this time, unless hurried
        loop.watch(self._inner.fileno(), select.EPOLLIN, self._be_ready)

    def add(self, fd: int, mask: int, handler: Handler) -> None:
        self._inner.register(fd, mask)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None):
            self._inner.unregister(fd)

    def hurry(self) -> None:
        self._is_hurried = True

    def close(self) -> None:
        self._inner.close()

    def _be_ready(self, _events: int) -> None:
        if self._loop.now < self._next and len(self._handlers) > FEW:
            self._pause()
        else:
            self._read()

    def _pause(self) -> None:
        """Let input gather until the next multiple of READ_S."""
        self._outer.modify(self._inner.fileno(), 0)
        when = self._loop.now + READ_S
        self._loop.at(when - when % READ_S, self._end_pause)

    def _end_pause(self) -> None:
        if self._read() and not self._is_hurried:
            self._pause()
        else:
            self._outer.modify(self._inner.fileno(), select.EPOLLIN)

    def _read(self) -> bool:
        """Handle what is ready; False if nothing is."""
        self._is_hurried = False
        ready = self._inner.poll(0, 1024)
        for fd, events in ready:
            if fd in self._handlers:
                self._handlers[fd](events)
        self._next = 0.0 if self._is_hurried else self._loop.now + READ_S
        return bool(ready)


def _ignore_here(_number: int, _frame: object) -> None:
    """Python needs a handler to write the signal's number to the wakeup descriptor."""
