"""``nomarr-web``: options, address, token, signals. It exits at once on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from nomarr_systemd.config.store_url import parse_address
from nomarr_systemd.config.values import WebSettings
from nomarr_systemd.core.errors import ConfigError, NomarrError, NotPermitted
from nomarr_systemd.host.configuration import NotApplied
from nomarr_systemd.host.program_options import PLACES, parse_options
from nomarr_systemd.host.scope import Scope, make_scope
from nomarr_systemd.systemd.notify import notify
from nomarr_systemd.web.guard import LOCAL_NAMES, Guard, is_loopback
from nomarr_systemd.web.server import make_server, open_sockets
from nomarr_systemd.web.site import Site

USAGE: Final = f"usage: nomarr-web {PLACES}"
CREDENTIAL: Final = "nomarr-web.token"
_MIN_TOKEN: Final = 16


def read_settings(scope: Scope) -> WebSettings:
    """``[web]`` as it was applied; the defaults before the first apply, or if it cannot be read."""
    try:
        return scope.read_in_force().web
    except NotApplied:
        return WebSettings()
    except (ConfigError, NotPermitted) as error:
        logging.warning("%s; the defaults of [web] are used", error)
        return WebSettings()


def read_token(settings: WebSettings) -> bytes:
    """Return the credential, or the file that [web] names; b"" if there is neither."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = os.path.join(directory, CREDENTIAL) if directory else ""
    if not path or not os.path.exists(path):
        path = settings.token_file
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            token = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the token in {path}: {error.strerror}",
            hint="make it readable for nomarr-web, or give it as a credential",
        ) from error
    if len(token) < _MIN_TOKEN:
        raise ConfigError(
            f"the token in {path} has less than {_MIN_TOKEN} characters",
            hint="make one: openssl rand -hex 32",
        )
    return token


def make_guard(settings: WebSettings, token: bytes) -> Guard:
    """Return the checks that fit the address. ConfigError if it is open to others and has no
    token."""
    named = frozenset(name.lower() for name in settings.hosts.split())
    if settings.listen.startswith("/"):
        return Guard(named | LOCAL_NAMES if named else None, token)
    host, _ = parse_address(settings.listen)
    if is_loopback(host):
        return Guard(LOCAL_NAMES | named, token)
    if not token:
        raise ConfigError(
            f"[web] listen = {settings.listen!r} is open to other machines, and there is no token",
            hint=f"put one into /etc/credstore/{CREDENTIAL}, or listen on 127.0.0.1",
        )
    mine = {host, socket.gethostname().lower(), socket.getfqdn().lower()} - {"0.0.0.0", "::"}  # noqa: S104
    return Guard(LOCAL_NAMES | named | mine, token)


async def serve(scope: Scope, settings: WebSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    token = read_token(settings)
    guard = make_guard(settings, token)
    sockets = open_sockets(settings.listen)
    is_tcp = not settings.listen.startswith("/")
    site = Site(scope, guard, checks_peer=is_tcp and not token)
    server = make_server(site)
    server.add_sockets(sockets)
    following = asyncio.ensure_future(site.upstream.run())
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    gc.collect()
    gc.freeze()
    notify("READY=1", f"STATUS=serving {settings.listen}")
    address = sockets[0].getsockname()
    logging.info("serving %s", address if isinstance(address, str) else f"http://{_show(address)}/")
    await ended.wait()
    notify("STOPPING=1")
    following.cancel()
    server.stop()
    site.close()


def _show(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    options = parse_options(sys.argv[1:] if argv is None else argv)
    if options is None:
        logging.error(USAGE)
        return 2
    paths = options[0]
    scope = make_scope(None, user=paths.user)._replace(paths=paths)
    settings = read_settings(scope)
    try:
        asyncio.run(serve(scope, settings))
    except OSError as error:
        logging.error("cannot listen on %s: %s", settings.listen, error.strerror or error)
        return 1
    except NomarrError as error:
        logging.error("%s (%s)", error, error.hint)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
