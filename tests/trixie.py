"""``make test-trixie``: the tests that depend on the system, inside a booted Debian 13 with systemd
257 and Python 3.13: as root, then a part of them as a plain user who logs in. Where that cannot be
done it fails, it does not skip. Arguments are for pytest, in place of the tests that are usual.

All that runs in there is Debian's own, and python-arango, a copy of .venv's, which is pure Python.
The tests by Playwright and schemathesis and those of PostgreSQL do not depend on the system.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from tests.support import trees
from tests.support.lab import CHECKOUT
from tests.support.machine import Machine

PACKAGES: Final = ", ".join(
    [
        *("fish", "gcc", "libc6-dev", "libpam-systemd", "man-db", "mandoc", "openssl", "zsh"),
        *("python3-click", "python3-hypothesis", "python3-jinja2", "python3-jwt"),
        *(
            "python3-prometheus-client",
            "python3-psycopg2",
            "python3-requests",
            "python3-requests-toolbelt",
        ),
        *("python3-pytest", "python3-sdnotify", "python3-soundfile", "python3-systemd"),
        *("python3-tornado", "strace", "systemd-container", "util-linux"),
    ]
)
USER: Final = "somebody"
PLACE: Final = f"/home/{USER}/nomarr"
# What asks systemd and reads its answers; JSON and SQLite as this Python has them.
ROOTS: Final = (
    *("systemd/argv", "systemd/controller", "systemd/deaths", "systemd/demo", "systemd/hook"),
    "systemd/json",
    *("systemd/lab", "systemd/manager", "systemd/operator_day", "systemd/plain_user"),
    *("systemd/units", "systemd/why", "unit/config", "unit/json_bounds"),
    *("unit/named_tuple", "unit/toml_lines", "store/contract_values", "store/health_series"),
    "process/supervisor_jobs",
)
# What a plain user can do as root can, and what only a plain user meets.
USERS: Final = (
    *("systemd/deaths", "systemd/demo", "systemd/hook", "systemd/lab", "systemd/manager"),
    *("systemd/plain_user", "systemd/sandbox", "systemd/supervisor_kills", "systemd/why"),
    *("process/cli_jobs", "process/gpu_probe", "process/supervisor_jobs", "process/tagger"),
)
# What enters the machine stays in a cgroup outside of it; what its systemd starts does not.
IN_A_UNIT: Final = (
    *("systemd-run", "--quiet", "--pipe", "--wait", "--property=Delegate=yes"),
    *(f"--working-directory={PLACE}", "--setenv=HOME=/root", "--setenv=LANG=C.UTF-8"),
)
Run = subprocess.Popen[bytes]
OPTIONS: Final = ("-q", "--durations=20", "-p", "no:cacheprovider", "-k", "not postgresql")


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nomarr-added-") as added:
        Path(added).chmod(0o755)  # it becomes the machine's /
        copy_checkout(Path(added, PLACE[1:]))
        copy_modules(Path(added, "usr/lib/python3/dist-packages"))
        machine = Machine(trees.find_tree("trixie", PACKAGES, "python3"), Path(added))
    try:
        machine.boot()
        for command in (
            ("useradd", "--shell=/bin/bash", USER),
            ("chown", "--recursive", f"{USER}:", f"/home/{USER}"),
            ("loginctl", "enable-linger", USER),
        ):
            machine.run(*IN_A_UNIT, *command)
        status = run(machine, arguments)
    finally:
        machine.end()
    print(f"Debian 13: {time.monotonic() - started:.0f} s")
    return status


def run(machine: Machine, arguments: list[str]) -> int:
    """Both beside each other, the user's output after root's; the status of one that failed."""
    with tempfile.TemporaryFile() as said:
        user = run_as_user(machine, arguments, said)
        root = run_as_root(machine, arguments, sys.stdout.buffer)
        statuses = [root.wait(), user.wait()]
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return max(statuses, key=abs)


def copy_checkout(into: Path) -> None:
    """The tracked files as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=True
    ).stdout
    into.mkdir(parents=True)
    command = ["xargs", "-0", "cp", "-P", "--parents", f"--target-directory={into}"]
    subprocess.run(command, cwd=CHECKOUT, input=listed, check=True)


def copy_modules(into: Path) -> None:
    found = importlib.util.find_spec("arango")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, into / "arango")
    (into / "nomarr.pth").write_text(f"{PLACE}\n")  # as an editable installation has it


def run_as_root(machine: Machine, arguments: list[str], said: IO[bytes]) -> Run:
    chosen = arguments or find_modules(ROOTS)
    return start(machine, said, "/usr/bin/python3", "-m", "tests", *OPTIONS, *chosen)


def run_as_user(machine: Machine, arguments: list[str], said: IO[bytes]) -> Run:
    """By a login, with its limits and its session."""
    chosen = arguments or find_modules(USERS)
    command = shlex.join(["/usr/bin/python3", "-m", "tests", *OPTIONS, *chosen])
    command = f"cd {PLACE} && ulimit -Sn 1024 && exec {command}"
    return start(machine, said, "su", "--login", USER, "--command", command)


def find_modules(names: Sequence[str]) -> list[str]:
    return [f"tests/{name.replace('/', '/test_')}.py" for name in names]


def start(machine: Machine, said: IO[bytes], *command: str) -> Run:
    print(f"Debian 13: {shlex.join(command)}", flush=True)
    there = machine.command(*IN_A_UNIT, *command)
    return subprocess.Popen(there, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
