"""The configuration in force: what ``nomarrctl apply`` wrote to ``<state>/config.json``, and its
one reader. The file that people edit is read by ``config.file``.
"""

from __future__ import annotations

import json

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.host.layout import Paths


class NotApplied(ConfigError):
    """Nothing was applied yet."""

    code = "not-applied"


def read_applied(paths: Paths) -> Config:
    """The applied configuration. NotApplied before the first apply; ConfigError if it cannot be
    read or is damaged."""
    try:
        with open(paths.resolved, encoding="utf-8") as file:
            stored = json.load(file)
    except FileNotFoundError as error:
        raise NotApplied(
            f"cannot read {paths.resolved}: nothing has been applied yet",
            hint="run nomarrctl apply",
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"{paths.resolved} is not for you to read",
            hint="use sudo, or join the group: usermod --append --groups nomarr YOUR-NAME",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {paths.resolved}: {error}", hint="run nomarrctl apply"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{paths.resolved} is damaged", hint="run nomarrctl apply")
    return Config.from_dict(stored)
