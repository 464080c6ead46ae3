"""The options of the resident programs, parsed without ``argparse``: its import is slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nomarr_systemd.host.layout import SYSTEM_STATE, Paths

PLACES: Final = "[--runtime=DIRECTORY] [--state=DIRECTORY] [--user]"


def parse_options(argv: Sequence[str], flags: Sequence[str] = ()) -> tuple[Paths, set[str]] | None:
    """Return the paths that the options name, and the flags given; None if an option is unknown."""
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
