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

# Modules that wait for minutes begin first, beside others that work; then the longest tiers: at
# the end there are only short ones left to share.
WAITING: Final = ("seams", "web_page", "pause", "poisoned_text", "fleet", "long_job", "turns")
TIERS: Final = ("booted", "systemd", "store", "process", "unit")
MOST_FAILURES: Final = 40  # more have one cause
HANG_S: Final = 900  # no test takes so long, not even on a busy machine


def main(arguments: list[str]) -> int:
    try:
        go_where_a_lab_can_be([sys.executable, "-m", "tests", *arguments])
    except LabUnavailable as error:
        sys.stderr.write(f"no private systemd: {error} ({error.hint})\n")
    return int(pytest.main(arguments)) if arguments else run_all()


def run_all() -> int:
    """Run every test, and lint beside them; its output comes after theirs."""
    lint = subprocess.Popen(
        ["make", "--no-print-directory", "lint"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    tests = subprocess.run([sys.executable, "-m", "pytest", *choose_all()], check=False)
    said, _ = lint.communicate()
    print(said.decode(), end="", flush=True)
    return tests.returncode or lint.returncode


def choose_all() -> list[str]:
    """Say what will be done, and return pytest's arguments for it."""
    processes = len(os.sched_getaffinity(0)) + 2  # two of them wait, mostly
    print(
        f"Every test, in {processes} processes beside each other, and lint. The first run makes"
        " clean Debian systems in /var/tmp/nomarr-trees, which takes minutes more.",
        flush=True,
    )
    # A module's tests share a machine or a server, so they stay together, in this order.
    share = [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"]
    most = f"--maxfail={MOST_FAILURES}"
    first = [f"tests/systemd/test_{name}.py" for name in WAITING]
    return [*share, most, f"--timeout={HANG_S}", *first, *(f"tests/{tier}" for tier in TIERS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
