"""The installation under examination, and what a check yields: facts with the commands that mend
them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError, NotPermitted
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.configuration import NotApplied, read_applied
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.overview import Overview, gather
from nomarr_systemd.systemd.manager import Manager

Level = Literal["ok", "warn", "bad"]


class Finding(NamedTuple):
    """One fact; ``mend`` is the command for it, if it needs one."""

    check: str
    level: Level
    text: str
    mend: str = ""

    @property
    def lacks_right(self) -> bool:
        """True if this user may not check it, and root could."""
        return self.mend.startswith("sudo ") and self.mend.endswith(" doctor")


Found = Iterator[tuple[Level, str, str]]  # the fields of a Finding without its check


class Installation:
    """One installation; what several checks need is read once."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.paths = scope.paths
        self.manager = Manager(user=scope.user)
        self.systemctl = "systemctl --user" if scope.user else "systemctl"
        self.nomarrctl = scope.paths.nomarrctl

    @cached_property
    def _applied(self) -> Config | NomarrError:
        try:
            return read_applied(self.paths)
        except (ConfigError, NotPermitted) as error:
            return error

    @property
    def config(self) -> Config:
        """What was applied; raises the same error each time if it cannot be read."""
        if isinstance(self._applied, NomarrError):
            raise self._applied
        return self._applied

    def is_damage(self, error: NomarrError) -> bool:
        """Return True if the error is that what was applied cannot be read."""
        return error is self._applied

    @property
    def is_applied(self) -> bool:
        return not isinstance(self._applied, NotApplied)

    @cached_property
    def workers(self) -> Sequence[Component]:
        return self.config.components()

    @cached_property
    def overview(self) -> Overview:
        return gather(self.scope, self.config, self.workers, brief=True)

    @property
    def reinstall(self) -> str:
        """How files of the program itself are put back."""
        if self.scope.user and self.scope.libexec.startswith(self.paths.state):
            return f"{self.nomarrctl} apply"
        return "apt-get install --reinstall ./nomarr-systemd_VERSION_all.deb (rpm: --replacepkgs)"


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
