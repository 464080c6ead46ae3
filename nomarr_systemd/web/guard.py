"""Checks of requests: Host, Origin, Sec-Fetch-Site, the token, and the user of a local client.

Pure but for ``find_peer_uid``. The page itself and its files hold no data and need no token.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from typing import Final, NamedTuple

LOCAL_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_MAX_NAME: Final = 300
_TABLES: Final = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
_MAPPED: Final = "0000000000000000FFFF0000"  # ::ffff:0:0/96 as in the table
_LOOKS: Final = 3


class Refusal(NamedTuple):
    """An HTTP status, what is wrong, and what to do."""

    status: int
    error: str
    hint: str = ""


class Guard(NamedTuple):
    """``hosts`` None: any (a Unix socket, which no web page can reach). An empty ``token``:
    none is needed."""

    hosts: frozenset[str] | None
    token: bytes = b""

    def check(self, method: str, headers: Mapping[str, str], *, data: bool) -> Refusal | None:
        """Return why a request is refused; ``data`` says that it asks for more than the page's
        files."""
        if method not in ("GET", "HEAD"):
            return Refusal(405, "only GET and HEAD are allowed")
        host = split_host(headers.get("Host", ""))
        if self.hosts is not None and host not in self.hosts:
            hint = "use one of the names it listens on, or add the name to [web] hosts"
            return Refusal(421, "this server does not answer to that Host", hint)
        origin = headers.get("Origin")
        if origin is not None and split_host(origin.partition("://")[2]) != host:
            return Refusal(403, "requests of other sites are refused")
        site = headers.get("Sec-Fetch-Site", "none")
        if data and site not in ("none", "same-origin"):
            return Refusal(403, "requests of other sites are refused")
        if data and self.token and not self._is_token(headers.get("Authorization", "")):
            return Refusal(401, "a token is needed", "send Authorization: Bearer TOKEN")
        return None

    def _is_token(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token)
        return right and kind.lower() == "bearer"


def split_host(text: str) -> str:
    """Return the name of a Host header in small letters, without its port; empty if it is none."""
    text = text.strip().lower()
    if len(text) > _MAX_NAME:
        return ""
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") or not port else "no port"
        return name if bracket and (not port or port.isdigit()) else ""
    name, colon, port = text.partition(":")
    return name if not colon or port.isdigit() else ""


def is_loopback(host: str) -> bool:
    """Return True if an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_peer_uid(family: int, peer: tuple[str, int], local: tuple[str, int]) -> int | None:
    """Return the user whose process has the other end of a loopback connection; None if not known.

    The kernel's table lists both ends: the client's has our address as its remote one. A client
    may reach an IPv4 address by a socket of IPv6, which is in the other table.
    """
    if socket.AddressFamily(family) not in _TABLES:
        return None
    wanted = [_as_in_table(family, *peer), _as_in_table(family, *local)]
    tables = {_TABLES[socket.AddressFamily(family)]: wanted}
    if family == socket.AF_INET:
        tables[_TABLES[socket.AF_INET6]] = [_MAPPED + each for each in wanted]
    for _ in range(_LOOKS):  # the table is not read at one moment: others come and go
        for table, ends in tables.items():
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(table, encoding="ascii") as file,
            ):
                for line in file:
                    fields = line.split(None, 8)
                    if fields[1:3] == ends:
                        return int(fields[7])
    return None


def _as_in_table(family: int, address: str, port: int) -> str:
    """``127.0.0.1``, 8765 → ``0100007F:223D``: each word in the byte order of the machine."""
    raw = socket.inet_pton(family, address.partition("%")[0])
    words = (int.from_bytes(raw[n : n + 4], "little") for n in range(0, len(raw), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
