"""Requests to ArangoDB: hosts that fail, time-outs, certificates, and its errors as our own.

With ``arango.store`` the only module that imports python-arango. What is asked for, and what to
do about an answer, is not known here.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode

from arango.client import ArangoClient
from arango.exceptions import ArangoError
from arango.http import HTTPClient
from arango.resolver import HostResolver
from arango.response import Response
from requests import Request, Session
from requests.exceptions import ConnectTimeout, RequestException
from urllib3.exceptions import NewConnectionError

from nomarr_systemd.core.errors import (
    BadDocument,
    KeyExists,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import ArangoUrl

T = TypeVar("T")

CONFLICT: Final = 1200
NO_DOCUMENT: Final = 1202
DUPLICATE_NAME: Final = 1207
KEY_TAKEN: Final = 1210
NO_DATABASE: Final = 1228
# Locks, a deadlock, shutdown, limits, a write concern not met, a full disk, a cursor that is gone.
TEMPORARY: Final = frozenset({18, 21, 28, 29, 30, 32, 1004, 1104, 1500, 1600, 21003, 21004})
CLUSTER: Final = range(1400, 1500)  # leaders that change, servers that do not reach each other
QUERY: Final = range(1501, 1600)

# Pauses between the retries of two writers of one document.
PAUSES_S: Final = (0.005, 0.02, 0.05, 0.1, 0.2)


class _NotSent(Exception):
    """No connection came about, so the request may go to another host."""


class _NotTrusted(_NotSent):
    """The host's certificate did not pass, so it was told nothing."""


class _Unanswered(Exception):
    """The request went out and no answer came: it may have been carried out."""


class Link:
    """One database on one or more hosts, as one user.

    A request waits ``timeout_s`` for its connection and for each piece of the answer, and a call
    asks each host once: it takes at most ``timeout_s`` times the number of hosts.
    """

    def __init__(
        self, url: ArangoUrl, *, password: str, ca_file: str | None, timeout_s: float
    ) -> None:
        self.where = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        self._url = url
        self._password = password
        resolver = _NextHost(len(url.hosts))
        self._sender = _Sender(resolver, _authorities(ca_file) if url.tls else True, timeout_s)
        self._client = ArangoClient(
            hosts=[_address(host, port, tls=url.tls) for host, port in url.hosts],
            host_resolver=resolver,
            resolver_max_tries=len(url.hosts),
            http_client=self._sender,
        )

    def database(self, name: str) -> Any:
        return self._client.db(name, username=self._url.user, password=self._password)

    def close(self) -> None:
        self._client.close()

    def ask(self, what: str, call: Callable[[], T], *, repeatable: bool = False) -> T:
        """The call's result, or a StoreError about ``what``.

        A repeatable call goes to the next host whatever happened, any other only if no
        connection came about: it might be carried out twice.
        """
        for left in reversed(range(len(self._url.hosts))):
            try:
                return call()
            except _NotSent as error:
                if not left:
                    raise self._unreachable(error) from error
            except _Unanswered as error:
                if not (left and repeatable):
                    raise self._unreachable(error) from error
            except ArangoError as error:
                raise self._translate(what, error) from error
        raise AssertionError("a URL names one host at least")

    def settle(self, what: str, call: Callable[[], T]) -> T:
        """Retry where two writers met on one document: the server refuses one of them."""
        for pause_s in PAUSES_S:
            try:
                return self.ask(what, call)
            except StaleRevision:
                time.sleep(pause_s)
        try:
            return self.ask(what, call)
        except StaleRevision as error:
            raise StoreUnavailable(f"too many writers at once: {error}") from error

    @contextlib.contextmanager
    def patience(self, timeout_s: float) -> Iterator[None]:
        """Wait this long inside, if it is longer than usual."""
        usual_s = self._sender.request_timeout
        self._sender.request_timeout = max(usual_s, timeout_s)
        try:
            yield
        finally:
            self._sender.request_timeout = usual_s

    def grant(self) -> str:
        """What to type into arangosh when a right is missing."""
        user, database = self._url.user, self._url.database
        return f'require("@arangodb/users").grantDatabase("{user}", "{database}", "rw")'

    def _unreachable(self, error: Exception) -> StoreError:
        if isinstance(error, _NotTrusted):
            return StoreRefused(
                f"ArangoDB at {self.where}: {error}",
                hint="set ca_file to the authority that signed the server's certificate",
            )
        return StoreUnavailable(f"ArangoDB at {self.where} cannot be reached: {error}")

    def _translate(self, what: str, error: Any) -> StoreError:
        number, status = error.error_code or 0, error.http_code or 0
        message = error.error_message or error
        said = f"{what} in ArangoDB at {self.where}: {message} ({status}/{number})"
        if number == KEY_TAKEN:
            return KeyExists(said)
        if number in (CONFLICT, NO_DOCUMENT):
            return StaleRevision(said)
        if number in TEMPORARY or number in CLUSTER or status >= 500 or status in (408, 410, 429):
            return StoreUnavailable(said)
        if status in (401, 403):
            return StoreRefused(
                said,
                hint=f"check the password of {self._url.user!r}, and in arangosh: {self.grant()}",
            )
        if status in (400, 413) and number not in QUERY:
            return BadDocument(said)
        return StoreRefused(said, hint=f"is {self._url.database!r} the right database?")


def number_of(error: StoreError) -> int | None:
    """ArangoDB's number of the error that this one was made from."""
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
    """Sends a request once, to one host, and says of a failure whether it can have arrived.

    python-arango's own client tries GETs four times and takes every broken connection for a
    request that never arrived, so that it would send writes twice.
    """

    def __init__(self, resolver: _NextHost, verify: bool | str, timeout_s: float) -> None:
        self.request_timeout = timeout_s
        self._resolver = resolver
        self._verify = verify

    def create_session(self, host: str) -> Session:  # noqa: ARG002  python-arango's signature
        session = Session()
        session.trust_env = False  # no proxies, .netrc or other authorities from the environment
        session.verify = self._verify
        return session

    def send_request(
        self,
        session: Session,
        method: str,
        url: str,
        headers: MutableMapping[str, str] | None = None,
        params: MutableMapping[str, str] | None = None,
        data: Any = None,
        auth: tuple[str, str] | None = None,
    ) -> Response:
        user, password = auth or ("", "")
        # As bytes: a text would be sent as Latin-1, and ArangoDB's names are UTF-8.
        credentials: Any = (user.encode(), password.encode())
        request = session.prepare_request(
            Request(method.upper(), url, headers=headers, data=data, auth=credentials)
        )
        request.url = _exact_url(url, params or {})
        try:
            answer = session.send(request, timeout=self.request_timeout, allow_redirects=False)
        except RequestException as error:
            self._resolver.move_on()
            raise _explain(error) from error
        if answer.status_code == 503:  # python-arango would send some of these again by itself
            self._resolver.move_on()
            raise _Unanswered(f"503 {answer.content[:200].decode(errors='replace')}")
        if answer.ok and "json" not in answer.headers.get("content-type", ""):
            raise StoreRefused(
                f"what answers at {url.partition('/_db/')[0]} is not ArangoDB",
                hint="check host and port in [store] url",
            )
        return Response(
            method=method,
            url=url,
            headers=answer.headers,
            status_code=answer.status_code,
            status_text=answer.reason,
            raw_body=answer.content.decode(),
        )


def _exact_url(url: str, params: MutableMapping[str, str]) -> str:
    """The URL with each part of its path quoted.

    python-arango puts keys into paths as they stand, where ``%41`` would become ``A`` and ``..``
    another path; both are good keys.
    """
    scheme, _, rest = url.partition("://")
    host, *parts = rest.split("/")
    quoted = [
        part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="") for part in parts
    ]
    query = f"?{urlencode(params)}" if params else ""
    return f"{scheme}://{'/'.join([host, *quoted])}{query}"


def _explain(error: RequestException) -> Exception:
    reason = getattr(error.args[0], "reason", None) if error.args else None
    cause = reason.args[0] if reason is not None and reason.args else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _NotTrusted(f"the certificate was not accepted: {cause.verify_message}")
    if isinstance(error, ConnectTimeout) or isinstance(reason, NewConnectionError):
        return _NotSent(str(reason or error).rpartition(": ")[2])
    return _Unanswered(str(error.args[0] if error.args else error))


def _address(host: str, port: int, *, tls: bool) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def _authorities(ca_file: str | None) -> bool | str:
    """What ``requests`` verifies by: the file, or the system's own rather than a bundled list."""
    if ca_file is None:
        paths = ssl.get_default_verify_paths()
        return paths.cafile or paths.capath or True
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError among them
        raise StoreRefused(
            f"cannot use {ca_file} to check certificates: {error.strerror or error}",
            hint="ca_file names a PEM file with the authority's certificate",
        ) from error
    return ca_file
