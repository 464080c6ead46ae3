"""Starts and stops of workers, seen without a bus: systemd keeps a symbolic link for every unit
that runs, ``<runtime>/systemd/units/invocation:<unit>``, and inotify tells when one changes.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, split_invocation
from nomarr_systemd.host.inotify import DirectoryWatch

_LINK: Final = "invocation:"


class Units:
    """The running invocations of units, and the marks that somebody asked one to stop."""

    def __init__(self, runtime: str, stop_marks: str) -> None:
        self._directory = f"{runtime}/systemd/units"
        self._stop_marks = stop_marks
        try:
            self._watch = DirectoryWatch(self._directory)
        except OSError as error:
            raise NomarrError(
                f"cannot watch {self._directory}: {error.strerror}",
                hint="is systemd running, and is --runtime its %t?",
            ) from error
        self.fd = self._watch.fd

    def read(self, unit: str) -> str:
        """The invocation in which a unit runs now; empty when it does not run."""
        try:
            target = os.readlink(f"{self._directory}/{_LINK}{unit}")
            return split_invocation(target)[0]
        except (OSError, BadName):
            return ""

    def changed(self) -> set[str] | None:
        """The workers' units that started or stopped, or None: look at all of them."""
        try:
            names = self._watch.read()
        except FileNotFoundError as error:
            # A new one may be watched after a restart, and nothing is lost by it.
            raise NomarrError(f"{self._directory} was removed", hint="it will be back") from error
        if names is None:
            return None
        mark = _LINK + UNIT_PREFIX
        return {name.removeprefix(_LINK) for name in names if name.startswith(mark)}

    def was_asked_to_stop(self, invocation: str) -> bool:
        """Whether a person or a job stops this run: its end is no death."""
        return os.path.exists(f"{self._stop_marks}/{invocation}")

    def close(self) -> None:
        self._watch.close()
