"""The live socket: answers requests about workers and takes subscriptions (docs/contract.md).

Everyone who may connect (the group) can read. Operations that change something are for root, or in
a user's own installation for that user.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from nomarr_systemd.core.errors import BadName, NomarrError, NoSuchWorker
from nomarr_systemd.core.ids import is_run, parse_component
from nomarr_systemd.core.json import JsonError, decode
from nomarr_systemd.live import protocol
from nomarr_systemd.live.protocol import Patterns, frames_topic, make_event, status_topic
from nomarr_systemd.supervisor.announcer import extract_shown
from nomarr_systemd.supervisor.job_settler import Outcomes, describe
from nomarr_systemd.supervisor.live_connection import Connection, encode, refuse
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.store_queries import JOB_OF_RUN
from nomarr_systemd.supervisor.supervisor import ReportedDeath, Supervisor
from nomarr_systemd.supervisor.workers import Run, Worker

NAME: Final = "live.sock"  # of the descriptor; no instance can have this name
MAX_CONNECTIONS: Final = 256
RESERVED: Final = 16  # more connections, for trusted users only
MAX_OF_USER: Final = 16  # connections of each user that is not trusted
IDLE_S: Final = 30.0  # without a request; then a connection that is not trusted is closed
_PER_PIECE: Final = 50  # workers described before other peers get a turn
_FINISH_S: Final = 0.5
_IN_STORE: Final = (protocol.HISTORY, protocol.JOBS_OF, protocol.FLEET, protocol.ARCHIVE)
_MAX_TEXT: Final = 500
_NO_JOBS: Final = {
    "settled": True,
    **dict.fromkeys(("jobs", "quarantined", "failed", "refund"), ()),
    "fail_pool": "",
}

Request = dict[str, Any]


def take_socket(given: list[int]) -> socket.socket | None:
    """Return the listening socket that systemd passed; None if there is none."""
    for fd in given[1:]:
        os.close(fd)
    return socket.socket(fileno=given[0]) if given else None


class LiveServer:
    """Serves a supervisor on a listening socket."""

    def __init__(
        self, loop: Loop, listening: socket.socket, supervisor: Supervisor, *, owner: int
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._supervisor = supervisor
        self._subscribers = supervisor.subscribers
        self._connections: set[Connection] = set()
        self._trusted = frozenset((0, owner))
        self._operations: Mapping[str, Callable[[Request], Iterator[bytes]]] = {
            protocol.SNAPSHOT: self._snapshot,
            protocol.BLACKBOX: self._blackbox,
            protocol.LABELS: self._labels,
            protocol.SET_FAILED: self._set_failed,
            protocol.RESET: self._reset,
        }
        listening.setblocking(False)
        loop.watch(listening.fileno(), select.EPOLLIN, self.accept, first=True)

    def accept(self, _events: int = 0) -> None:
        """Accept connections, and read at once what they have sent already."""
        while True:
            try:
                accepted = self._listening.accept()[0]
            except OSError:  # none waits, it was closed again, or too many files are open
                return
            connection = Connection(self._loop, accepted, self._answer, self._drop, self._trusted)
            if not self._has_room(connection):
                connection.close()
                continue
            self._connections.add(connection)
            if not connection.is_trusted:
                self._loop.at(self._loop.now + IDLE_S, partial(self._check_idle, connection))
            connection.serve()

    def _has_room(self, connection: Connection) -> bool:
        if connection.is_trusted:
            return len(self._connections) < MAX_CONNECTIONS + RESERVED
        of_user = sum(each.uid == connection.uid for each in self._connections)
        return len(self._connections) < MAX_CONNECTIONS and of_user < MAX_OF_USER

    def _check_idle(self, connection: Connection) -> None:
        if connection not in self._connections or connection.patterns is not None:
            return
        if self._loop.now - connection.asked_at >= IDLE_S:
            connection.close()
        else:
            self._loop.at(connection.asked_at + IDLE_S, partial(self._check_idle, connection))

    def close(self) -> None:
        """Close all connections; systemd keeps the socket. Peers that do not read delay the end of
        this program by _FINISH_S, all of them together."""
        deadline = time.monotonic() + _FINISH_S
        for connection in tuple(self._connections):
            connection.finish(deadline)
        self._loop.forget(self._listening.fileno())
        self._listening.close()

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._subscribers.connections.discard(connection)

    def _answer(self, connection: Connection, line: bytes) -> Iterator[bytes] | None:
        try:
            request = decode(line)
        except JsonError:
            return refuse("the request is not JSON")
        if not isinstance(request, dict) or not isinstance(request.get("op"), str):
            return refuse('a request is an object with "op"')
        op = request["op"]
        if op in protocol.ROOT_ONLY and not connection.is_trusted:
            return refuse(f"{op} is for root only")
        try:
            if op == protocol.SUBSCRIBE:
                connection.patterns = Patterns(request.get("topics"))
                connection.cursor = 0
                self._subscribers.connections.add(connection)
                return self._show_all(connection, connection.patterns)
            if op == protocol.CRASHED:
                self._crashed(connection, request)
                return None
            if op == protocol.LABEL:
                self._label(connection, request)
                return None
            if op in self._operations:
                return self._operations[op](request)
            if op in _IN_STORE:
                self._ask_store(op, request, connection.reply_line)
                return None
        except NomarrError as error:
            return refuse(f"{error}" + (f" ({error.hint})" if error.hint else ""))
        known = ", ".join(
            [
                *(protocol.SUBSCRIBE, *self._operations),
                *(*_IN_STORE, protocol.LABEL, protocol.CRASHED),
            ]
        )
        return refuse(f"unknown op; known are {known}")

    # Reading

    def _snapshot(self, _request: Request) -> Iterator[bytes]:
        """Yield the answer in pieces: 2,000 workers at once would delay the loop."""
        yield b'{"ok":true,"workers":['
        comma = b""
        done = -1
        while workers := self._after(done):
            texts = [json.dumps(each.describe(), separators=(",", ":")) for each in workers]
            yield comma + ",".join(texts).encode()
            comma = b","
            done = workers[-1].order
        about = json.dumps(self._supervisor.describe_self(), separators=(",", ":"))
        yield b'],"supervisor":' + about.encode() + b"}\n"

    def _show_all(self, connection: Connection, patterns: Patterns) -> Iterator[bytes]:
        """Yield a snapshot of each topic; events follow."""
        if patterns.match(protocol.SYSTEM):
            system = self._supervisor.announcer.describe_system()
            yield encode(make_event(protocol.SYSTEM, "snapshot", system=system))
        for event in self._supervisor.store_tasks.queue_topics.show(patterns):
            yield encode(event)
        done = -1
        while workers := self._after(done):
            events = []
            for worker in workers:
                if patterns.match(topic := status_topic(worker.component_id)):
                    described = worker.describe()
                    worker.shown = extract_shown(described)
                    events.append(encode(make_event(topic, "snapshot", worker=described)))
                if patterns.match(topic := frames_topic(worker.component_id)):
                    lines = _texts(frame.line for frame in worker.ring.frames())
                    events.append(encode(make_event(topic, "snapshot", frames=lines)))
            done = workers[-1].order
            connection.cursor = done + 1
            if events:
                yield b"".join(events)
        connection.cursor = 1 << 62

    def _after(self, order: int) -> list[Worker]:
        """The next few workers in the order in which they were added."""
        found = []
        for worker in self._supervisor.workers:
            if worker.order > order:
                found.append(worker)
                if len(found) == _PER_PIECE:
                    break
        return found

    def _blackbox(self, request: Request) -> Iterator[bytes]:
        worker = self._find(request)
        frames = worker.ring.frames()
        received = [{"at_ms": each.at_ms, "invocation": each.invocation} for each in frames]
        return _reply(frames=_texts(each.line for each in frames), received=received)

    def _label(self, connection: Connection, request: Request) -> None:
        """Answer what is known of a run. If that is no job, the store may know one."""
        worker, invocation = self._find(request), _text(request, "invocation")
        run = worker.find_run(invocation) or Run(invocation, "", None)
        answer: dict[str, Any] = {"ok": True, "label": run.label, "bad_line": run.bad_line}
        # Frames may lag behind short jobs; what was settled is certain.
        job = self._supervisor.store_tasks.find_job(invocation) or run.job
        if job is not None or not is_run(invocation) or invocation == worker.invocation:
            connection.reply(answer | {"job": job})
            return
        self._ask_store(
            JOB_OF_RUN,
            {"pool": worker.component.pool, "invocation": invocation},
            lambda line: connection.reply(answer | {"job": json.loads(line).get("job")}),
        )

    def _ask_store(self, op: str, request: Request, reply: Callable[[bytes], None]) -> None:
        settings = self._supervisor.config.store
        self._supervisor.store_tasks.queries.ask(settings, op, request, reply)

    def _labels(self, request: Request) -> Iterator[bytes]:
        labels = {}
        for each in _objects(request, "runs"):
            worker = self._find_configured(_text(each, "component"))
            invocation = _text(each, "invocation")
            run = worker.find_run(invocation) if worker else None
            if run and run.label:
                labels[invocation] = run.label
        return _reply(labels=labels)

    # Changing

    def _crashed(self, connection: Connection, request: Request) -> None:
        """Record deaths; answer when all their jobs are settled, or DEFER_S later."""
        deaths = []
        outcomes: dict[str, Mapping[str, Any]] = {}
        for each in _objects(request, "deaths"):
            worker = self._find_configured(_text(each, "component"))
            invocation, cause, decision = (
                _text(each, name) for name in ("invocation", "cause", "decision")
            )
            outcomes[invocation] = _NO_JOBS
            if worker:
                blamed, failed = each.get("blamed") is True, each.get("failed") is True
                deaths.append(ReportedDeath(worker, invocation, cause, decision, blamed, failed))

        def reply(found: Outcomes) -> None:
            told = {invocation: describe(outcome) for invocation, outcome in found.items()}
            connection.reply({"ok": True, "outcomes": outcomes | told})

        self._supervisor.take_deaths(deaths, reply)

    def _set_failed(self, request: Request) -> Iterator[bytes]:
        self._supervisor.set_failed(self._find(request))
        return _reply()

    def _reset(self, request: Request) -> Iterator[bytes]:
        self._supervisor.reset(self._find(request))
        return _reply()

    def _find(self, request: Request) -> Worker:
        name = parse_component(_text(request, "component")).component_id
        worker = self._supervisor.workers.by_id.get(name)
        if worker is None:
            raise NoSuchWorker(f"{name} is not configured here")
        return worker

    def _find_configured(self, name: str) -> Worker | None:
        try:
            return self._supervisor.workers.by_id.get(parse_component(name).component_id)
        except BadName:
            return None


def _reply(**content: object) -> Iterator[bytes]:
    return iter([encode({"ok": True, **content})])


def _texts(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


def _text(request: Request, name: str) -> str:
    value = request.get(name, "")
    if not isinstance(value, str):
        raise NomarrError(f'"{name}" must be text')
    return value[:_MAX_TEXT]


def _objects(request: Request, name: str) -> list[Request]:
    value = request.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise NomarrError(f'"{name}" must be a list of objects')
    return value
