"""The packages under test, built from this checkout: the one that ``make deb`` makes, the same
with a higher version, and the RPM. They are kept beside the trees, until their sources change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

from nomarr_systemd.host.files import locked
from tests.support import trees
from tests.support.machine import Machine, MachineError

CHECKOUT: Final = Path(__file__).parents[2]
NAME: Final = "nomarr-systemd"
LIBEXEC: Final = "/usr/lib/nomarr-systemd"
UNUSED_S: Final = 7 * 24 * 3600
# What a package is made of, if not of everything but the tests.
SOURCES: Final = {
    "build-arango": ("packaging/python3-arango/", "packaging/build-arango", "packaging/common.sh")
}


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


def build_once(script: str, *arguments: str) -> Path:
    """The package, built by the first who asks for it of these sources and with these tools."""
    place = trees.open_cache() / "packages" / _name(script, *arguments)
    place.mkdir(parents=True, exist_ok=True)
    with locked(f"{place}.lock"):
        built = place / "built"
        if not built.exists():
            _remove_unused(place.parent)
            built.write_text(str(build(script, place / "package", *arguments)))
            shutil.rmtree(place / "package/build")
        built.touch()
        return Path(built.read_text())


def install_once(tree: Path, deb: Path) -> Path:
    """The tree's layer with the package in it, installed by the first who asks for it: that is
    1.1 s of processor time, most of it for compiling Python."""
    layer = deb.parent / f"on-{tree.name}"
    with locked(f"{layer}.lock"):
        if not layer.exists():
            partial = layer.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
            nothing = deb.parent / "nothing"
            nothing.mkdir(exist_ok=True)
            machine = Machine(tree, nothing)
            try:
                machine.boot()
                install(machine, deb)
                machine.save(partial)
            finally:
                machine.end()
            partial.rename(layer)
    return layer


def _name(script: str, *arguments: str) -> str:
    """Says what a package is made of: tracked files as they are now, but for the tests, and every
    program that this machine's dpkg has installed."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
    digest = hashlib.sha256(Path("/var/lib/dpkg/status").read_bytes())
    digest.update("\0".join(arguments).encode())
    for name in listed.stdout.split("\0")[:-1]:
        if name.startswith(SOURCES.get(script, "")) and not name.startswith("tests/"):
            path = CHECKOUT / name
            content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
            digest.update(f"\0{name}\0{path.lstat().st_mode & 0o111}\0{len(content)}\0".encode())
            digest.update(content)
    return f"{script}-{digest.hexdigest()[:12]}"


def _remove_unused(directory: Path) -> None:
    """Those of sources that no test has asked for in a week."""
    for built in directory.glob("*/built"):
        if built.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(built.parent)


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
