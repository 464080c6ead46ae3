"""``nomarr-supervisor``: options, signals, and notifications to systemd.

It runs until a signal stops it. If it fails, systemd starts it again: pipes and run state survive.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError, NotPermitted
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.log import ERROR, NOTICE, WARNING, flush, log
from nomarr_systemd.host.program_options import PLACES, parse_options
from nomarr_systemd.supervisor import live_server
from nomarr_systemd.supervisor.live_server import LiveServer
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.pipe_store import PipeStore, tell, unstore
from nomarr_systemd.supervisor.supervisor import Supervisor
from nomarr_systemd.systemd.notify import listen_fds_by_name, watchdog_s

USAGE: Final = f"usage: nomarr-supervisor {PLACES}"


class Program:
    """One run of the supervisor under systemd."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._loop = Loop()
        given = listen_fds_by_name()
        sockets = given.pop(live_server.NAME, [])
        pipe_store = PipeStore(given)
        self._supervisor = Supervisor(paths, self._read_config(), self._loop, pipe_store)
        self._server = self._make_server(sockets)
        self._watchdog_s = watchdog_s()
        self._status = ""

    def _make_server(self, sockets: list[int]) -> LiveServer | None:
        if len(sockets) > 1:
            unstore(live_server.NAME)  # version 0.1 kept it there
        listening = live_server.take_socket(sockets)
        if listening is None:
            hint = "systemctl restart nomarr-supervisor.service"
            log(ERROR, "systemd passed no live socket: no request can be answered", hint=hint)
            return None
        owner = os.geteuid() if self._paths.user else 0
        return LiveServer(self._loop, listening, self._supervisor, owner=owner)

    def run(self) -> None:
        handlers: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self._loop.stop,
            signal.SIGINT: self._loop.stop,
            signal.SIGHUP: self._reload,
        }
        self._loop.catch(handlers)
        self._supervisor.start()
        # Clients that waited for the socket are served before pipes are read, and miss nothing.
        if self._server:
            self._server.accept()
        self._supervisor.watch_pipes()
        self._say("READY=1")
        if self._watchdog_s:
            self._feed_watchdog()
        self._loop.run()
        tell("STOPPING=1")

    def close(self) -> None:
        if self._server:
            self._server.close()
        self._supervisor.close()
        self._loop.close()

    def _feed_watchdog(self) -> None:
        """Feed the watchdog by a timer of the loop, so that it is fed only while the loop runs."""
        self._supervisor.keep_pipes()  # what failed is tried again
        self._say("WATCHDOG=1")
        flush()
        self._loop.at(self._loop.now + self._watchdog_s / 2, self._feed_watchdog)

    def _reload(self) -> None:
        tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        config = self._read_config()
        if config:
            self._supervisor.reload(config)
            log(NOTICE, f"reloaded: {self._supervisor.workers.summarize()}")
        self._say("READY=1")

    def _read_config(self) -> Config | None:
        """Return the configuration; None if there is no valid one: then nothing is changed."""
        try:
            return read_applied(self._paths)
        except (ConfigError, NotPermitted) as error:
            log(WARNING, f"{error} ({error.hint})")
            return None

    def _say(self, line: str) -> None:
        status = self._supervisor.workers.summarize()
        if status != self._status:
            self._status = status
            line = f"{line}\nSTATUS={status}"
        tell(line)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    if options is None:
        log(ERROR, USAGE)
        return 2
    try:
        program = Program(options[0])
        try:
            program.run()
        finally:
            program.close()
    except NomarrError as error:
        log(ERROR, f"{error}" + (f" ({error.hint})" if error.hint else ""))
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
