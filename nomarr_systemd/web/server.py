"""The HTTP server: routes, limits, and the address it listens on."""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets, bind_unix_socket
from tornado.web import Application

from nomarr_systemd.config.store_url import parse_address
from nomarr_systemd.web import api, handlers
from nomarr_systemd.web.site import Site
from nomarr_systemd.web.stream import EventsHandler

MAX_CONNECTIONS: Final = 3000
MAX_HEADER: Final = 16_384
MAX_BODY: Final = 1024
IDLE_S: Final = 20.0  # for a request to be complete, and between two of them
UNREAD_S: Final = 60.0  # how long a client may read nothing of what it is sent
_SEND_BUFFER: Final = 1 << 16  # of each connection, in the kernel; it counts twice this
_WORKER: Final = r"([A-Za-z0-9_:@.%\-]{1,200})"  # Tornado decodes it
_SOCKET_MODE: Final = 0o660

ROUTES: Final[list[tuple[Any, ...]]] = [
    (r"/events", EventsHandler),
    (r"/metrics", api.MetricsHandler),
    (r"/(?:healthz|readyz)", api.HealthHandler),
    (rf"/api/workers/{_WORKER}/why", api.WhyHandler),
    (r"/()", handlers.FileHandler, {"path": f"{handlers.STATIC}/index.html"}),
    (r"/static/([a-z0-9\-]+\.[a-z]+)", handlers.FileHandler, {"path": handlers.STATIC}),
]
ANSWERS: Final[list[tuple[str, api.Answer, tuple[str, ...]]]] = [
    (r"/api/openapi\.json", api.show_openapi, ()),
    (r"/api/workers", api.list_workers, ()),
    (rf"/api/workers/{_WORKER}", api.find_worker, ()),
    (rf"/api/workers/{_WORKER}/history", api.read_history, ("since_ms", "until_ms", "points")),
    (rf"/api/workers/{_WORKER}/frames", api.read_frames, ()),
    (rf"/api/workers/{_WORKER}/simulate", api.try_policy, api.ANY),
    (r"/api/sparklines", api.read_sparklines, ()),
    (r"/api/pools", api.list_pools, ()),
    (r"/api/policy", api.list_policies, ("worker",)),
    (r"/api/jobs", api.list_jobs, ("pool", "status", "limit", "after")),
    (r"/api/incidents", api.list_incidents, ()),
    (r"/api/fleet", api.read_fleet, ()),
]


class Server(HTTPServer):
    """A server that accepts a bounded number of connections."""

    max_connections = MAX_CONNECTIONS
    open_connections = 0

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        if self.open_connections >= self.max_connections:
            stream.close()
            return
        self.open_connections += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        # Not by a callback of the stream: Tornado puts its own there for each request.
        self.open_connections -= 1
        super().on_close(server_conn)


def make_server(
    site: Site, *, idle_s: float = IDLE_S, max_connections: int = MAX_CONNECTIONS
) -> Server:
    answers = [
        (path, api.ApiHandler, {"find": find, "allowed": allowed})
        for path, find, allowed in ANSWERS
    ]
    application = Application(
        [*ROUTES, *answers, (r".*", handlers.MissingHandler)],
        site=site,
        log_function=lambda _handler: None,  # the journal is for errors
        compress_response=False,
    )
    server = Server(
        application,
        max_header_size=MAX_HEADER,
        max_body_size=MAX_BODY,
        idle_connection_timeout=idle_s,
        body_timeout=idle_s,
        max_buffer_size=1 << 20,
        no_keep_alive=False,
    )
    server.max_connections = max_connections
    return server


def open_sockets(listen: str, *, unread_s: float = UNREAD_S) -> list[socket.socket]:
    """Open the listening sockets; OSError if the address cannot be used. Their connections
    inherit the limits: the kernel closes one whose client reads nothing."""
    if listen.startswith("/"):
        os.makedirs(os.path.dirname(listen), 0o755, exist_ok=True)
        return [bind_unix_socket(listen, mode=_SOCKET_MODE)]  # whose buffers are small
    host, port = parse_address(listen)
    sockets = bind_sockets(port, host, reuse_port=False)
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
    return sockets
