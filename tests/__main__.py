"""``make test``: pytest, where a private systemd can be made. For a plain user that is a namespace
of their own; where there is none, the tests that need it say so.

Without arguments it is every test, in several processes beside each other: most of them wait.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest

from nomarr_systemd.demo.lab import LabUnavailable, go_where_a_lab_can_be

# The longest first: at the end there are only short ones left to share.
TIERS: Final = ("booted", "systemd", "store", "process", "unit")
PER_CORE: Final = 3
HANG_S: Final = 900  # no test takes so long, not even on a busy machine


def main(arguments: list[str]) -> int:
    try:
        go_where_a_lab_can_be([sys.executable, "-m", "tests", *arguments])
    except LabUnavailable as error:
        sys.stderr.write(f"no private systemd: {error} ({error.hint})\n")
    return int(pytest.main(arguments or choose_all()))


def choose_all() -> list[str]:
    """Say what will be done, and return pytest's arguments for it."""
    processes = PER_CORE * max(2, len(os.sched_getaffinity(0)))
    print(
        f"Every test, in {processes} processes beside each other; minutes on two cores. The first"
        " run makes clean Debian systems in /var/tmp/nomarr-trees, which takes minutes more.",
        flush=True,
    )
    # A module's tests share a machine or a server, so they stay together, in the order of TIERS.
    share = [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]
    return [*share, f"--timeout={HANG_S}", *(f"tests/{tier}" for tier in TIERS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
