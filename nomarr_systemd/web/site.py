"""What all requests share: the installation, its guard, the broker, threads and cached looks."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import pwd
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from tornado.httputil import HTTPServerRequest

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.overview import Memory
from nomarr_systemd.web import readers
from nomarr_systemd.web.broker import Broker
from nomarr_systemd.web.guard import Guard, Refusal, find_peer_uid
from nomarr_systemd.web.metrics import Metrics, Sources
from nomarr_systemd.web.ticker import Ticker
from nomarr_systemd.web.upstream import Upstream

OPENAPI: Final = os.path.join(os.path.dirname(__file__), "openapi.json")
GROUP: Final = "nomarr-view"  # its members may see what the page shows; workers are not in it
_LOOK_S: Final = 1.0  # an answer may be this old
_METRICS_S: Final = 2.0
_SPARKLINES_S: Final = 30.0
_FLEET_S: Final = 2.0
_THREADS: Final = 4
_Found = TypeVar("_Found")


class Site:
    """``checks_peer``: the user of a client on this machine is read from the kernel."""

    def __init__(self, scope: Scope, guard: Guard, *, checks_peer: bool) -> None:
        self.scope = scope
        self.guard = guard
        self.broker = Broker()
        self.ticker = Ticker(self.broker)
        self.upstream = Upstream(scope.paths.live, self.broker)
        self.metrics = Metrics()
        self.upstream.on_job = self.metrics.observe_job
        self.upstream.on_link = self._forget_look
        self.frame_clients = 0
        with open(OPENAPI, encoding="utf-8") as file:
            self.openapi: dict[str, Any] = json.load(file)
        self._checks_peer = checks_peer
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read")
        self._memory = Memory()  # of the one look that runs at a time
        self._look: asyncio.Future[readers.State] | None = None
        self._state: readers.State | None = None
        self._lines: asyncio.Future[dict[str, Any]] | None = None
        self._lines_at = 0.0
        self._fleet: asyncio.Future[dict[str, Any]] | None = None
        self._fleet_at = 0.0

    async def run(self, ask: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function that waits, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, ask, *arguments)

    async def look(self) -> readers.State:
        """Return everything as it was at most _LOOK_S ago; requests at the same time share one
        look."""
        done = self._state
        if done is not None and time.monotonic() - done.at <= _LOOK_S:
            return done
        if self._look is None:
            look = self.run(readers.read_state, self.scope, (), self._memory)
            self._look = asyncio.ensure_future(look)
            self._look.add_done_callback(self._take_look)
        return await asyncio.shield(self._look)

    def _take_look(self, look: asyncio.Future[readers.State]) -> None:
        failed = look.cancelled() or look.exception() is not None
        if look is self._look:
            self._look = None
            self._state = None if failed else look.result()

    def _forget_look(self) -> None:
        """Forget the last look: it was taken before the supervisor ended or came back."""
        self._look = self._state = None
        self._memory = Memory()  # the look that still runs has the other

    async def config(self) -> Config:
        """Return the configuration in force, which can be read without systemd."""
        return await self.run(self.scope.read_in_force)

    async def sparklines(self) -> dict[str, Any]:
        now = time.monotonic()
        if self._lines is None or (self._lines.done() and now - self._lines_at > _SPARKLINES_S):
            config = await self.config()
            self._lines_at = now
            self._lines = asyncio.ensure_future(
                self.run(readers.read_sparklines, self.scope, config)
            )
        return await asyncio.shield(self._lines)

    async def fleet(self) -> dict[str, Any]:
        """Return all hosts as they were at most _FLEET_S ago: the supervisor reads them from the
        store."""
        now = time.monotonic()
        if self._fleet is None or (self._fleet.done() and now - self._fleet_at > _FLEET_S):
            self._fleet_at = now
            self._fleet = asyncio.ensure_future(self.run(readers.read_fleet, self.scope))
        return await asyncio.shield(self._fleet)

    def queues(self) -> dict[str, dict[str, Any]]:
        """Return the last state of each pool's queue."""
        found = self.broker.states("queue")
        return {each["queue"]: each for each in found if isinstance(each.get("queue"), str)}

    async def render_metrics(self) -> bytes:
        """Return the metrics within seconds; if a look takes longer, those of the one before."""
        state: readers.State | None = None
        try:
            state = await asyncio.wait_for(self.look(), _METRICS_S)
        except TimeoutError:
            state = self._state  # nomarr_look_age_seconds says how old it is
        except NomarrError:
            state = None  # nomarr_up is 0
        sources = Sources(
            {name: dict(queue) for name, queue in self.queues().items()},
            self.upstream.is_connected,
            self.upstream.lost,
            len(self.broker.readers),
        )
        return await self.run(self.metrics.render, state, sources)

    def check_peer(self, request: HTTPServerRequest) -> Refusal | None:
        """Refuse a local client whose user may not see the data; its user is kept for the
        connection."""
        if not self._checks_peer:
            return None
        connection: Any = request.connection
        context = connection.context
        if not hasattr(context, "peer_uid"):
            context.peer_uid = _find_uid(connection.stream.socket)
        uid = context.peer_uid
        if uid is None:  # only a client of this machine can be here
            return Refusal(403, "the user of this client is not known", "use a token")
        if uid in (0, os.getuid()) or (not self.scope.user and is_viewer(uid)):
            return None
        hint = "use a token, or ask the owner of this page"
        if not self.scope.user:
            hint = f"join the group: usermod --append --groups {GROUP} YOUR-NAME; or use a token"
        return Refusal(403, "your user on this machine may not see this", hint)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def is_viewer(uid: int) -> bool:
    """Return True if a user is a member of GROUP."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrnam(GROUP)
    except KeyError:
        return False
    return user.pw_name in group.gr_mem or user.pw_gid == group.gr_gid


def _find_uid(link: socket.socket | None) -> int | None:
    """Return the user at the other end of a TCP connection within this machine; None elsewhere."""
    if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        peer, local = link.getpeername()[:2], link.getsockname()[:2]
    except OSError:
        return None
    return find_peer_uid(link.family, peer, local)
