"""``make test``: pytest, where a private systemd can be made. For a plain user that is a namespace
of their own; where there is none, the tests that need it say so.

Without arguments it is every test, in several processes beside each other: most of them wait.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from nomarr_systemd.demo.lab import LabUnavailable, go_where_a_lab_can_be

# Tiers that share nothing. The longest are first: they have the cores to themselves at the end.
GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "systemd": ("tests/systemd",),
    "booted": ("tests/booted",),
    "others": ("tests/unit", "tests/store", "tests/process"),
}


def main(arguments: list[str]) -> int:
    try:
        go_where_a_lab_can_be([sys.executable, "-m", "tests", *arguments])
    except LabUnavailable as error:
        sys.stderr.write(f"no private systemd: {error} ({error.hint})\n")
    if arguments:
        return int(pytest.main(arguments))
    return run_all()


def run_all() -> int:
    """Run every test; return the exit status of a group that failed, or 0."""
    print(
        "Every test, in groups beside each other; a quarter of an hour on two cores. The first run"
        " makes clean Debian systems in /var/tmp/nomarr-trees, which takes minutes more."
    )
    for name, places in GROUPS.items():
        print(f"  {name:<8} {', '.join(places)}", flush=True)
    groups = [Group(name, places) for name, places in GROUPS.items()]
    for group in groups:
        group.join()
    for group in groups:
        print(f"{group.name:<8} {group.summary}")
    return max((group.status for group in groups), key=abs)


class Group(threading.Thread):
    """One pytest. Its progress is shown as it comes, all else in one piece when it has ended."""

    _printing = threading.Lock()

    def __init__(self, name: str, places: Sequence[str]) -> None:
        super().__init__(name=name)
        self.status = 1
        self.summary = "it did not end"
        self._pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", *places],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.start()

    def run(self) -> None:
        assert self._pytest.stdout is not None
        kept = []
        for line in self._pytest.stdout:
            if line.rstrip().endswith("%]"):
                with self._printing:
                    print(f"{self.name:<8} {line}", end="", flush=True)
            else:
                kept.append(line)
        self.status = self._pytest.wait()
        with self._printing:
            print("".join(kept), end="", flush=True)
        self.summary = (kept or [""])[-1].strip(" =\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
