"""Directories and programs of an installation that no package has made: a user's own, the demo's,
a test's. The system's come from packaging/nomarr.tmpfiles and from the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from nomarr_systemd.host.paths import Paths

# The programs that the units name, and the module whose main() each one runs.
PROGRAMS: Final = {
    "nomarr-supervisor": "nomarr_systemd.supervisor.main",
    "nomarr-controller": "nomarr_systemd.controller.main",
    "nomarr-worker": "nomarr_systemd.worker.main",
}
# Ours alone need nothing that ``site`` looks for, which may take as long as all the rest; a worker
# is also its user's.
_OPTIONS: Final = {"nomarr-worker": ""}
_PROGRAM: Final = """\
#!{python}{options}
import gc
import sys

gc.disable()  # until all is imported: there is no garbage yet
sys.path[:0] = {search!r}
from {module} import main

gc.enable()
sys.exit(main())
"""


def make_directories(paths: Paths) -> None:
    """What the programs expect to be there; what is there stays as it is."""
    for directory in (f"{paths.runtime}/nomarr", paths.stop, paths.state, paths.hold):
        os.makedirs(directory, 0o755, exist_ok=True)
    for directory in (paths.pending, paths.spool):
        os.makedirs(directory, 0o700, exist_ok=True)
    for name in ("public", "work"):
        os.makedirs(f"{paths.state}/{name}", 0o750, exist_ok=True)


def make_programs(directory: str, *, python: str = sys.executable, search: Sequence[str]) -> None:
    """The programs as scripts for this Python, which look for modules in ``search`` first."""
    os.makedirs(directory, 0o755, exist_ok=True)
    ours = python == sys.executable
    packages = [path for path in sys.path if ours and path.endswith("-packages")]
    for name, module in PROGRAMS.items():
        path = os.path.join(directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                _PROGRAM.format(
                    python=python,
                    options=_OPTIONS.get(name, " -IS"),
                    search=[*search, *packages],
                    module=module,
                )
            )
        os.chmod(path, 0o755)  # noqa: S103 (a program is for everyone to run)
