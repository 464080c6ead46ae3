"""The controller's programs: the one that the FIFO's bell wakes, and the reconciler.

systemd starts the first when the hook rings, keeps what is rung while it is away, and starts it
again if it dies; it leaves by itself after a while without work.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.controller.complaints import complain
from nomarr_systemd.controller.failures import Controller
from nomarr_systemd.controller.pending import read_pending
from nomarr_systemd.controller.reconcile import reconcile, see_to_the_rest
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.program_options import PLACES, parse_options
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.notify import listen_fds, notify

USAGE: Final = f"usage: nomarr-controller {PLACES} [--reconcile]"
IDLE_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.5  # at a canary, or at jobs that are being settled
Stamp = tuple[int, int]


def serve(controller: Controller, fifo: int, applied: Stamp, *, idle_s: float = IDLE_S) -> bool:
    """Handle what is pending now and what the FIFO rings for, until nothing comes for a while.

    True if the settings are no longer those that were applied then.
    """
    os.set_blocking(fifo, False)
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    while True:
        # Lines are only a bell: the facts are in the files, also of lines that were lost.
        with contextlib.suppress(BlockingIOError):
            while os.read(fifo, 65536):
                pass
        if find_stamp(controller.paths) != applied:
            return True
        with controller.alone():
            controller.handle(read_pending(controller.paths.pending))
            is_busy = see_to_the_rest(controller)
        # While nobody reads, systemd would keep all its signals for us.
        controller.manager.close()
        if not poll.poll((LOOK_AGAIN_S if is_busy else idle_s) * 1000) and not is_busy:
            return False


def find_stamp(paths: Paths) -> Stamp:
    """What tells one applied configuration from the next."""
    try:
        found = os.stat(paths.resolved)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv, ["--reconcile"])
    if options is None:
        complain(USAGE)
        return 2
    paths, flags = options
    try:
        run = _choose(flags)
        while True:
            applied = find_stamp(paths)  # before it is read: then nothing new is missed
            controller = Controller(paths, read_applied(paths), Manager(user=paths.user))
            with contextlib.closing(controller):
                if not run(controller, applied):
                    return 0
    except NomarrError as error:
        complain(f"{error}" + (f" ({error.hint})" if error.hint else ""))
        return error.exit_status


def _choose(flags: set[str]) -> Callable[[Controller, Stamp], bool]:
    """What the options ask for; what it returns says whether to begin again."""
    if "--reconcile" in flags:
        return _reconcile
    fds = listen_fds()
    if len(fds) != 1:
        raise ConfigError(
            "no FIFO was handed over", hint="it is started by nomarr-controller.socket"
        )

    def run(controller: Controller, applied: Stamp) -> bool:
        notify("READY=1")
        # An error leaves the files and what is in the FIFO: the service is started again.
        return serve(controller, fds[0], applied)

    return run


def _reconcile(controller: Controller, _applied: Stamp) -> bool:
    reconcile(controller)
    return False


if __name__ == "__main__":
    sys.exit(main())
