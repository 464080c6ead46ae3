"""Send one HTTP request and read its answer, on a connection that is kept open. One deadline covers
all of it, head and body, and the answer's size is limited: the server is not trusted.

The meaning of requests and answers is not known here.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.text import clean
from nomarr_systemd.store.resolve import resolve

_PIECE: Final = 65536
# A connection that was idle for longer is not used: its host may be gone without closing
# it, and a write that is sent there may not be sent to the next host.
_TRUSTED_S: Final = 5.0
_MAX_WORDS: Final = 200


class NotSent(Exception):
    """No connection could be made, so the request may be sent to another host."""


class NotTrusted(NotSent):
    """The host's certificate was not accepted, so nothing was sent."""


class Unanswered(Exception):
    """The request was sent and no usable answer came: the server may have carried it out."""


class Answer(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]  # by name in lower case
    content: bytes


class Connection:
    """A connection to one host; opened when it is needed, and again if the host closed it."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._context = context
        self._timed: _TimedSocket | None = None
        self._used = 0.0

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        timeout_s: float,
        most: int,
    ) -> Answer:
        """Return the whole answer, within ``timeout_s`` and of at most ``most`` bytes."""
        ends = time.monotonic() + timeout_s
        timed = self._open(ends)
        timed.ends = ends
        talk = http.client.HTTPConnection(self._host, self._port)
        talk.auto_open = 0
        talk.sock = timed  # it has all methods that http.client calls
        try:
            talk.request(method, target, body, dict(headers))
            answer = talk.getresponse()
            content = b"".join(_read(answer, most))
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            self.close()
            raise Unanswered(_say(error)) from error
        except BaseException:
            self.close()  # a part of the answer may be unread
            raise
        self._used = time.monotonic()
        if answer.will_close:
            self.close()
        return Answer(
            answer.status,
            answer.reason,
            {name.lower(): value for name, value in answer.headers.items()},
            content,
        )

    def close(self) -> None:
        timed, self._timed = self._timed, None
        if timed is not None:
            timed.end()

    def _open(self, ends: float) -> _TimedSocket:
        is_trusted = time.monotonic() - self._used < _TRUSTED_S
        if self._timed is not None and is_trusted and self._timed.is_quiet():
            return self._timed
        self.close()
        try:
            self._timed = _TimedSocket(self._connect(ends))
        except ssl.SSLCertVerificationError as error:
            why = f"the certificate was not accepted: {error.verify_message}"
            raise NotTrusted(clean(why, _MAX_WORDS)) from error
        except OSError as error:
            raise NotSent(_say(error)) from error
        return self._timed

    def _connect(self, ends: float) -> socket.socket:
        last: OSError = OSError("it has no address")
        for address in resolve(self._host, self._port, ends):
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                sock.settimeout(_left_s(ends))
                sock.connect((address, self._port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._context is None:
                    return sock
                sock.settimeout(_left_s(ends))
                return self._context.wrap_socket(sock, server_hostname=self._host)
            except ssl.SSLCertVerificationError:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                last = error
        raise last


class _TimedSocket:
    """A socket whose every wait ends at ``ends``, with the methods that http.client calls."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.ends = 0.0

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left_s(self.ends))
        self._sock.sendall(data)

    def receive_into(self, buffer: Any) -> int:
        self._sock.settimeout(_left_s(self.ends))
        return self._sock.recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Received(self), _PIECE)

    def is_quiet(self) -> bool:
        """Return True if nothing can be read. Between requests, anything to read is the
        connection's end or unsolicited data."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Do nothing: http.client calls it before it reads the last answer. ``end`` closes."""

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class _Received(io.RawIOBase):
    def __init__(self, timed: _TimedSocket) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._timed.receive_into(buffer)


def _read(answer: http.client.HTTPResponse, most: int) -> Iterator[bytes]:
    """Yield the body in pieces; ValueError once it is too large, or if it is cut short."""
    left = most
    if (answer.length or 0) > most:
        raise ValueError(f"its answer has more than {most} bytes")
    while piece := answer.read(_PIECE):
        left -= len(piece)
        if left < 0:
            raise ValueError(f"its answer has more than {most} bytes")
        yield piece
    if answer.length:
        raise ValueError("its answer was cut short")


def _left_s(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _say(error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else None
    return clean(why or str(error) or type(error).__name__, _MAX_WORDS)
