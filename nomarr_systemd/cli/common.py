"""What every verb of nomarrctl needs: which installation is meant, the configuration of it, and
text that is safe to show. Verbs and their output are in their own modules.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from nomarr_systemd.core.errors import ConfigError, Mistake
from nomarr_systemd.core.quoting import escape
from nomarr_systemd.host.paths import Paths, system_paths, user_paths

if TYPE_CHECKING:
    from nomarr_systemd.core.config import Config

MAX_CONFIG_BYTES = 1 << 20


class Scope(NamedTuple):
    """The system's installation or one user's own, and its files."""

    user: bool
    config_file: str
    paths: Paths


def make_scope(config_file: str | None, *, user: bool) -> Scope:
    """The scope that the global options name."""
    if user:
        default = os.path.expanduser("~/.config/nomarr/nomarr.toml")
        return Scope(True, config_file or default, user_paths())
    return Scope(False, config_file or "/etc/nomarr/nomarr.toml", system_paths())


def load_config(scope: Scope) -> Config:
    """The configuration of the scope, or ConfigError with what is wrong with the file."""
    from nomarr_systemd.core.configfile import parse

    name = scope.config_file
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {name}",
            hint="write it, or name another one with --config FILE",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"cannot read the configuration file {name}: {why}",
            hint="make it a readable file, or name another one with --config FILE",
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration file {name} is larger than {MAX_CONFIG_BYTES} bytes",
            hint="is it the right file? Name another one with --config FILE",
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        mistake = Mistake(line, "", f"the byte 0x{content[error.start]:02x} is not UTF-8")
        raise ConfigError(
            f"{name}:{mistake}", hint="save the file in UTF-8", mistakes=(mistake,)
        ) from error
    return parse(text, source=name, state_directory=scope.paths.state)


def printable(text: str) -> str:
    """The text with nothing in it that a terminal would obey, but for its line breaks."""
    return "\n".join(escape(line) for line in text.split("\n"))
