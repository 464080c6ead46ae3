"""What the resident programs begin with: their options, and the configuration that was applied.

Options are read by hand: ``argparse`` takes longer to import than all that is done with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.host.layout import SYSTEM_STATE, Paths

PLACES: Final = "[--runtime=DIRECTORY] [--state=DIRECTORY] [--user]"


def parse_options(argv: Sequence[str], flags: Sequence[str] = ()) -> tuple[Paths, set[str]] | None:
    """The places that the options name, and the flags given; None if one is not understood."""
    runtime, state, given = "/run", SYSTEM_STATE, set()
    for argument in argv:
        name, _, value = argument.partition("=")
        if argument in ("--user", *flags):
            given.add(argument)
        elif name == "--runtime" and value:
            runtime = value
        elif name == "--state" and value:
            state = value
        else:
            return None
    return Paths(runtime, state, "--user" in given), given


def read_config(paths: Paths) -> Config:
    """The configuration that ``nomarrctl apply`` resolved."""
    try:
        with open(paths.resolved, encoding="utf-8") as file:
            return Config.from_dict(json.load(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {paths.resolved}: {error}", hint="run nomarrctl apply"
        ) from error
