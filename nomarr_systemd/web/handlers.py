"""Checks, headers and errors of every request, and the page's files."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final, cast

from tornado.web import HTTPError, RequestHandler, StaticFileHandler

from nomarr_systemd.core.errors import BadName, ConfigError, NomarrError, NoSuchWorker
from nomarr_systemd.systemd.dbus.connection import BusError
from nomarr_systemd.systemd.systemctl import ManagerError
from nomarr_systemd.web import readers
from nomarr_systemd.web.guard import HEADERS
from nomarr_systemd.web.site import Site

STATIC: Final = os.path.join(os.path.dirname(__file__), "static")
_PARAMETER: Final = re.compile(r"[a-z_]{1,20}")
_MAX_VALUE: Final = 300
_STATUS: Final[dict[type, int]] = {
    BadName: 400,
    NoSuchWorker: 404,
    readers.NoSuchPool: 404,
    readers.Unavailable: 503,
    ConfigError: 503,
    ManagerError: 503,
    BusError: 503,
}


class Handler(RequestHandler):
    """Checks, headers and errors. ``needs_token`` is False for what holds no data."""

    needs_token = True

    @property
    def site(self) -> Site:
        return cast(Site, self.application.settings["site"])

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.set_header("Cache-Control", "no-store")

    async def prepare(self) -> None:
        request = self.request
        method = request.method or ""
        refusal = self.site.guard.check(method, request.headers, data=self.needs_token)
        if refusal is None and self.needs_token:
            refusal = self.site.check_peer(request)
        if refusal is not None:
            if refusal.status == 401:
                self.set_header("WWW-Authenticate", "Bearer")
            self.refuse(*refusal)

    def refuse(self, status: int, error: str, hint: str = "") -> None:
        """Answer with an error; what to do next is in ``hint``."""
        self.set_status(status)
        if status == 405:
            self.set_header("Allow", "GET, HEAD")
        self.answer({"error": error, "hint": hint or None})

    def answer(self, document: object) -> None:
        """Send JSON, in ASCII: texts of workers may have any character."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps(document, separators=(",", ":")))

    def query(self, *allowed: str) -> dict[str, str]:
        """Return the parameters of the request; BadName for an unknown, repeated or long one."""
        found = {}
        for name, values in self.request.query_arguments.items():
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                shown = name if _PARAMETER.fullmatch(name) else "that"
                raise BadName(f"there is no parameter {shown}", hint=f"known are: {known}")
            if len(values) > 1 or len(values[0]) > _MAX_VALUE:
                raise BadName(f"{name} may be given once, with up to {_MAX_VALUE} bytes")
            found[name] = values[0].decode("utf-8", "replace")
        return found

    def write_error(self, status_code: int, **details: Any) -> None:
        error = details.get("exc_info", (None, None))[1]
        if isinstance(error, NomarrError):
            known = (_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
            self.refuse(next(known, 500), str(error), error.hint)
        elif isinstance(error, HTTPError) and status_code < 500:
            self.refuse(status_code, self._reason, "GET /api/openapi.json lists all paths")
        else:
            self.refuse(500, "the request failed; the journal of nomarr-web.service says why")

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        if not isinstance(value, NomarrError):  # those were sent to the client
            super().log_exception(kind, value, trace)


class MissingHandler(Handler):
    """Answers every unknown path with 404, with or without a token."""

    needs_token = False

    async def get(self, *_: str) -> None:
        self.refuse(404, "there is no such path", "GET /api/openapi.json lists all paths")

    head = get


class FileHandler(Handler, StaticFileHandler):
    """The page and its files. The browser asks each time; an unchanged file is not sent again."""

    needs_token = False

    def set_extra_headers(self, _path: str) -> None:
        self.set_header("Cache-Control", "no-cache")

    def get_content_type(self) -> str:
        kind = super().get_content_type()
        return f"{kind}; charset=utf-8" if kind.startswith(("text/", "application/j")) else kind
