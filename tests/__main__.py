"""``make test``: pytest, where a private systemd can be made. For a plain user that is a namespace
of their own; where there is none, the tests that need it say so.

Without arguments it is every test, in two processes beside each other: both mostly wait.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from nomarr_systemd.demo.lab import LabUnavailable, go_where_a_lab_can_be

HERE = ("tests/systemd", "tests/unit")
BESIDE = ("tests/booted", "tests/store", "tests/process")


def main(arguments: list[str]) -> int:
    try:
        go_where_a_lab_can_be([sys.executable, "-m", "tests", *arguments])
    except LabUnavailable as error:
        sys.stderr.write(f"no private systemd: {error} ({error.hint})\n")
    if arguments:
        return int(pytest.main(arguments))
    return run_all()


def run_all() -> int:
    """Every test; the exit status of the half that failed, if one did."""
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "pytest", *BESIDE]
        with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as beside:
            here = int(pytest.main([*HERE]))
            print(f"\nthese are done, waiting for {', '.join(BESIDE)}", flush=True)
            status = beside.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    return here or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
