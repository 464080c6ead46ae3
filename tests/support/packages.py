"""The packages under test, built from this checkout: the one that ``make deb`` makes, the same
with a higher version, and the RPM.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from nomarr_systemd.host.files import locked
from tests.support.machine import Machine, MachineError

CHECKOUT: Final = Path(__file__).parents[2]
NAME: Final = "nomarr-systemd"
LIBEXEC: Final = "/usr/lib/nomarr-systemd"


class BuildFailed(Exception):
    """The end of what the build said."""


def build(script: str, into: Path, *arguments: str, **environment: str) -> Path:
    """The package that ``packaging/<script>`` makes."""
    into.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(CHECKOUT / "packaging" / script), "--into", str(into), *arguments],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildFailed(f"packaging/{script}: {done.stdout[-4000:]}")
    return Path(done.stdout.splitlines()[-1])


def build_once(factory: pytest.TempPathFactory, script: str) -> Path:
    """The package, built by the first process of this run of tests that asks for it."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / script
    place.mkdir(parents=True, exist_ok=True)
    with locked(f"{place}.lock"):
        name = place / "built"
        if not name.exists():
            name.write_text(str(build(script, place / "package")))
        return Path(name.read_text())


def field(deb: Path, name: str) -> str:
    done = subprocess.run(
        ["dpkg-deb", "--field", str(deb), name], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def version_of(machine: Machine) -> str:
    """Of the package that is installed in the machine, with dpkg's state of it."""
    query = ("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", NAME)
    return machine.run(*query, check=False).stdout


def install(machine: Machine, deb: Path) -> str:
    """Install or upgrade, and return what was said; MachineError if dpkg refuses."""
    there = machine.path("/root") / deb.name
    there.write_bytes(deb.read_bytes())
    done = machine.run("dpkg", "--install", f"/root/{deb.name}", check=False)
    if done.returncode:
        raise MachineError(done.stdout + done.stderr)
    return done.stdout + done.stderr
