"""Calls to systemd's manager over D-Bus: by its private socket if we may use it, else by the bus.

``systemctl`` would be a process for each call, which takes longer than the rest of a restart;
the D-Bus libraries of Python take as long to import.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.systemd.dbus.wire import U32, Reader, Writer, read_fields, split

PATH: Final = "/org/freedesktop/systemd1"
MANAGER: Final = "org.freedesktop.systemd1.Manager"
PROPERTIES: Final = "org.freedesktop.DBus.Properties"
MAX_MESSAGE: Final = 1 << 27  # the protocol's own limit
COMES_BACK_S: Final = 5.0  # for a manager that re-executes itself
WAIT_S: Final = 1.0  # between two calls of on_wait
_NAME: Final = "org.freedesktop.systemd1"
_DBUS: Final = "org.freedesktop.DBus"
_CALL, _RETURN, _ERROR = 1, 2, 3
_FIELD_PATH, _FIELD_INTERFACE, _FIELD_MEMBER = 1, 2, 3
_FIELD_ERROR, _FIELD_REPLY_TO, _FIELD_DESTINATION, _FIELD_SIGNATURE = 4, 5, 6, 8
_START: Final = Struct("<BBBBIII")  # of a message, up to the length of the header fields
_PATH_FIELD: Final = bytes((_FIELD_PATH, 1)) + b"o\0"
_SPECIAL: Final = re.compile(rb"[^0-9A-Za-z]")  # in a path they are written as numbers


class BusError(NomarrError):
    """The manager refused (``name`` is the D-Bus error) or cannot be reached."""

    code = "systemd"

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class Call(NamedTuple):
    """One method call: member, signature and arguments, object path and interface."""

    member: str
    signature: str = ""
    arguments: tuple[Any, ...] = ()
    path: str = PATH
    interface: str = MANAGER


class Bus:
    """One connection, opened at the first call and again after it broke."""

    def __init__(
        self,
        *,
        user: bool = False,
        place: tuple[str, bool] | None = None,
        timeout_s: float = 60.0,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """``place``: the path of the socket to use, and True if it is that of a message bus. With
        ``on_wait``, which is called every WAIT_S, an answer is awaited without a time limit."""
        self._user = user
        self._place = place
        self._timeout_s = None if on_wait else timeout_s
        self._on_wait = on_wait
        self._socket: socket.socket | None = None
        self._serial = 0
        self._read = b""  # what was received; up to _at it has been used
        self._at = 0

    def call_all(self, calls: Sequence[Call]) -> list[list[Any] | BusError]:
        """Send many calls in one round trip; return an answer or an error for each.

        If the manager hangs up (it re-executes itself at an upgrade) all are sent again when it
        is back: each of our calls may be done twice.
        """
        ends = time.monotonic() + COMES_BACK_S
        while calls:
            try:
                return self._exchange(self._socket or self._connect(), calls)
            except (OSError, ValueError) as error:
                self.close()
                if not isinstance(error, ConnectionError) or time.monotonic() > ends:
                    raise BusError(f"systemd does not answer: {error}") from error
            time.sleep(0.01)
        return []

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._read = b""
        self._at = 0

    def _exchange(self, link: socket.socket, calls: Sequence[Call]) -> list[list[Any] | BusError]:
        first = self._serial + 1
        self._serial += len(calls)
        link.sendall(b"".join(_encode_call(call, first + n) for n, call in enumerate(calls)))
        answers: dict[int, list[Any] | BusError] = {}
        while len(answers) < len(calls):
            kind, fields, body = self._receive(link)
            serial = fields.get(_FIELD_REPLY_TO)
            if not isinstance(serial, int) or serial < first:
                continue  # a signal, or the answer to an abandoned call
            values = Reader(body).read_all(str(fields.get(_FIELD_SIGNATURE, "")))
            if kind == _ERROR:
                name = str(fields.get(_FIELD_ERROR, ""))
                answers[serial] = BusError(str(values[0]) if values else name, name)
            else:
                answers[serial] = values
        return [answers[first + n] for n in range(len(calls))]

    def _connect(self) -> socket.socket:
        """Connect and authenticate; on the message bus, also say Hello."""
        last: OSError = FileNotFoundError("no socket of systemd's")
        for path, is_bus in (self._place,) if self._place else _places(user=self._user):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(self._timeout_s)
            try:
                link.connect(path)
            except OSError as error:
                link.close()
                # A socket without a listener: the manager re-executes itself.
                if not isinstance(last, ConnectionRefusedError):
                    last = type(error)(error.errno, error.strerror, path)
                continue
            self._socket = link
            # systemd ignores a call that arrives together with BEGIN: the first call is sent after
            # the answers to these lines.
            uid = str(os.getuid()).encode().hex()
            link.sendall(f"\0AUTH EXTERNAL {uid}\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n".encode())
            line = self._take_line(link)
            if not line.startswith(b"OK "):
                raise PermissionError(f"{path} refused our credentials: {line!r:.80}")
            self._take_line(link)
            if is_bus:
                hello = Call("Hello", path="/org/freedesktop/DBus", interface=_DBUS)
                self._exchange(link, [hello])
            return link
        raise last

    def _fill(self, link: socket.socket, wanted: int) -> None:
        """Read until at least ``wanted`` bytes are buffered."""
        while len(self._read) - self._at < wanted:
            if self._on_wait:
                while not select.select([link], [], [], WAIT_S)[0]:
                    self._on_wait()
            piece = link.recv(1 << 16)
            if not piece:
                raise ConnectionError("the connection was closed")
            self._read = self._read[self._at :] + piece
            self._at = 0

    def _take_line(self, link: socket.socket) -> bytes:
        while (ends := self._read.find(b"\r\n", self._at)) < 0:
            if len(self._read) - self._at > 4096:
                raise ValueError("the answer is not D-Bus")
            self._fill(link, len(self._read) - self._at + 1)
        line = self._read[self._at : ends]
        self._at = ends + 2
        return line

    def _receive(self, link: socket.socket) -> tuple[int, dict[int, Any], bytes]:
        """Return the next message: kind, header fields, body."""
        self._fill(link, _START.size)
        order, kind, _, version, length, _, fields = _START.unpack_from(self._read, self._at)
        if order != ord("l") or version != 1 or length + fields > MAX_MESSAGE:
            raise ValueError("the message is big-endian, of another version or too long")
        begins = (_START.size + fields + 7) & ~7
        self._fill(link, begins + length)
        message = self._read[self._at : self._at + begins + length]
        self._at += len(message)
        if kind not in (_RETURN, _ERROR):
            return kind, {}, b""  # the private socket sends every signal to every client
        return kind, read_fields(message[_START.size - 4 : begins]), message[begins:]


def _places(*, user: bool) -> tuple[tuple[str, bool], ...]:
    """Return the manager's private socket (for its own user), then the bus (for all users)."""
    if not user:
        return ("/run/systemd/private", False), ("/run/dbus/system_bus_socket", True)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return (f"{runtime}/systemd/private", False), (f"{runtime}/bus", True)


def unit_path(name: str) -> str:
    """Return the object path of a unit."""
    escaped = _SPECIAL.sub(lambda found: b"_%02x" % ord(found[0]), name.encode()).decode()
    # The first character must not be a digit.
    if escaped[:1].isdigit():
        escaped = f"_{ord(escaped[0]):02x}{escaped[1:]}"
    return f"{PATH}/unit/{escaped}"


def _encode_call(call: Call, serial: int) -> bytes:
    is_question = call.interface == PROPERTIES  # the same few for every unit
    encode = _encode_again if is_question else _encode_arguments
    body = encode(call.signature, call.arguments)
    fields = _encode_fields(call.interface, call.member, call.signature)
    path = call.path.encode()
    fields += b"".join((_PATH_FIELD, U32.pack(len(path)), path, b"\0"))
    start = _START.pack(ord("l"), _CALL, 0, 1, len(body), serial, len(fields))
    return b"".join((start, fields, bytes(-len(fields) % 8), body))


def _encode_arguments(signature: str, arguments: tuple[Any, ...]) -> bytes:
    writer = Writer()
    for kind, value in zip(split(signature), arguments, strict=True):
        writer.write(kind, value)
    return bytes(writer.data)


_encode_again = lru_cache(maxsize=64)(_encode_arguments)


@lru_cache(maxsize=64)
def _encode_fields(interface: str, member: str, signature: str) -> bytes:
    """Return the fields of a header but for the path, which is to follow them."""
    destination = _DBUS if interface == _DBUS else _NAME
    fields = [
        (_FIELD_INTERFACE, ("s", interface)),
        (_FIELD_MEMBER, ("s", member)),
        (_FIELD_DESTINATION, ("s", destination)),
    ]
    if signature:
        fields.append((_FIELD_SIGNATURE, ("g", signature)))
    writer = Writer()
    for field in fields:
        writer.write("(yv)", field)
    writer.align(8)
    return bytes(writer.data)
