"""The live socket: what the supervisor knows, for those who ask and those who subscribe.

Reading is for everyone who may connect (the group); telling it something is for root and for the
supervisor's own user. Requests and events are lines of JSON (DESIGN §13).
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from nomarr_systemd.core.errors import NomarrError, NoSuchWorker
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.files import remove
from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.supervisor.live_connection import Client, encode, refuse
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Registry, Worker

NAME: Final = "live.sock"  # in systemd's store; no instance can have it
MAX_CLIENTS: Final = 256
_PER_PIECE: Final = 50  # workers described before the others have their turn
_FINISH_S: Final = 0.5
_MAX_TEXT: Final = 500

SYSTEM: Final = "system:health"


class Subject(Protocol):
    """What the socket serves: the supervisor."""

    registry: Registry

    def describe_self(self) -> dict[str, Any]: ...
    def describe_system(self) -> dict[str, Any]: ...
    def take_crash(self, worker: Worker, invocation: str, cause: str, decision: str) -> str: ...
    def find_job(self, invocation: str) -> str: ...

    def settle_crash(self, worker: Worker, invocation: str) -> None: ...

    def describe_settlement(self, invocation: str) -> dict[str, Any]: ...
    def show_queues(self, patterns: Patterns) -> Iterator[dict[str, Any]]: ...
    def take_failed(self, worker: Worker) -> None: ...
    def take_reset(self, worker: Worker) -> None: ...


def open_socket(path: str, stored: list[int]) -> tuple[socket.socket, bool]:
    """The listening socket: the stored one, whose clients may be waiting already, or a new one.
    True beside it: it has to be stored, in place of all that is."""
    for fd in stored[1:]:
        os.close(fd)
    if stored:
        listening = socket.socket(fileno=stored[0])
        if listening.family == socket.AF_UNIX and _is_socket(path):
            listening.setblocking(False)
            return listening, len(stored) > 1
        listening.close()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    remove(path)
    umask = os.umask(0o777)  # closed until its mode is right
    try:
        listening.bind(path)
    finally:
        os.umask(umask)
    os.chmod(path, 0o660)
    listening.listen(MAX_CLIENTS)
    return listening, True


def status_topic(worker: Worker) -> str:
    return f"{worker.component_id}:status"


def frames_topic(worker: Worker) -> str:
    return f"{worker.component_id}:frames"


def make_event(topic: str, kind: str, **content: object) -> dict[str, Any]:
    return {"topic": topic, "type": kind, "timestamp": time.time_ns() // 1_000_000, **content}


class Live:
    """Serves ``subject`` on a listening socket."""

    def __init__(self, loop: Loop, listening: socket.socket, subject: Subject) -> None:
        self.subscribers: set[Client] = set()
        self._clients: set[Client] = set()
        self._loop = loop
        self._listening = listening
        self._subject = subject
        self._masters = {0, os.geteuid()}
        self._readers: Mapping[str, Callable[[dict[str, Any]], Iterator[bytes]]] = {
            "snapshot": self._snapshot,
            "blackbox": self._blackbox,
            "label": self._label,
        }
        self._changers: Mapping[str, Callable[[dict[str, Any]], Iterator[bytes]]] = {
            "settlement": self._settlement,
            "crashed": self._crashed,
            "set_failed": self._set_failed,
            "reset": self._reset,
        }
        loop.watch(listening.fileno(), select.EPOLLIN, self.welcome, first=True)

    def welcome(self, _events: int = 0) -> None:
        """Take new connections, and at once what they have asked already."""
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:  # none is left, or it is gone again, or we have too many files
                return
            if len(self._clients) >= MAX_CLIENTS:
                connection.close()
                continue
            client = Client(self._loop, connection, self._answer, self._drop)
            self._clients.add(client)
            client.serve()

    def wants(self, topic: str) -> bool:
        """Whether anybody subscribed to it: what nobody wants is not made."""
        return any(each.patterns and each.patterns.match(topic) for each in self.subscribers)

    def publish(self, event: dict[str, Any], worker: Worker | None = None) -> None:
        """Send an event to those who want it."""
        line = b""
        for client in tuple(self.subscribers):
            if worker is not None and worker.order >= client.cursor:
                continue  # it will be shown this worker as it is then
            if client.patterns is not None and client.patterns.match(event["topic"]):
                line = line or encode(event)
                client.push(line)

    def close(self) -> None:
        """Let everybody go; the socket stays, for the supervisor that comes after us."""
        for client in tuple(self._clients):
            client.finish(_FINISH_S)
        self._loop.forget(self._listening.fileno())
        self._listening.close()

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self.subscribers.discard(client)

    def _answer(self, client: Client, line: bytes) -> Iterator[bytes]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return refuse("the request is not JSON")
        if not isinstance(request, dict) or not isinstance(request.get("op"), str):
            return refuse('a request is an object with "op"')
        op = request["op"]
        try:
            if op == "subscribe":
                client.patterns = Patterns(request.get("topics"))
                client.cursor = 0
                self.subscribers.add(client)
                return self._show_all(client, client.patterns)
            if op in self._changers:
                if client.uid not in self._masters:
                    return refuse(f"{op} is for root only")
                return self._changers[op](request)
            if op in self._readers:
                return self._readers[op](request)
        except NomarrError as error:
            return refuse(f"{error}" + (f" ({error.hint})" if error.hint else ""))
        known = ", ".join(["subscribe", *self._readers, *self._changers])
        return refuse(f"unknown op; known are {known}")

    def _snapshot(self, _request: dict[str, Any]) -> Iterator[bytes]:
        """In pieces: 2,000 workers would hold up the loop."""
        yield b'{"ok":true,"workers":['
        comma = b""
        done = -1
        while workers := self._after(done):
            texts = [json.dumps(each.describe(), separators=(",", ":")) for each in workers]
            yield comma + ",".join(texts).encode()
            comma = b","
            done = workers[-1].order
        about = json.dumps(self._subject.describe_self(), separators=(",", ":"))
        yield b'],"supervisor":' + about.encode() + b"}\n"

    def _show_all(self, client: Client, patterns: Patterns) -> Iterator[bytes]:
        """First everything as it is; from then on its changes."""
        if patterns.match(SYSTEM):
            system = self._subject.describe_system()
            yield encode(make_event(SYSTEM, "snapshot", system=system))
        for event in self._subject.show_queues(patterns):
            yield encode(event)
        done = -1
        while workers := self._after(done):
            events = []
            for worker in workers:
                if patterns.match(topic := status_topic(worker)):
                    described = worker.describe()
                    worker.shown = essence(described)
                    events.append(encode(make_event(topic, "snapshot", worker=described)))
                if patterns.match(topic := frames_topic(worker)):
                    lines = _texts(worker.box.lines())
                    events.append(encode(make_event(topic, "snapshot", frames=lines)))
            done = workers[-1].order
            client.cursor = done + 1
            if events:
                yield b"".join(events)
        client.cursor = 1 << 62

    def _after(self, order: int) -> list[Worker]:
        """The next few workers in the order of their coming."""
        found = []
        for worker in self._subject.registry.workers.values():
            if worker.order > order:
                found.append(worker)
                if len(found) == _PER_PIECE:
                    break
        return found

    def _blackbox(self, request: dict[str, Any]) -> Iterator[bytes]:
        worker = self._find(request)
        return iter([encode({"ok": True, "frames": _texts(worker.box.lines())})])

    def _label(self, request: dict[str, Any]) -> Iterator[bytes]:
        worker = self._find(request)
        invocation = _text(request, "invocation")
        label: str = ""
        job: str | int | None = None
        if invocation and invocation == worker.invocation:
            label, job = worker.label, worker.said().get("job")
        elif worker.ended and invocation == worker.ended.invocation:
            label, job = worker.ended.label, worker.ended.job
        # Frames may lag behind short jobs; what was settled is certain.
        job = self._subject.find_job(invocation) or job
        return iter([encode({"ok": True, "label": label, "job": job})])

    def _crashed(self, request: dict[str, Any]) -> Iterator[bytes]:
        worker = self._find(request)
        texts = (_text(request, name) for name in ("invocation", "cause", "decision"))
        label = self._subject.take_crash(worker, *texts)
        settled = self._subject.describe_settlement(_text(request, "invocation"))
        return iter([encode({"ok": True, "label": label, **settled})])

    def _settlement(self, request: dict[str, Any]) -> Iterator[bytes]:
        """What became of the jobs of a run: ``settled`` False means, not yet; ask again.

        One that has ``crashed``, and that nobody settled, is settled now: only for root to say.
        """
        worker, invocation = self._find(request), _text(request, "invocation")
        if request.get("crashed") is True:
            self._subject.settle_crash(worker, invocation)
        settled = self._subject.describe_settlement(invocation)
        return iter([encode({"ok": True, **settled})])

    def _set_failed(self, request: dict[str, Any]) -> Iterator[bytes]:
        self._subject.take_failed(self._find(request))
        return iter([encode({"ok": True})])

    def _reset(self, request: dict[str, Any]) -> Iterator[bytes]:
        self._subject.take_reset(self._find(request))
        return iter([encode({"ok": True})])

    def _find(self, request: dict[str, Any]) -> Worker:
        name = parse_component(_text(request, "component")).component_id
        worker = self._subject.registry.workers.get(name)
        if worker is None:
            raise NoSuchWorker(f"{name} is not configured here")
        return worker


def essence(described: dict[str, Any]) -> tuple[Any, ...]:
    """What of a worker is worth an event when it changes."""
    names = ("status", "pid", "current_job", "phase", "invocation", "disagreement", "last_crash")
    return tuple(described[name] for name in names)


def _texts(lines: list[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


def _text(request: dict[str, Any], name: str) -> str:
    value = request.get(name, "")
    if not isinstance(value, str):
        raise NomarrError(f'"{name}" must be text')
    return value[:_MAX_TEXT]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
