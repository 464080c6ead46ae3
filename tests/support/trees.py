"""Clean Debian systems to boot: nothing in them but a base, systemd, and what our package depends
on. Made once by mmdebstrap from apt's own mirror, kept in /var/tmp, never written to again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.support.machine import MachineUnavailable

SUITES: Final = ("bookworm", "trixie")
CACHE: Final = Path("/var/tmp/nomarr-trees")
PULLED: Final = "var/lib/pulled"  # in a tree: the packages that ours pulled in, one per line
# $1 is the tree. With its own apt, so that its own release decides what satisfies them.
_DEPEND: Final = """\
chroot "$1" apt-get satisfy --no-install-recommends --yes --simulate {depends} |
    sed -n 's/^Inst \\([^ ]*\\).*/\\1/p' >"$1/{pulled}" &&
chroot "$1" apt-get satisfy --no-install-recommends --yes {depends} &&
chroot "$1" apt-get clean &&
chroot "$1" apt-get satisfy --no-install-recommends --yes --download-only {offered} &&
chroot "$1" systemd-machine-id-setup
"""


def find_tree(suite: str, needed: str, offered: str) -> Path:
    """The root of a clean ``suite`` that satisfies the dependencies ``needed``. Those ``offered``
    are in apt's cache: they can be installed without a network.
    """
    mirror = find_mirror()
    hook = _DEPEND.format(depends=shlex.quote(needed), offered=shlex.quote(offered), pulled=PULLED)
    key = hashlib.sha256(f"{mirror} {suite} {hook}".encode()).hexdigest()[:12]
    tree = open_cache() / f"{suite}-{key}"
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody else may be making the same one
        if not tree.exists():
            _make(suite, mirror, hook, tree)
    return tree


def open_cache() -> Path:
    """The directory for what is made once."""
    CACHE.mkdir(mode=0o700, exist_ok=True)
    if CACHE.stat().st_uid != os.geteuid():  # everybody may make it, and root boots what is in it
        raise MachineUnavailable(f"{CACHE} is somebody else's: remove it")
    return CACHE


@functools.cache  # apt reads all of its lists for it: 0.6 s
def find_mirror() -> str:
    """Where this machine's apt gets Debian from; it has every suite."""
    command = ["apt-get", "indextargets", "--format=$(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    mirrors = sorted({line.rstrip("/") for line in done.stdout.splitlines()})
    found = [mirror for mirror in mirrors if mirror.endswith("/debian")] or mirrors
    if not found:
        raise MachineUnavailable("apt has no mirror of Debian in its sources")
    return found[0]


def _make(suite: str, mirror: str, hook: str, tree: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise MachineUnavailable("mmdebstrap is missing: run packaging/prepare test")
    partial = CACHE / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    done = subprocess.run(
        [
            *("mmdebstrap", "--variant=minbase", "--include=systemd,systemd-sysv,dbus"),
            *("--skip=cleanup/apt/lists", "--skip=cleanup/apt/cache"),
            *(f"--customize-hook={hook}", suite, str(partial), mirror),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"} | _proxies(),
    )
    if done.returncode:
        said = done.stderr[-2000:]
        raise MachineUnavailable(f"a tree of {suite} from {mirror} is missing: {said}")
    partial.rename(tree)


def _proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
