"""One HTTP request and its answer, on a connection that is kept: within one deadline for all of it,
head and body, and of a limited size. Whoever answers is not trusted, however slowly it does.

What is asked, and what an answer means, is not known here.
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

_PIECE: Final = 65536
_MAX_WORDS: Final = 200


class NotSent(Exception):
    """No connection came about, so the request may go to another host."""


class NotTrusted(NotSent):
    """The host's certificate did not pass, so it was told nothing."""


class Unanswered(Exception):
    """The request went out and no answer came that can be used: it may have been carried out."""


class Answer(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]  # by their names in small letters
    content: bytes


class Connection:
    """To one host; opened when it is needed, and again when the host has closed it."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._context = context
        self._timed: _TimedSocket | None = None

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
        """The whole answer, within ``timeout_s`` and of at most ``most`` bytes. Resolving a name
        is the system's, and takes as long as that does."""
        ends = time.monotonic() + timeout_s
        timed = self._open(ends)
        timed.ends = ends
        talk = http.client.HTTPConnection(self._host, self._port)
        talk.auto_open = 0
        talk.sock = timed  # all that http.client uses of a socket
        try:
            talk.request(method, target, body, dict(headers))
            answer = talk.getresponse()
            content = b"".join(_read(answer, most))
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            self.close()
            raise Unanswered(_say(error)) from error
        except BaseException:
            self.close()  # half an answer is in it
            raise
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
        if self._timed is not None and self._timed.is_quiet():
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
        for family, kind, number, _, address in socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, number)
            try:
                sock.settimeout(_left_s(ends))
                sock.connect(address)
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
    """A socket whose every wait ends at ``ends``: what http.client uses of one."""

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
        """True if nothing is to be read: whatever comes unasked is the end, or not for us."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """http.client closes before it reads the last answer; ``end`` is meant."""

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
