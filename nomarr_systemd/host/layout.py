"""The paths of an installation, and functions that create what no package has created: for a user,
the demo, a test. The system's are created by the package and by packaging/nomarr.tmpfiles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from nomarr_systemd.core.named_tuple import NamedTuple

SYSTEM_STATE: Final = "/var/lib/nomarr"
WORKER_USER: Final = "nomarr"  # of workers whose pool names no other
VIEWERS: Final = "nomarr-view"  # the group that may read
# How a user gets the right to read; the hint of every NotPermitted that is about reading.
JOIN: Final = f"use sudo, or join the group: usermod -aG {VIEWERS} USER, then log in again"
LIBEXEC: Final = "/usr/lib/nomarr-systemd"  # where a package installs the programs
# The programs that the units name, and the module whose main() each one runs.
PROGRAMS: Final = {
    "nomarr-supervisor": "nomarr_systemd.supervisor.main",
    "nomarr-controller": "nomarr_systemd.controller.main",
    "nomarr-worker": "nomarr_systemd.worker.main",
    "nomarr-web": "nomarr_systemd.web.main",
}
# Our own programs do not need ``site``, whose import may take as long as all the rest; a worker may
# need it, and nomarr-web needs the packages that it finds.
_OPTIONS: Final = {"nomarr-worker": "", "nomarr-web": " -I"}
_PROGRAM: Final = """\
{interpreter}
import gc
import sys

gc.disable()  # until all is imported: there is no garbage yet
sys.path[:0] = {search!r}
from {module} import main

gc.enable()
sys.exit(main())
"""


class Paths(NamedTuple):
    """The two roots of one installation; everything else follows from them."""

    runtime: str  # systemd's %t: /run, or the user's own
    state: str
    user: bool = False

    @property
    def nomarrctl(self) -> str:
        """The command for people that is about this installation."""
        return "nomarrctl --user" if self.user else "nomarrctl"

    @property
    def failures(self) -> str:
        """The FIFO by which the hook wakes the controller; PID 1 keeps it open."""
        return f"{self.runtime}/nomarr/failures"

    @property
    def pending(self) -> str:
        """The facts of failures that are not booked yet, one file per invocation."""
        return f"{self.runtime}/nomarr/pending"

    @property
    def untold(self) -> str:
        """Deaths that are booked and that the supervisor has not confirmed yet."""
        return f"{self.runtime}/nomarr/untold"

    @property
    def kept_entries(self) -> str:
        """Journal entries that journald could not take yet."""
        return f"{self.runtime}/nomarr/journal"

    @property
    def lock(self) -> str:
        """Locked by programs that decide or act on workers: controller, reconciler, nomarrctl."""
        return f"{self.runtime}/nomarr/lock"

    @property
    def health(self) -> str:
        """The workers' FIFOs, one per instance."""
        return f"{self.runtime}/nomarr-supervisor/health"

    @property
    def run_state(self) -> str:
        """The state that the supervisor reads after it was killed."""
        return f"{self.runtime}/nomarr-supervisor/memory"

    @property
    def live(self) -> str:
        """The supervisor's socket; PID 1 keeps it open."""
        return f"{self.runtime}/nomarr/live.sock"

    @property
    def hold(self) -> str:
        """A file for each instance that must not start: paused, held, failed with its pool."""
        return f"{self.state}/hold"

    @property
    def spool(self) -> str:
        return f"{self.state}/spool"

    @property
    def public(self) -> str:
        """The ledger's accounts, for users who may only read."""
        return f"{self.state}/public"

    @property
    def past(self) -> str:
        """A file for each instance with its restarts, which its unit reads as its environment."""
        return f"{self.state}/past"

    @property
    def resolved(self) -> str:
        """The configuration as ``nomarrctl apply`` resolved it: all that resident programs read."""
        return f"{self.state}/config.json"


def system_paths() -> Paths:
    return Paths("/run", SYSTEM_STATE)


def user_paths() -> Paths:
    """Return the paths of the user who runs this program."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return Paths(runtime, os.path.expanduser("~/.local/state/nomarr"), user=True)


def make_directories(paths: Paths) -> None:
    """Create the directories that the programs expect; existing ones stay as they are."""
    for directory in (f"{paths.runtime}/nomarr", paths.state, paths.hold):
        os.makedirs(directory, 0o755, exist_ok=True)
    for directory in (paths.pending, paths.spool, paths.past):
        os.makedirs(directory, 0o700, exist_ok=True)
    for name in ("public", "work"):
        os.makedirs(f"{paths.state}/{name}", 0o750, exist_ok=True)


def _interpreter_line(python: str, options: str) -> str:
    """Return the first line of a program, by which the kernel finds its Python. Where the kernel
    cannot read such a path, because it has a space or is too long, the shell does: these lines are
    a command for it, and a string for Python."""
    if " " not in python and len(python) + len(options) < 120:
        return f"#!{python}{options}"
    return f"#!/bin/sh\n'''exec' \"{python}\"{options} \"$0\" \"$@\"\n' '''"


def make_programs(directory: str, *, python: str = sys.executable, search: Sequence[str]) -> None:
    """Write the programs as scripts for this Python, with ``search`` first in their path."""
    os.makedirs(directory, 0o755, exist_ok=True)
    ours = python == sys.executable
    packages = [path for path in sys.path if ours and path.endswith("-packages")]
    for name, module in PROGRAMS.items():
        path = os.path.join(directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                _PROGRAM.format(
                    interpreter=_interpreter_line(python, _OPTIONS.get(name, " -IS")),
                    search=[*search, *packages],
                    module=module,
                )
            )
        os.chmod(path, 0o755)  # noqa: S103 (a program is for everyone to run)
