"""Helpers: child processes for what may block, take much memory, or read what is not trusted.

The loop forks them and exchanges messages with them over a socket. A message is a JSON value with a
body of bytes, which may be empty. The supervisor has one thread, so a fork is safe; it imports
nothing that only a helper needs, and a helper holds none of its descriptors. A helper ends at the
end of the socket, which is also the end of the supervisor.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from nomarr_systemd.host.log import ERROR, drop_kept, log
from nomarr_systemd.supervisor.loop import Loop

LEAVE_S: Final = 1.0  # from the end of the socket to SIGKILL
MAX_MESSAGE: Final = 48 << 20
_HEADER: Final = struct.Struct("!II")  # bytes of the JSON text and of the body
_PIECE: Final = 65_536
_KILL_FIRST: Final = b"500"  # of 1000: the kernel ends a helper, not the supervisor, for memory
_CAUGHT: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Message = Sequence[Any]


def _pack(message: Message, body: bytes = b"") -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return b"".join((_HEADER.pack(len(text), len(body)), text, body))


class Channel:
    """The helper's end of the socket. Any thread may send; one reads."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb")
        self._lock = allocate_lock()

    def read(self) -> list[Any] | None:
        """Wait for the next message; None at the end."""
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        size, _ = _HEADER.unpack(header)
        text = self._file.read(size)
        if len(text) < size:
            return None
        message: list[Any] = json.loads(text)
        return message

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send a message; ignored if the supervisor is gone. ValueError if it is too long."""
        data = _pack(message, body)
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes")
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Helper:
    """One child process, which runs ``main``. ``on_message(message, body)`` is called in the loop,
    and ``on_lost()`` once if it ends without ``leave``. OSError if there can be no process."""

    def __init__(
        self,
        loop: Loop,
        main: Callable[[Channel], None],
        on_message: Callable[[list[Any], bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_leaving = False  # or lost: nothing is reported any more
        self._is_over = False
        self._received = bytearray()
        self._out: collections.deque[memoryview] = collections.deque()
        self.pid, self._socket = _fork(main)
        _helpers.add(self)
        self._socket.setblocking(False)
        loop.watch(self._socket.fileno(), select.EPOLLIN, self._be_ready)

    def send(self, message: Message) -> None:
        """Send a message, now or when the helper reads."""
        self._out.append(memoryview(_pack(message)))
        if len(self._out) == 1:
            self._flush()

    def leave(self) -> None:
        """End it; nothing that it sends from now on is taken."""
        if not self._is_leaving:
            self._is_leaving = True
            self._shut()
            self._loop.at(self._loop.now + 2 * LEAVE_S, self._kill)

    def give_up(self) -> None:
        """Kill it: it is lost."""
        self._kill()
        self._lose()

    def close(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (``time.monotonic``); then kill it, and wait for the
        kernel."""
        if not self._wait_for_end(deadline):
            self._kill()
            if not self._wait_for_end(time.monotonic() + LEAVE_S):
                return  # the kernel waits for a disk; init will reap it
        self._finish()

    def _wait_for_end(self, deadline: float) -> bool:
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(_PIECE):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _be_ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT:
            self._read()

    def _flush(self) -> None:
        is_blocked = False
        try:
            while self._out:
                sent = self._socket.send(self._out[0])
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except BlockingIOError:
            is_blocked = True
        except OSError:
            self._out.clear()  # it has ended, which is read next
        mask = select.EPOLLIN | select.EPOLLOUT if is_blocked else select.EPOLLIN
        self._loop.change(self._socket.fileno(), mask)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:  # it was killed, and what it was sent is lost
            data = b""
        if not data:
            self._finish()
            self._lose()
            return
        if not self._is_leaving:
            self._received += data
        while not self._is_leaving and len(self._received) >= _HEADER.size:
            size, extra = _HEADER.unpack_from(self._received)
            begin, end = _HEADER.size + size, _HEADER.size + size + extra
            if end > MAX_MESSAGE:
                self.give_up()
                return
            if len(self._received) < end:
                return
            try:
                message = json.loads(self._received[_HEADER.size : begin])
            except (ValueError, RecursionError):
                self.give_up()
                return
            body = bytes(self._received[begin:end])
            del self._received[:end]
            self._on_message(message, body)

    def _lose(self) -> None:
        if not self._is_leaving:
            self._is_leaving = True
            self._on_lost()

    def _kill(self) -> None:
        if not self._is_over:
            os.kill(self.pid, signal.SIGKILL)

    def _finish(self) -> None:
        """Reap it. It ends now, if it has not: it has closed the socket."""
        self._kill()
        self._is_over = True
        _helpers.discard(self)
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


_helpers: set[Helper] = set()  # all that have not ended


def close_helpers() -> None:
    """End all helpers, and wait for that; those that do not end within LEAVE_S are killed."""
    for helper in _helpers:
        helper.leave()
    deadline = time.monotonic() + LEAVE_S
    for helper in tuple(_helpers):
        helper.close(deadline)


def ask_child(function: Callable[[], Any]) -> Any:
    """Return the JSON value that ``function`` returns in a child process, and wait for it; None if
    it fails. For what is needed once, and would stay in memory."""
    child, ours = _fork(lambda channel: channel.send([function()]))
    channel = Channel(ours.detach())
    answer = channel.read()
    channel.close()
    os.waitpid(child, 0)
    return answer[0] if answer else None


def _fork(main: Callable[[Channel], None]) -> tuple[int, socket.socket]:
    """Start a child that runs ``main``; return its pid and our end of the socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            child = os.fork()
        except OSError:
            ours.close()
            raise
        if child == 0:
            _run_child(theirs.fileno(), main)
    return child, ours


def _run_child(fd: int, main: Callable[[Channel], None]) -> NoReturn:
    """Be the child: free of all that belongs to the supervisor."""
    status = 1
    try:
        gc.freeze()  # what owns a descriptor of the supervisor is never collected, nor closes it
        signal.set_wakeup_fd(-1)
        for number in _CAUGHT:
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        drop_kept()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
            file.write(_KILL_FIRST)
        main(Channel(fd))
        status = 0
    except BaseException as error:
        log(ERROR, "a helper of the supervisor fails", error=repr(error))
    finally:
        os._exit(status)
