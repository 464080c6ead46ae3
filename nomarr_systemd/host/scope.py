"""One installation, the system's or a user's own: its configuration file, its directories, and the
name of the person who acts on it.
"""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, NamedTuple

from nomarr_systemd.core.errors import ConfigError, NotPermitted
from nomarr_systemd.core.text import escape
from nomarr_systemd.host.configuration import NotApplied, as_stored, read_applied, read_file
from nomarr_systemd.host.layout import LIBEXEC, Paths, system_paths, user_paths

if TYPE_CHECKING:
    from nomarr_systemd.config.values import Config


class Scope(NamedTuple):
    """One installation and its configuration file."""

    user: bool
    config_file: str
    paths: Paths

    def read_file(self) -> Config:
        """Return what the configuration file says, applied or not."""
        return read_file(self.config_file, self.paths)

    def read_in_force(self) -> Config:
        """Return what was applied; before the first apply, what the file says."""
        try:
            return read_applied(self.paths)
        except NotApplied:
            return self.read_file()

    def file_differs(self, applied: Config) -> bool | None:
        """Return True if the file is not what was applied, or has mistakes; None if it is not
        readable."""
        if not os.path.lexists(self.config_file):
            return None  # another one was applied, by --config
        try:
            return as_stored(self.read_file()) != applied
        except NotPermitted:
            return None
        except ConfigError:
            return True

    @property
    def unit_directory(self) -> str:
        """Where apply installs units and systemd keeps masks."""
        if not self.user:
            return "/etc/systemd/system"
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        return f"{config}/systemd/user"

    @property
    def libexec(self) -> str:
        """The directory of the programs: the package's, or else the user's own."""
        if not self.user or os.path.exists(f"{LIBEXEC}/nomarr-supervisor"):
            return LIBEXEC
        return f"{self.paths.state}/libexec"


def make_scope(config_file: str | None, *, user: bool) -> Scope:
    """Return the scope that the global options of nomarrctl name."""
    if user:
        default = os.path.expanduser("~/.config/nomarr/nomarr.toml")
        return Scope(True, config_file or default, user_paths())
    return Scope(False, config_file or "/etc/nomarr/nomarr.toml", system_paths())


def name_person() -> str:
    """Return the person that runs this program, for the record; under sudo, the user that called
    sudo."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "?"
    other, number = os.environ.get("SUDO_USER"), os.environ.get("SUDO_UID", "?")
    if uid == 0 and other:  # any other user could set it to anything
        return f"{escape(other)[:40]} (uid {escape(number)[:10]}), by sudo"
    return f"{name} (uid {uid})"
