"""The configuration on disk: the file that people edit, and ``<state>/config.json``, which
``nomarrctl apply`` wrote and which is in force. One reader of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nomarr_systemd.core.errors import ConfigError, Mistake, NotPermitted
from nomarr_systemd.host.layout import JOIN, Paths

if TYPE_CHECKING:
    from nomarr_systemd.config.values import Config

MAX_FILE_BYTES: Final = 1 << 20


class NotApplied(ConfigError):
    """Nothing was applied yet."""

    code = "not-applied"


def read_applied(paths: Paths) -> Config:
    """Return the configuration in force. NotApplied before the first apply; NotPermitted if this
    user may not read it; ConfigError if it is damaged."""
    import json  # nomarrctl --help needs neither

    from nomarr_systemd.config.values import Config

    try:
        with open(paths.resolved, encoding="utf-8") as file:
            stored = json.load(file)
    except FileNotFoundError as error:
        raise NotApplied(
            f"nothing has been applied yet: there is no {paths.resolved}",
            hint="run nomarrctl apply first",
        ) from error
    except PermissionError as error:
        raise NotPermitted(f"this user may not read {paths.resolved}", hint=JOIN) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {paths.resolved}: {error}", hint="run nomarrctl apply"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{paths.resolved} is damaged", hint="run nomarrctl apply")
    return Config.from_dict(stored)


def read_file(name: str, paths: Paths) -> Config:
    """Return the configuration that the file ``name`` describes, or ConfigError with all its
    mistakes; NotPermitted if this user may not read it."""
    from nomarr_systemd.config.file import parse  # the resident programs need no TOML

    try:
        with open(name, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {name}",
            hint="write it, or name another one with --config FILE",
        ) from error
    except PermissionError as error:
        raise NotPermitted(
            f"this user may not read the configuration file {name}", hint="use sudo"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"cannot read the configuration file {name}: {why}",
            hint="make it a readable file, or name another one with --config FILE",
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the configuration file {name} is larger than {MAX_FILE_BYTES} bytes",
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
    return parse(text, source=name, state_directory=paths.state)


def as_stored(config: Config) -> Config:
    """Return the configuration as it is after it was written and read: what ``read_applied``
    returns."""
    import json

    return type(config).from_dict(json.loads(json.dumps(config.to_dict())))
