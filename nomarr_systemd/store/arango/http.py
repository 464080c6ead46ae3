"""Requests to ArangoDB: hosts that fail, time-outs, certificates, and its errors as our own.

The only module that imports python-arango. The meaning of requests and answers is not known here.
If an answer is not an object of limited size that comes in time, the server counts as away. Texts
from the server are cleaned before they are printed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from arango.client import ArangoClient
from arango.exceptions import ArangoError
from arango.http import HTTPClient
from arango.resolver import HostResolver
from arango.response import Response

from nomarr_systemd.core.errors import (
    BadDocument,
    KeyExists,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.core.text import clean
from nomarr_systemd.store.arango.exchange import Connection, NotSent, NotTrusted, Unanswered
from nomarr_systemd.store.protocol import MAX_DEPTH, decode

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import ArangoUrl
    from nomarr_systemd.config.values import Copies

T = TypeVar("T")

CONFLICT: Final = 1200
NO_DOCUMENT: Final = 1202
DUPLICATE_NAME: Final = 1207
KEY_TAKEN: Final = 1210
NO_DATABASE: Final = 1228
# A collection that another coordinator does not see yet, a transaction that a new leader does not
# know, an exhausted or aborted cursor; and two hosts that make the same thing.
UNSETTLED: Final = frozenset({1203, DUPLICATE_NAME, NO_DATABASE, 1601, 1655})
# Those, locks, a deadlock, shutdown, limits, a cursor that is gone.
TEMPORARY: Final = frozenset({18, 21, 28, 29, 30, 32, 1203, 1500, 1600, 1601, 1655, 21003, 21004})
# Words for what a person can mend, and what to do.
_NAMED: Final = {
    1004: (
        "it accepts no writes (fewer copies are left than write_concern, or it is read-only)",
        "bring the cluster's other servers back",
    ),
    1104: ("its disk is full", "free space on the server's disk"),
    1305: ("its disk fails", "look at the server's log and its disk"),
    1487: (
        "it has fewer servers than replication_factor",
        "start the cluster's other servers, or lower replication_factor under [store]",
    ),
}
CLUSTER: Final = range(1400, 1500)  # leaders that change, servers that do not reach each other
QUERY: Final = range(1501, 1600)

# Pauses between the retries of two writers of one document.
PAUSES_S: Final = (0.005, 0.02, 0.05, 0.1, 0.2)


_MAX_WORDS: Final = 300  # characters of the server's error message
_MAX_DEPTH: Final = MAX_DEPTH + 8  # of an answer: documents are inside it
# What python-arango and our own checks raise if an answer is not as expected.
_STRANGE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Link:
    """One database on one or more hosts, as one user.

    A request has its whole answer within ``timeout_s``, of at most ``most`` bytes, and a call asks
    each host once: it takes at most ``timeout_s`` times the number of hosts.
    """

    def __init__(
        self,
        url: ArangoUrl,
        *,
        password: str,
        ca_file: str | None,
        timeout_s: float,
        most: int,
        copies: Copies,
    ) -> None:
        self._copies = copies
        self.where = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        self._url = url
        self._password = password
        resolver = _NextHost(len(url.hosts))
        context = _trust(ca_file) if url.tls else None
        self._sender = _Sender(resolver, context, timeout_s, most)
        self._client = ArangoClient(
            hosts=[_address(host, port, tls=url.tls) for host, port in url.hosts],
            host_resolver=resolver,
            resolver_max_tries=len(url.hosts),
            http_client=self._sender,
            deserializer=_as_it_is,
        )

    @property
    def received(self) -> int:
        """The bytes of all answers so far."""
        return self._sender.received

    def database(self, name: str) -> Any:
        return self._client.db(name, username=self._url.user, password=self._password)

    def close(self) -> None:
        self._client.close()

    def ask(self, what: str, call: Callable[[], T], *, repeatable: bool = False) -> T:
        """Return the call's result, or a StoreError about ``what``.

        A repeatable call is sent to the next host after any failure, any other one only if no
        connection could be made: it might be carried out twice.
        """
        for left in reversed(range(len(self._url.hosts))):
            try:
                return call()
            except NotSent as error:
                if not left:
                    raise self._unreachable(error) from error
            except Unanswered as error:
                if not (left and repeatable):
                    raise self._unreachable(error) from error
            except ArangoError as error:
                raise self._translate(what, error) from error
            except _STRANGE as error:
                raise self.strange(what) from error
        raise AssertionError("a URL names one host at least")

    def settle(self, what: str, call: Callable[[], T]) -> T:
        """``ask``, with retries if two writers change one document: the server refuses one."""
        ends = time.monotonic() + self._sender.request_timeout
        for pause_s in PAUSES_S:
            try:
                return self.ask(what, call)
            except StaleRevision:
                if time.monotonic() > ends:
                    break
                time.sleep(pause_s)
        try:
            return self.ask(what, call)
        except StaleRevision as error:
            raise StoreUnavailable(f"too many writers at once: {error}") from error

    @contextlib.contextmanager
    def patience(self, timeout_s: float) -> Iterator[None]:
        """Inside, wait for an answer up to ``timeout_s``, if that is longer than usual."""
        usual_s = self._sender.request_timeout
        self._sender.request_timeout = max(usual_s, timeout_s)
        try:
            yield
        finally:
            self._sender.request_timeout = usual_s

    def strange(self, what: str) -> StoreUnavailable:
        """Return the error for an answer of another shape than expected: the store counts as
        away."""
        return StoreUnavailable(
            f"{what} in ArangoDB at {self.where}: its answer is not as expected",
            hint="check that ArangoDB listens there and that its data is not damaged",
        )

    def creation(self) -> str:
        """Return the arangosh statement that creates the database."""
        options = ", ".join(
            f"{_camel(name)}: {json.dumps(value)}" for name, value in self._copies.given().items()
        )
        return f'db._createDatabase("{self._url.database}"{f", {{{options}}}" if options else ""})'

    def grant(self) -> str:
        """Return the arangosh statement that grants our user the right to the database."""
        user, database = self._url.user, self._url.database
        return f'require("@arangodb/users").grantDatabase("{user}", "{database}", "rw")'

    def _unreachable(self, error: Exception) -> StoreError:
        if isinstance(error, NotTrusted):
            return StoreRefused(
                f"ArangoDB at {self.where}: {error}",
                hint="set ca_file to the authority that signed the server's certificate",
            )
        how = "cannot be reached" if isinstance(error, NotSent) else "did not answer"
        return StoreUnavailable(f"ArangoDB at {self.where} {how}: {error}")

    def _translate(self, what: str, error: Any) -> StoreError:
        number, status = error.error_code or 0, error.http_code or 0
        message = clean(str(error.error_message or error), _MAX_WORDS)
        place = f"{what} in ArangoDB at {self.where}"
        said = f"{place}: {message} ({status}/{number})"
        if number == KEY_TAKEN:
            return KeyExists(said)
        if number in (CONFLICT, NO_DOCUMENT):
            return StaleRevision(said)
        if number in _NAMED:
            words, hint = _NAMED[number]
            return StoreUnavailable(f"{place}: {words} ({status}/{number}: {message})", hint=hint)
        if number in TEMPORARY or number in CLUSTER or status >= 500 or status in (408, 410, 429):
            return StoreUnavailable(said)
        if status in (401, 403):
            # The server looks at rights first: a missing database looks the same.
            return StoreRefused(
                said,
                hint=f"check the password of {self._url.user!r}; or there is no database"
                f" {self._url.database!r}, or no right to it: in arangosh: {self.creation()};"
                f" {self.grant()}",
            )
        if status in (400, 413) and number not in QUERY:
            return BadDocument(said)
        return StoreRefused(said, hint=f"is {self._url.database!r} the right database?")


def number_of(error: StoreError) -> int | None:
    """ArangoDB's number of the error that caused this one; None if there is none."""
    return getattr(error.__cause__, "error_code", None)


class _NextHost(HostResolver):
    """Uses one host until it fails, then the next one."""

    def __init__(self, host_count: int) -> None:
        super().__init__(host_count, host_count)
        self._index = 0

    def get_host_index(self, _indexes_to_filter: set[int] | None = None) -> int:
        return self._index

    def move_on(self) -> None:
        self._index = (self._index + 1) % self.host_count


class _Sender(HTTPClient):
    """Sends a request once, to one host; raises NotSent, or Unanswered if it may have arrived.

    python-arango's own client tries GETs four times, takes every broken connection for a request
    that never arrived, has a time-out for each piece of an answer, and reads answers of any size.
    """

    def __init__(
        self, resolver: _NextHost, context: ssl.SSLContext | None, timeout_s: float, most: int
    ) -> None:
        self.request_timeout = timeout_s
        self.received = 0
        self._resolver = resolver
        self._context = context
        self._most = most

    def create_session(self, host: str) -> Any:
        parts = urlsplit(host)
        return Connection(parts.hostname or "", parts.port or 0, self._context)

    def send_request(
        self,
        session: Any,
        method: str,
        url: str,
        headers: MutableMapping[str, str] | None = None,
        params: MutableMapping[str, str] | None = None,
        data: Any = None,
        auth: tuple[str, str] | None = None,
    ) -> Response:
        # As UTF-8, which ArangoDB's names and passwords are.
        credentials = base64.b64encode(":".join(auth or ("", "")).encode()).decode()
        try:
            answer = session.exchange(
                method.upper(),
                _exact_target(url, params or {}),
                {**(headers or {}), "Authorization": f"Basic {credentials}"},
                data.encode() if isinstance(data, str) else data,
                timeout_s=self.request_timeout,
                most=self._most,
            )
            self.received += len(answer.content)
            is_fine = 200 <= answer.status < 300
            if is_fine and "json" not in answer.headers.get("content-type", ""):
                raise StoreRefused(
                    f"what answers at {url.partition('/_db/')[0]} is not ArangoDB",
                    hint="check host and port in [store] url",
                )
            body = _parse(answer.content) if is_fine else _parse_error(answer.content)
            if answer.status == 503:  # python-arango would send some of these again by itself
                raise Unanswered(f"503 {body.get('errorMessage', '')}")
        except (NotSent, Unanswered):
            self._resolver.move_on()
            raise
        return Response(
            method=method,
            url=url,
            headers=dict(answer.headers),
            status_code=answer.status,
            status_text=clean(answer.reason, _MAX_WORDS),
            raw_body=body,  # type: ignore[arg-type]  # parsed already, see _as_it_is
        )


def _as_it_is(body: Any) -> Any:
    return body


def _parse(content: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer; Unanswered if it is not one, or cannot be encoded
    again."""
    try:
        return decode(content.decode() or "{}", _MAX_DEPTH)
    except ValueError as error:
        raise Unanswered(f"its answer is not JSON: {clean(str(error), _MAX_WORDS)}") from error


def _parse_error(content: bytes) -> dict[str, Any]:
    """Return the error in an answer: its number, and its message in one printable line."""
    try:
        said = _parse(content)
    except Unanswered:
        said = {"errorMessage": content[: 4 * _MAX_WORDS].decode(errors="replace")}
    number, message = said.get("errorNum"), said.get("errorMessage")
    return {
        "errorNum": number if type(number) is int else 0,
        "errorMessage": clean(message, _MAX_WORDS) if isinstance(message, str) else "",
    }


def _exact_target(url: str, params: MutableMapping[str, str]) -> str:
    """Path and query of the URL, with each part of its path quoted.

    python-arango puts keys into paths as they stand, where ``%41`` would become ``A`` and ``..``
    another path; both are good keys.
    """
    _, *parts = url.partition("://")[2].split("/")
    quoted = [
        part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="") for part in parts
    ]
    query = f"?{urlencode(params)}" if params else ""
    return f"/{'/'.join(quoted)}{query}"


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(each.capitalize() for each in others)


def _address(host: str, port: int, *, tls: bool) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def _trust(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that verifies certificates by the file's authorities, or by the system's."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError among them
        raise StoreRefused(
            f"cannot use {ca_file} to check certificates: {error.strerror or error}",
            hint="ca_file names a PEM file with the authority's certificate",
        ) from error
