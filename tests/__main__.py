"""``make test``: pytest, where a private systemd can be made. For a plain user that is a namespace
of their own; where there is none, the tests that need it say so.

Without arguments it is every test, in several processes beside each other: most of them wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from nomarr_systemd.demo.lab import LabUnavailable, go_where_a_lab_can_be

# The longest first: at the end there are only short ones left to share.
TIERS: Final = ("booted", "systemd", "store", "process", "unit")
MOST_FAILURES: Final = 40  # more are no matter of a busy machine
HANG_S: Final = 900  # no test takes so long, not even on a busy machine


def main(arguments: list[str]) -> int:
    try:
        go_where_a_lab_can_be([sys.executable, "-m", "tests", *arguments])
    except LabUnavailable as error:
        sys.stderr.write(f"no private systemd: {error} ({error.hint})\n")
    return int(pytest.main(arguments)) if arguments else run_all()


def run_all() -> int:
    """Run every test. A few that fail beside others are run again by themselves, which says
    whether they are broken or the machine was too busy for them; both results are printed."""
    status = run(choose_all())
    if status == pytest.ExitCode.TESTS_FAILED:
        print("Those that failed beside others, now one after the other:", flush=True)
        status = run(["--last-failed", "--last-failed-no-failures=none", f"--timeout={HANG_S}"])
    return status


def run(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def choose_all() -> list[str]:
    """Say what will be done, and return pytest's arguments for it."""
    processes = len(os.sched_getaffinity(0)) + 1
    print(
        f"Every test, in {processes} processes beside each other; twenty minutes on two cores. The"
        " first run makes clean Debian systems in /var/tmp/nomarr-trees, which takes minutes more.",
        flush=True,
    )
    # A module's tests share a machine or a server, so they stay together, in the order of TIERS.
    share = [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]
    most = f"--maxfail={MOST_FAILURES}"
    return [*share, most, f"--timeout={HANG_S}", *(f"tests/{tier}" for tier in TIERS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
