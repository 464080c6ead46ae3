"""Starts and ends of workers, seen without a bus.

systemd keeps a symbolic link ``<runtime>/systemd/units/invocation:<unit>`` for every unit that
runs a process. inotify reports when one of them changes.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, UNIT_SUFFIX, Component, split_invocation

_LINK: Final = "invocation:"
_WORKER: Final = _LINK + UNIT_PREFIX


def read_invocation(directory: str, unit: str) -> str:
    """Return the invocation in which ``unit`` runs now; empty if it does not run."""
    try:
        return split_invocation(os.readlink(f"{directory}/{_LINK}{unit}"))[0]
    except (OSError, BadName):
        return ""


class RunningUnits:
    """The running invocations of workers, and a descriptor that is readable when they change."""

    def __init__(self, runtime: str) -> None:
        self.directory = f"{runtime}/systemd/units"
        try:
            from nomarr_systemd.host.inotify import DirectoryWatch  # most readers never watch

            self._watch = DirectoryWatch(self.directory)
        except OSError as error:
            raise NomarrError(
                f"cannot watch {error.filename}: {error.strerror}",
                hint="is systemd running, and is --runtime its %t?",
            ) from error
        self.fd = self._watch.fd

    def read(self, component: Component) -> str:
        """Return the invocation in which the worker runs now; empty if it does not run."""
        return read_invocation(self.directory, component.unit)

    def changed(self) -> set[str] | None:
        """Return the instances that were started or have ended, or None: check all of them."""
        try:
            names = self._watch.read()
        except FileNotFoundError as error:
            # After a restart of the supervisor a new directory is watched; nothing is lost by it.
            raise NomarrError(str(error), hint="systemd makes it anew") from error
        if names is None:
            return None
        return {
            name.removeprefix(_WORKER).removesuffix(UNIT_SUFFIX)
            for name in names
            if name.startswith(_WORKER)
        }

    def close(self) -> None:
        self._watch.close()
