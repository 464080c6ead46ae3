"""``make test``: pytest, where a private systemd can be made. For a plain user that is a namespace
of their own; where there is none, the tests that need it say so.

Without arguments it is every test, in several processes beside each other: most of them wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Final

import pytest

from nomarr_systemd.demo.lab import LabUnavailable, go_where_a_lab_can_be
from tests.support.capabilities import IS_ROOT

# The longest modules begin first, beside each other; then the longest tiers: at the end there are
# only short ones left to share.
LONGEST: Final = (
    *("systemd/test_seams", "systemd/test_web_page", "systemd/test_operator_apply"),
    *("store/test_jobs_killed", "systemd/test_pause", "systemd/test_poisoned_text"),
    *("systemd/test_fleet", "systemd/test_kill_controller", "systemd/test_long_job"),
    *("store/test_races", "systemd/test_turns"),
)
TIERS: Final = ("booted", "systemd", "store", "process", "unit")
CPU_MINUTES: Final = 14  # of a whole run, nearly
MOST_FAILURES: Final = 40  # more have one cause
_FIRST: Final = (
    "The first run makes clean Debian systems in /var/tmp/nomarr-trees, which takes minutes more."
)
_PLAIN: Final = (
    "You are a plain user: what boots a machine, or needs root or other users, is skipped (s), and"
    " named at the end. Root runs that, too."
)
FAILED: Final = Path(".pytest_cache/v/cache/lastfailed")
HANG_S: Final = 900  # no test takes so long, not even on a busy machine
# $1 becomes a disk in memory, as a booted machine of the tests has it: an overlay, because `doctor`
# warns of a tmpfs. On ext4 four modules took 7 % more processor time.
_IN_MEMORY: Final = """
mount -t tmpfs tmpfs "$1" && mkdir -m 1777 "$1/upper" && mkdir "$1/lower" "$1/work" &&
    mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" "$1" &&
    export TMPDIR="$1"
shift
exec "$@"
"""


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
    result = run_in_memory([sys.executable, "-m", "pytest", *choose_all()])
    said, _ = lint.communicate()
    print(said.decode(), end="", flush=True)
    if result == pytest.ExitCode.TESTS_FAILED:
        result = try_again(int(os.environ.get("NOMARR_TRY_AGAIN", "0")))
    return result or lint.returncode


def run_in_memory(command: Sequence[str]) -> int:
    """Run it with temporary files in memory, or on the disk where that cannot be."""
    enter = ["unshare", "--mount", "--"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="n-") as place:  # short: sockets are to be in there
        script = ["sh", "-c", _IN_MEMORY, "sh", place]
        return subprocess.run([*enter, *script, *command], check=False).returncode


def try_again(most: int) -> int:
    """Run what failed by itself, if that is few: a race is named in the log, and stops nobody."""
    failed = sorted(json.loads(FAILED.read_text()))
    if len(failed) > most:
        return pytest.ExitCode.TESTS_FAILED
    print("TO BE MENDED, they failed beside others:", *failed, sep="\n", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *failed], check=False).returncode


def choose_all() -> list[str]:
    """Say what will be done, and return pytest's arguments for it."""
    cores = len(os.sched_getaffinity(0))
    processes = cores + 6  # most of them wait
    modules = {tier: sorted(glob(f"tests/{tier}/test_*.py")) for tier in TIERS}
    tiers = ", ".join(f"{tier} ({len(found)} modules)" for tier, found in modules.items())
    print(
        f"Every test of the tiers {tiers}, in {processes} processes beside each other, and lint:"
        f" about {round(CPU_MINUTES / cores) + 1} minutes on {cores} idle cores. Their number comes"
        " next, then a dot for each test and the percentage done; failures are told at the end. "
        + (_FIRST if IS_ROOT else _PLAIN),
        flush=True,
    )
    share = ["-p", "tests.support.side_by_side", f"--processes={processes}"]
    most = ["--cache-clear", f"--maxfail={MOST_FAILURES}", "-o", "tmp_path_retention_policy=failed"]
    # Files, not directories: pytest would leave out a file whose directory is named, too, and lose
    # the order.
    first = [f"tests/{name}.py" for name in LONGEST]
    rest = [path for found in modules.values() for path in found if path not in first]
    return [*share, *most, f"--timeout={HANG_S}", *first, *rest]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
