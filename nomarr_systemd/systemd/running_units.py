"""Starts, stops and stop requests of workers, seen without a bus.

systemd keeps a symbolic link ``<runtime>/systemd/units/invocation:<unit>`` for every unit that
runs, and inotify reports when one changes. The link of ``nomarr-wanted@tag-0.service`` is there
from a start of the worker until a stop or restart of it is requested.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, WANTED_PREFIX, Component, split_invocation
from nomarr_systemd.host.inotify import DirectoryWatch

_LINK: Final = "invocation:"


def read_invocation(directory: str, unit: str) -> str:
    """The invocation in which ``unit`` runs now; empty if it does not run."""
    try:
        return split_invocation(os.readlink(f"{directory}/{_LINK}{unit}"))[0]
    except (OSError, BadName):
        return ""


class RunningUnits:
    """The running invocations of workers, and a descriptor that is readable when they change."""

    def __init__(self, runtime: str) -> None:
        self.directory = f"{runtime}/systemd/units"
        try:
            self._watch = DirectoryWatch(self.directory)
        except OSError as error:
            raise NomarrError(
                f"cannot watch {self.directory}: {error.strerror}",
                hint="is systemd running, and is --runtime its %t?",
            ) from error
        self.fd = self._watch.fd

    def read(self, component: Component) -> str:
        """The invocation in which the worker runs now; empty if it does not run."""
        return read_invocation(self.directory, component.unit)

    def read_wanted(self, component: Component) -> str:
        """The invocation of the worker's wanted unit; empty if a stop was requested."""
        return read_invocation(self.directory, component.wanted_unit)

    def changed(self) -> set[str] | None:
        """The instances whose worker or wanted unit changed, or None: check all of them."""
        try:
            names = self._watch.read()
        except FileNotFoundError as error:
            # After a restart of the supervisor a new directory is watched; nothing is lost by it.
            raise NomarrError(
                f"{self.directory} was removed", hint="systemd makes it anew"
            ) from error
        if names is None:
            return None
        prefixes = (_LINK + UNIT_PREFIX, _LINK + WANTED_PREFIX)
        return {
            name.partition("@")[2].removesuffix(".service")
            for name in names
            if name.startswith(prefixes)
        }

    def close(self) -> None:
        self._watch.close()
