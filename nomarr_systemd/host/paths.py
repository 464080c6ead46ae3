"""Where everything is, in system scope and in user scope (DESIGN §3, §4, §8, §11)."""

from __future__ import annotations

import os
from typing import NamedTuple

SYSTEM_STATE = "/var/lib/nomarr"


class Paths(NamedTuple):
    """The two roots of one installation; everything else follows from them."""

    runtime: str  # systemd's %t: /run, or the user's own
    state: str
    user: bool = False

    @property
    def failures(self) -> str:
        """The FIFO on which the hook rings the controller; PID 1 keeps it."""
        return f"{self.runtime}/nomarr/failures"

    @property
    def pending(self) -> str:
        """The facts of failures that are not booked yet, one file per invocation."""
        return f"{self.runtime}/nomarr/pending"

    @property
    def stop(self) -> str:
        """A mark for each run that somebody asked to stop."""
        return f"{self.runtime}/nomarr/stop"

    @property
    def health(self) -> str:
        """The workers' FIFOs, one per instance."""
        return f"{self.runtime}/nomarr-supervisor/health"

    @property
    def live(self) -> str:
        """The supervisor's socket."""
        return f"{self.runtime}/nomarr-supervisor/live.sock"

    @property
    def hold(self) -> str:
        """A file for each instance that must not start: paused, held, failed with its pool."""
        return f"{self.state}/hold"

    @property
    def spool(self) -> str:
        return f"{self.state}/spool"

    @property
    def public(self) -> str:
        """The ledger's accounts, for those who may only read."""
        return f"{self.state}/public"

    @property
    def resolved(self) -> str:
        """The configuration as ``nomarrctl apply`` resolved it: all that resident programs read."""
        return f"{self.state}/config.json"


def system_paths() -> Paths:
    return Paths("/run", SYSTEM_STATE)


def user_paths() -> Paths:
    """Those of the user who runs this program."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return Paths(runtime, os.path.expanduser("~/.local/state/nomarr"), user=True)
