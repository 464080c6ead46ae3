"""Parse the URL of the store, of which there are three kinds. Nothing is opened here.

No message repeats the URL: it may have a password in it where none belongs.
"""

from __future__ import annotations

import re
from typing import Final

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.named_tuple import NamedTuple

_SQLITE = "sqlite://"
_HINT = (
    "write sqlite:///absolute/directory, postgresql+tls://user@host:5432/database"
    " or arangodb+tls://user@host:8529/database (without +tls: not encrypted)"
)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_USER = re.compile(r"[^\s:/?#%]{1,254}")
_DATABASE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}")


class SqliteUrl(NamedTuple):
    """A directory of SQLite files."""

    directory: str


class ArangoUrl(NamedTuple):
    """A database on one ArangoDB server, or on several that share it."""

    user: str
    hosts: tuple[tuple[str, int], ...]
    database: str
    tls: bool


class PostgresUrl(NamedTuple):
    """A database on a PostgreSQL server; with several hosts, one of them accepts writes."""

    user: str
    hosts: tuple[tuple[str, int], ...]
    database: str
    tls: bool


ServerUrl = ArangoUrl | PostgresUrl


class Engine(NamedTuple):
    """A database server: its name for people, the scheme of its URLs, its usual port."""

    title: str
    scheme: str
    port: int


ENGINES: Final[dict[type[ServerUrl], Engine]] = {
    ArangoUrl: Engine("ArangoDB", "arangodb", 8529),
    PostgresUrl: Engine("PostgreSQL", "postgresql", 5432),
}


def engine_of(url: ServerUrl) -> Engine:
    """Return the database server that the URL is for."""
    return ENGINES[type(url)]


def parse_store_url(url: str) -> SqliteUrl | ServerUrl:
    """Return the parsed URL, or BadName with the reason."""
    if not url.isprintable():
        raise _bad("it has characters that cannot be printed")
    if url.startswith(_SQLITE):
        return SqliteUrl(_parse_directory(url.removeprefix(_SQLITE)))
    scheme, separator, rest = url.partition("://")
    for kind, engine in ENGINES.items():
        if separator and scheme.removesuffix("+tls") == engine.scheme:
            return _parse_server(kind, rest, tls=scheme.endswith("+tls"))
    raise _bad("it does not start with sqlite://, postgresql:// or arangodb://, or one with +tls")


def is_local(host: str) -> bool:
    """Return True if what is sent to this host does not leave the machine."""
    from ipaddress import ip_address  # rare, and slow to import

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def find_addresses(url: str) -> tuple[str, ...] | None:
    """Return the addresses of the URL's hosts, none for SQLite; None if a host has a name, whose
    addresses may change. The local host is ``localhost``, as systemd calls its addresses."""
    from ipaddress import ip_address  # rare, and slow to import

    parsed = parse_store_url(url)
    hosts = () if isinstance(parsed, SqliteUrl) else [host for host, _ in parsed.hosts]
    try:
        found = ["localhost" if is_local(host) else str(ip_address(host)) for host in hosts]
    except ValueError:
        return None
    return tuple(dict.fromkeys(found))


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` (an IPv6 address in brackets), or BadName and why."""
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise BadName("the address in brackets is not followed by :PORT")
        _check_ipv6(host)
        port = rest[1:] if rest else None
    else:
        host, colon, rest = text.partition(":")
        if ":" in rest:
            raise BadName("there is more than one colon; an IPv6 address stands in brackets")
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise BadName("the host is not a name or an address")
        port = rest if colon else None
    if port is None:
        if default_port is None:
            raise BadName("there is no :PORT")
        return host, default_port
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise BadName("the port is not a number from 1 to 65535")
    return host, int(port)


def _parse_directory(path: str) -> str:
    if not path.startswith("/"):
        raise _bad("the directory is not absolute: three slashes, as in sqlite:///var/lib/nomarr")
    if any(sign in path for sign in "%?#"):
        raise _bad("the directory is taken as it stands, so %, ? and # have no meaning in it")
    parts = [part for part in path.split("/") if part]
    if not parts or "." in parts or ".." in parts:
        raise _bad("the directory must have a name, and no . or .. in it")
    return "/" + "/".join(parts)


def _parse_server(kind: type[ServerUrl], rest: str, *, tls: bool) -> ServerUrl:
    authority, _, database = rest.partition("/")
    user, at, places = authority.rpartition("@")
    if ":" in user or (not at and "@" in database):
        raise BadName(
            "the URL has a password in it: it would be seen in the file and in process lists",
            hint="take it out; set password_file, or give it as a systemd credential",
        )
    if not _USER.fullmatch(user):
        raise _bad("there is no user before the @, or it has characters that a user cannot have")
    if not _DATABASE.fullmatch(database):
        raise _bad("after the hosts, write / and the name of a database: letters, digits, _ or -")
    hosts, port = places.split(","), ENGINES[kind].port
    parsed = tuple(_parse_host(hosts, n, port) for n in range(len(hosts)))
    return kind(user, parsed, database, tls)


def _parse_host(hosts: list[str], number: int, port: int) -> tuple[str, int]:
    try:
        return parse_address(hosts[number], default_port=port)
    except BadName as error:
        which = f" {number + 1} of {len(hosts)}" if len(hosts) > 1 else ""
        raise _bad(f"host{which}: {error}") from error


def _check_ipv6(host: str) -> None:
    from ipaddress import AddressValueError, IPv6Address  # rare, and slow to import

    try:
        IPv6Address(host)
    except AddressValueError as error:
        raise BadName("what stands in brackets is not an IPv6 address") from error


def _bad(why: str) -> BadName:
    return BadName(f"the URL names no store: {why}", hint=_HINT)
