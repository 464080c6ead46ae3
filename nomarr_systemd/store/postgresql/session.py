"""One connection to the PostgreSQL host that accepts writes: statements with a deadline each.

The only module that imports psycopg2. Its connections are asynchronous, so that every wait is ours:
one deadline covers name, connection, statement and answer, and the answer's size is limited. The
meaning of statements is not known here.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg2
from psycopg2 import extensions

from nomarr_systemd.core.text import clean
from nomarr_systemd.store.resolve import resolve

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import PostgresUrl

_MAX_WORDS: Final = 300
_TRUSTED_S: Final = 5.0  # a connection that was not used for longer is asked before it is relied on
_RECEIVED: Final = 128  # where struct tcp_info has the bytes received
_CA_FILE: Final = "/etc/ssl/certs/ca-certificates.crt"
_SAID: Final = re.compile(r"^connection to server at .{1,300}? failed: (?:[A-Z]+: +)?", re.DOTALL)
# Its own messages at the start of a session have no code that psycopg2 shows, only words.
_READ_ONLY: Final = ("session is read-only", "server is in hot standby")
_NOT_TRUSTED: Final = (
    *("certificate", "server does not support SSL", "SSL error", "host name"),
    *("could not read root", "no pg_hba.conf entry"),
)
_REFUSED: Final = (
    *("authentication failed", "no password supplied", "does not exist", "permission denied"),
    *("is not permitted to log in", "is not currently accepting connections"),
)


class NotSent(Exception):
    """No connection could be made; nothing was sent."""


class Refused(NotSent):
    """A host answers and refuses this user, this database, or has the wrong certificate."""


class Unanswered(Exception):
    """The statement was sent and no usable answer came: it may have been carried out."""


class Failed(Exception):
    """The server carried the statement out with an error; ``code`` is its SQLSTATE."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answer(NamedTuple):
    rows: list[tuple[Any, ...]]
    changed: int
    status: str


class Session:
    """A connection, made when it is needed and again after it was lost. One per thread."""

    def __init__(
        self,
        url: PostgresUrl,
        *,
        password: str,
        ca_file: str | None,
        timeout_s: float,
        most: int,
    ) -> None:
        self.timeout_s = timeout_s
        self._url = url
        self._password = password
        self._ca_file = (ca_file or _system_ca_file()) if url.tls else ""
        self._most = most
        self._first = 0  # the host to ask first: the last one that accepted writes
        self._connection: extensions.connection | None = None
        self._socket: socket.socket | None = None
        self._used = 0.0
        self._keep = False  # in a transaction: a lost connection is not replaced

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def received(self) -> int:
        """The bytes received on this connection, as the kernel counts them."""
        if self._socket is None:
            return 0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("Q", info, _RECEIVED)[0]) if len(info) >= 136 else 0

    def keep(self, *, on: bool) -> None:
        """While ``on``, statements fail if the connection is lost: they belong together."""
        self._keep = on

    def run(
        self, sql: str, values: Sequence[object] = (), *, timeout_s: float | None = None
    ) -> Answer:
        """Return the answer to the last of the statements in ``sql``; NotSent, Unanswered or
        Failed."""
        ends = time.monotonic() + (timeout_s or self.timeout_s)
        connection = self._connection
        if connection is None or not self._keep:
            connection = self._make_ready(ends)
        return self._ask(connection, sql, values, ends)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        counted, self._socket = self._socket, None
        for each in (connection, counted):
            if each is not None:
                with contextlib.suppress(psycopg2.Error, OSError):
                    each.close()

    def _ask(
        self, connection: extensions.connection, sql: str, values: Sequence[object], ends: float
    ) -> Answer:
        try:
            cursor = connection.cursor()
            cursor.execute(sql, tuple(values) or None)
            self._wait(connection, ends, self.received + self._most)
            rows = cursor.fetchall() if cursor.description else []
            answer = Answer(rows, max(0, cursor.rowcount), str(cursor.statusmessage or ""))
            cursor.close()
        except psycopg2.Error as error:
            code = error.pgcode
            message = clean(_words(error), _MAX_WORDS)
            # Class 57P: the server ends the session. Without a code it was lost.
            if not code or code.startswith("57P") or connection.closed:
                self.close()
                raise Unanswered(message) from error
            self._used = time.monotonic()
            raise Failed(code, message) from error
        except (OSError, UnicodeError, OverflowError) as error:
            self.close()
            raise Unanswered(clean(str(error), _MAX_WORDS)) from error
        except BaseException:
            self.close()  # a part of the answer may be unread
            raise
        self._used = time.monotonic()
        return answer

    def _make_ready(self, ends: float) -> extensions.connection:
        """Return a connection on which nothing waits to be read. One that was idle must answer
        first: its host may be gone without closing it."""
        connection = self._connection
        if connection is not None:
            now = time.monotonic()
            if not _is_quiet(connection):
                self.close()
            elif now - self._used > _TRUSTED_S:
                with contextlib.suppress(Unanswered, Failed):
                    self._ask(connection, "SELECT 1", (), now + (ends - now) / 2)
        if self._connection is None:
            if self._keep:
                raise Unanswered("the connection was lost in the middle of a transaction")
            self._connection = self._connect(ends)
        return self._connection

    def _connect(self, ends: float) -> extensions.connection:
        """Ask the hosts in turn, each for its share of the time, for one that accepts writes."""
        number, said = len(self._url.hosts), []
        is_refused = False
        for n in range(number):
            index = (self._first + n) % number
            host, port = self._url.hosts[index]
            now = time.monotonic()
            try:
                connection = self._connect_to(host, port, now + (ends - now) / (number - n))
            except (NotSent, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else None
                said.append(f"{host}:{port}: {clean(why or str(error), _MAX_WORDS)}")
                is_refused = is_refused or isinstance(error, Refused)
            else:
                self._first = index
                return connection
        raise (Refused if is_refused else NotSent)("; ".join(said))

    def _connect_to(self, host: str, port: int, ends: float) -> extensions.connection:
        last: Exception = OSError("it has no address")
        for address in resolve(host, port, ends):
            connection: extensions.connection | None = None
            try:
                options = self._options(host, port, address)
                connection = psycopg2.connect(**options, async_=True)
                self._wait(connection, ends, None)
                self._socket = socket.socket(fileno=os.dup(connection.fileno()))
                self._begin(connection, ends)
                return connection
            except (psycopg2.Error, NotSent, Unanswered, Failed, OSError) as error:
                last = _explain(error)
                if connection is not None:
                    with contextlib.suppress(psycopg2.Error):
                        connection.close()
                self.close()
        raise last

    def _options(self, host: str, port: int, address: str) -> dict[str, Any]:
        """Return all options: libpq would take the others from its environment and user files."""
        patience_ms = int(self.timeout_s * 1000)
        return {
            "host": host,
            "hostaddr": address,
            "port": port,
            "user": self._url.user,
            "password": self._password,
            "dbname": self._url.database,
            "sslmode": "verify-full" if self._url.tls else "disable",
            "sslrootcert": self._ca_file,
            "gssencmode": "disable",
            "target_session_attrs": "read-write",
            "client_encoding": "UTF8",
            "application_name": "nomarr",
            "options": "",
            "passfile": os.devnull,
            "keepalives_idle": 30,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": patience_ms,
        }

    def _begin(self, connection: extensions.connection, ends: float) -> None:
        """Set up the session: no names but the catalog's, and statements that the client no longer
        waits for end on the server, too."""
        patience_ms = int(self.timeout_s * 1000)
        answer = self._ask(
            connection,
            "SET search_path = pg_catalog; SET client_min_messages = error; SET jit = off;"
            f" SET statement_timeout = {patience_ms}; SET lock_timeout = {patience_ms};"
            " SET idle_in_transaction_session_timeout = 10000;"
            " SET default_transaction_isolation = 'read committed';"
            " SELECT current_setting('server_encoding'), CASE current_setting('synchronous_commit')"
            " WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END",
            (),
            ends,
        )
        if [row[0] for row in answer.rows] != ["UTF8"]:
            raise Refused("the database's encoding is not UTF8")

    def _wait(self, connection: extensions.connection, ends: float, most: int | None) -> None:
        """Wait until the connection has done what it is doing."""
        while (state := connection.poll()) != extensions.POLL_OK:
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it did not answer in time")
            if most is not None and self.received > most:
                raise OverflowError(f"its answer has more than {self._most} bytes")
            poll = select.poll()
            event = select.POLLOUT if state == extensions.POLL_WRITE else select.POLLIN
            poll.register(connection.fileno(), event)
            poll.poll(left_s * 1000)


def _explain(error: Exception) -> Exception:
    """Return the reason why there is no connection, as Refused where a person has to mend it."""
    if isinstance(error, NotSent | OSError):
        return error
    if isinstance(error, Unanswered | Failed):
        return NotSent(str(error))
    words = clean(_SAID.sub("", _words(error)), _MAX_WORDS)
    if any(each in words for each in _READ_ONLY):
        return NotSent("it accepts no writes (a standby, or a failover is under way)")
    if any(each in words for each in (*_NOT_TRUSTED, *_REFUSED)):
        return Refused(words)
    return NotSent(words)


def _words(error: Exception) -> str:
    """Return the first line of the server's or the driver's message, without its severity."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_quiet(connection: extensions.connection) -> bool:
    """Return True if nothing can be read. Between statements, anything to read is the session's
    end."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)


def _system_ca_file() -> str:
    """Return the system's authorities: libpq before 16 does not find them by itself."""
    import ssl  # slow to import, and rarely needed

    found = ssl.get_default_verify_paths().cafile
    return found if found and os.path.exists(found) else _CA_FILE
