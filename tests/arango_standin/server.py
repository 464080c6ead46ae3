"""The HTTP side: who may ask, which path means what, and how an answer looks.

DOCS develop/http-api/: authentication/, databases/, collections/, indexes/persistent/,
documents/, import/, queries/aql-queries/. What is kept and found is ``data``'s matter.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.arango_standin.accounts import Accounts
from tests.arango_standin.data import COPIES, Database, Databases, Refusal
from tests.arango_standin.faults import Fault, Faults
from tests.arango_standin.mutations import mutate

_MAX_NESTING = 199  # DOCS aql/fundamentals/limitations/: "slightly below 200"


class Asked(NamedTuple):
    """A request taken apart."""

    method: str
    parts: tuple[str, ...]
    options: dict[str, str]
    body: Any
    if_match: str | None

    def option(self, name: str, default: str = "false") -> bool:
        return self.options.get(name, default).lower() in ("true", "1", "yes", "on")


Answer = tuple[int, Any]
# What is implemented. Anything else would be ignored in silence, so it is refused; False is as good
# as nothing said.
_OPTIONS = {
    *("collection", "complete", "details", "excludeSystem", "ignoreRevs", "onDuplicate", "silent"),
    *("type", "waitForSync"),
}


# What python-arango says of every collection, and what is so here in any case.
_USUAL = {
    "isSystem": False,
    "type": 2,
    "keyOptions": {"type": "traditional", "allowUserKeys": True},
}


# The same of every query: it is neither counted nor limited, and no batch is asked for twice.
_PLAIN = {"count": False, "memoryLimit": 0, "allowRetry": False, "options": {"allowRetry": False}}


class Server(ThreadingHTTPServer):
    """All state, and the lock under which a request is carried out as a whole."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, accounts: Accounts) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.accounts = accounts
        self.databases = Databases()
        self.faults = Faults()
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def carry_out(self, database: Database, asked: Asked) -> Answer:
        for name, value in asked.options.items():
            if name not in _OPTIONS and value.lower() not in ("", "false", "0"):
                raise Refusal(501, 9, f"the stand-in does not implement {name}={value}")
        if asked.options.get("onDuplicate", "error") not in ("error", "ignore"):
            raise Refusal(501, 9, "the stand-in implements onDuplicate=error and ignore only")
        match (asked.method, *asked.parts):
            case ("GET", "version"):
                return 200, {"server": "arango", "version": "3.12.0", "license": "stand-in"}
            case (_, "database", *rest):
                return self._database(database, asked, rest)
            case (_, "collection", *rest):
                return _collection(database, asked, rest)
            case (_, "index"):
                return _index(database, asked)
            case ("POST", "document", name):
                return _insert(database, asked, name)
            case (_, "document", name, key):
                return _document(database, asked, name, key)
            case ("POST", "import"):
                return _import(database, asked)
            case (_, "cursor", *rest):
                return _cursor(database, asked, rest)
        raise Refusal(404, 404, f"unknown path '/_api/{'/'.join(asked.parts)}'")

    def _database(self, database: Database, asked: Asked, rest: list[str]) -> Answer:
        if (asked.method, rest) == ("GET", ["current"]):
            about = {"name": database.name, "isSystem": database.name == "_system"}
            return 200, {"result": about | database.copies}
        if database.name != "_system":
            raise Refusal(403, 1230, "operation only allowed in system database")
        match (asked.method, *rest):
            case ("GET",):
                return 200, {"result": self.databases.names()}
            case ("POST",):
                wanted = _need_members(asked.body, "name", "users", "options")
                for user in wanted.get("users", ()):
                    self.accounts.need(user.get("username"))
                options = _need_members(wanted.get("options", {}), *COPIES)
                self.databases.create(wanted.get("name"), options)
                return 201, {"result": True}
            case ("DELETE", name):
                self.databases.drop(name)
                return 200, {"result": True}
        raise _not_allowed()


def _collection(database: Database, asked: Asked, rest: list[str]) -> Answer:
    match (asked.method, *rest):
        case ("GET",):
            collections = database.collections.values()
            return 200, {"result": [collection.describe() for collection in collections]}
        case ("POST",):
            wanted = _need_members(asked.body, "name", "waitForSync", *COPIES[:2], **_USUAL)
            copies = {name: wanted[name] for name in COPIES if name in wanted}
            synced = wanted.get("waitForSync") is True
            name = wanted.get("name")
            return 200, database.create_collection(name, copies, synced=synced).describe()
        case ("GET", name) | ("GET", name, "properties"):
            return 200, database.collection(name).describe()
        case ("DELETE", name):
            database.drop_collection(name)
            return 200, {}
    raise _not_allowed()


def _index(database: Database, asked: Asked) -> Answer:
    collection = database.collection(asked.options.get("collection", ""))
    if asked.method == "GET":
        return 200, {"indexes": collection.indexes}
    if asked.method == "POST":
        return collection.ensure_index(
            _need_members(asked.body, "type", "fields", "unique", "sparse")
        )
    raise _not_allowed()


def _insert(database: Database, asked: Asked, name: str) -> Answer:
    """One document, or an array whose errors stand among its results."""
    collection = database.collection(name)
    status = 201 if collection.synced or asked.option("waitForSync") else 202
    if not isinstance(asked.body, list):
        return status, collection.insert(asked.body)
    results: list[Any] = []
    for new in asked.body:
        try:
            results.append(collection.insert(new))
        except Refusal as refusal:
            results.append(refusal.body())
    return status, results


def _document(database: Database, asked: Asked, name: str, key: str) -> Answer:
    collection = database.collection(name)
    synced = collection.synced or asked.option("waitForSync")
    match asked.method:
        case "GET":
            doc = collection.get(key)
            if asked.if_match not in (None, doc["_rev"]):
                raise Refusal(412, 1200, "conflict", _key=key, _rev=doc["_rev"])
            return 200, doc
        case "PUT":
            rev = asked.if_match
            if rev is None and not asked.option("ignoreRevs", "true"):
                rev = _need_object(asked.body).get("_rev")
            return 201 if synced else 202, collection.replace(key, asked.body, rev)
        case "DELETE":
            gone = collection.remove(key, asked.if_match)
            return 200 if synced else 202, {} if asked.option("silent") else gone
    raise _not_allowed()


def _import(database: Database, asked: Asked) -> Answer:
    collection = database.collection(asked.options.get("collection", ""))
    if asked.options.get("type") not in ("array", "list") or not isinstance(asked.body, list):
        raise Refusal(400, 10, "expecting a JSON array, and type=array")
    ignores = asked.options.get("onDuplicate") == "ignore"
    return 201, collection.load(asked.body, complete=asked.option("complete"), ignore_taken=ignores)


def _cursor(database: Database, asked: Asked, rest: list[str]) -> Answer:
    match (asked.method, *rest):
        case ("POST",):
            wanted = _need_members(asked.body, "query", "bindVars", "batchSize", **_PLAIN)
            text, batch = wanted.get("query"), wanted.get("batchSize", 1000)
            if not isinstance(text, str) or not text:
                raise Refusal(400, 1502, "query is empty")
            if not isinstance(batch, int) or batch < 1:
                raise Refusal(400, 10, "expecting a positive 'batchSize'")
            return 201, database.query(text, wanted.get("bindVars") or {}, batch)
        case ("POST" | "PUT", number):
            return 200, database.next_batch(number)
        case ("DELETE", number):
            database.close_cursor(number)
            return 202, {"id": number}
    raise _not_allowed()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment
    disable_nagle_algorithm = True
    server: Server

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path)
        request = f"{self.command} {path.path}"
        if path.path.startswith("/_standin/"):
            self._control(body)
            return
        fault = self.server.faults.meet(request)
        if fault is not None and fault.kind in ("hang", "drop"):
            if fault.kind == "hang":
                self.server.faults.hang()
            self.close_connection = True
            return
        if fault is not None and fault.kind in ("body", "trickle-head", "trickle-body", "endless"):
            self._misbehave(fault)
            return
        try:
            if fault is not None and fault.kind == "answer":
                raise Refusal(fault.status, fault.number, fault.message)
            status, answer = self._carry_out(path.path, path.query, body)
        except Refusal as refusal:
            status, answer = refusal.status, refusal.body()
        if fault is not None and fault.kind == "apply-then-drop":
            self.close_connection = True
            return
        if fault is not None and fault.kind == "mutate":
            # By what was asked, not by when: eight threads may be asking.
            self._send(status, mutate(answer, Random(f"{fault.seed} {fault.times} {request}")))
            return
        self._answer(status, answer)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815  the base's names

    def _carry_out(self, path: str, query: str, body: bytes) -> Answer:
        user = self.server.accounts.authenticate(self.headers.get("Authorization", ""))
        parts = [unquote(part) for part in path.split("/")[1:]]
        name = "_system"
        if len(parts) > 1 and parts[0] == "_db":
            name, parts = parts[1], parts[2:]
        if not parts or parts[0] != "_api":
            raise Refusal(404, 404, f"unknown path '{path}'")
        if_match = self.headers.get("If-Match")
        asked = Asked(
            self.command,
            tuple(parts[1:]),
            dict(parse_qsl(query)),
            _parse_json(body) if body else None,
            None if if_match is None else if_match.strip('"'),
        )
        with self.server.lock:
            # Rights first: whoever has none does not learn which databases there are.
            self.server.accounts.authorize(user, name, asked.parts)
            return self.server.carry_out(self.server.databases.get(name), asked)

    def _misbehave(self, fault: Fault) -> None:
        if fault.kind == "body":
            self._send(fault.status, fault.body.encode("latin-1"))
            return
        self.close_connection = True
        piece = b"[],"
        if fault.kind != "trickle-head":
            self.send_response(fault.status)
            self.send_header("Content-Type", "application/json")
            if fault.kind == "trickle-body":
                self.send_header("Content-Length", "1000000")
            self.end_headers()
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        if fault.kind == "endless":
            self.wfile.write(b"[")
            while True:  # until whoever asked has gone away
                self.wfile.write(piece * 20_000)
        while not self.server.faults.hang(0.05):
            self.wfile.write(b"x")
            self.wfile.flush()

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _control(self, body: bytes) -> None:
        if self.path == "/_standin/fault":
            self.server.faults.set(json.loads(body))
        self._answer(200, self.server.faults.seen())

    def _answer(self, status: int, answer: Any) -> None:
        if isinstance(answer, dict) and "_rev" not in answer:
            answer = {"error": False, "code": status, **answer}
        content = json.dumps(answer, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if isinstance(answer, dict) and "_rev" in answer:
            self.send_header("ETag", f'"{answer["_rev"]}"')
        if isinstance(answer, list) and status in (201, 202):
            numbers = Counter(item["errorNum"] for item in answer if "errorNum" in item)
            if numbers:
                counts = ",".join(f"{number}:{times}" for number, times in numbers.items())
                self.send_header("X-Arango-Error-Codes", counts)
        if status == 401:
            self.send_header("Www-Authenticate", 'Basic, realm="ArangoDB"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base's name
        """Nothing is printed but the port."""


def _parse_json(body: bytes) -> Any:
    """Numbers beyond 64 bits become doubles, as DOCS aql/fundamentals/data-types/ says."""
    try:
        value = json.loads(body, parse_int=_number, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, 600, f"invalid JSON: {error}") from error
    level, nesting = [value], 0
    while level := [inner for outer in level for inner in _inside(outer)]:
        nesting += 1
        if nesting > _MAX_NESTING:
            raise Refusal(400, 600, "Too deep nesting in Array/Object")
    return value


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _number(text: str) -> int | float:
    number = int(text)
    return number if -(2**63) <= number < 2**63 else float(number)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _need_object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise Refusal(400, 600, "expecting a JSON object")
    return body


def _need_members(body: Any, *known: str, **usual: Any) -> dict[str, Any]:
    """The object, if it has no member that would be ignored: only known ones, and usual values."""
    for name, value in _need_object(body).items():
        if name not in known and (name not in usual or usual[name] != value):
            raise Refusal(501, 9, f"the stand-in does not implement {name}: {value!r}")
    return _need_object(body)


def _not_allowed() -> Refusal:
    return Refusal(405, 405, "method not supported")
