"""Kill a program at each system call that it makes."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CALLS = "pwrite64,write,fdatasync,fsync,rename,unlink,ftruncate,fchmod,mkdir,link,flock"


def trace(program: str, directory: Path, *inject: str) -> subprocess.CompletedProcess[str]:
    log = directory.with_suffix(".strace")
    command = ["strace", "-f", "-e", f"trace={CALLS}", "-o", str(log), *inject]
    return subprocess.run(
        [*command, sys.executable, "-c", program, str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )


def kill_points(program: str, directory: Path) -> list[tuple[str, int]]:
    """Every call that one good run makes: its name and its number."""
    done = trace(program, directory)
    assert done.returncode == 0, done.stderr
    log = directory.with_suffix(".strace").read_text()
    counts = collections.Counter(re.findall(r"^\d+ +([a-z0-9]+)\(", log, re.MULTILINE))
    return [(name, number) for name, count in counts.items() for number in range(1, count + 1)]


def kill(program: str, directory: Path, name: str, number: int) -> None:
    done = trace(program, directory, "-e", f"inject={name}:signal=SIGKILL:when={number}")
    assert done.returncode in (-9, 137), (name, number, done.stderr)


def at_each(points: list[tuple[str, int]], check: Callable[[str, int], None]) -> None:
    """On all cores: nearly all of the time is Python starting under strace."""
    with concurrent.futures.ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for result in [pool.submit(check, *point) for point in points]:
            result.result()
