"""Our system as the package installs it, and the workers that the tests run: a tree to be copied
onto a root. What a package's scripts do after unpacking is done in the booted machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from nomarr_systemd.host.places import make_programs
from tests.booted.machine import Machine, MachineUnavailable

CHECKOUT: Final = Path(__file__).parents[2]
LIBEXEC: Final = "/usr/lib/nomarr-systemd"
WORKERS: Final = "/opt/nomarr-workers"
PYTHON: Final = "/usr/bin/python3"  # the system's, with Debian's modules
MODULES: Final = ("click", "jinja2", "sdnotify", "systemd.journal")

# Under nspawn these show the boot id of the real machine, which no reboot in here changes.
OWN_BOOT_ID: Final = """\
[Service]
ProtectProc=default
ProtectKernelTunables=no
ProtectControlGroups=no
"""
READERS_OF_THE_BOOT_ID: Final = (
    "nomarr-controller.service",
    "nomarr-reconcile.service",
    "nomarr-restart@.service",
    "nomarr-supervisor.service",
)
SET_UP: Final = """\
set -e
systemd-sysusers
systemd-tmpfiles --create /usr/lib/tmpfiles.d/nomarr.conf
journalctl --update-catalog
systemctl daemon-reload
systemctl --quiet enable nomarr-workers.target
"""
TAGGER: Final = '''\
"""A worker that waits for jobs which never come."""

from nomarr_systemd.worker.runtime import Worker


class Tagger(Worker):
    pass
'''
STEADY: Final = """\
#!/bin/sh
# Healthy until a SIGTERM, which it answers by exiting with $1.
trap 'exit '"$1" TERM
exec 3>"$NOMARR_HEALTH_PIPE"
systemd-notify --ready --status='waiting for a SIGTERM'
while :; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 1 3>&- & wait $!
    systemd-notify WATCHDOG=1
done
"""
CRASHER: Final = """\
#!/bin/sh
# Fails at once, until the file exists that mends it.
[ -e /run/mended ] || exit 1
exec /opt/nomarr-workers/steady 0
"""
GLUTTON: Final = """\
#!/usr/bin/python3
# Ready, then takes memory until there is none.
import subprocess

subprocess.run(["systemd-notify", "--ready"], check=True)
taken = []
while True:
    taken.append(b"x" * (1 << 20))
"""


def lay_out(root: Path) -> None:
    """Everything that the package unpacks, below ``root``."""
    _check_modules()
    libexec = root / LIBEXEC[1:]
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("nomarr_systemd", "templates", "units"):
        shutil.copytree(CHECKOUT / name, libexec / name, ignore=ignore)
    make_programs(str(libexec), python=PYTHON, search=[LIBEXEC])
    system = root / "usr/lib/systemd/system"
    shutil.copytree(CHECKOUT / "units", system)
    for unit in READERS_OF_THE_BOOT_ID:
        write(system / f"{unit}.d/90-nspawn.conf", OWN_BOOT_ID)
    for source, place in (
        ("nomarr.sysusers", "usr/lib/sysusers.d/nomarr.conf"),
        ("nomarr.tmpfiles", "usr/lib/tmpfiles.d/nomarr.conf"),
        ("nomarr.catalog", "usr/lib/systemd/catalog/nomarr.catalog"),
        ("nomarrctl", "usr/bin/nomarrctl"),
    ):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / "packaging" / source, root / place)
    workers = root / WORKERS[1:]
    write(workers / "tagger.py", TAGGER)
    for name, text in (("steady", STEADY), ("crasher", CRASHER), ("glutton", GLUTTON)):
        write(workers / name, text, 0o755)
    shutil.copy(CHECKOUT / "examples/shell-worker.sh", workers / "shell-worker.sh")
    # As at the package's installation: who cannot write there must not compile each time.
    subprocess.run(
        [PYTHON, "-m", "compileall", "-q", "-s", str(root), "-p", "/", str(libexec)], check=True
    )
    for directory in (root, *root.rglob("*")):
        if directory.is_dir():
            directory.chmod(0o755)  # whatever the umask: the machine's /usr is everybody's


def set_up(machine: Machine) -> None:
    """What the package's scripts do once it is unpacked."""
    machine.run("sh", "-c", SET_UP)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _check_modules() -> None:
    done = subprocess.run(
        [PYTHON, "-I", "-c", f"import {', '.join(MODULES)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MachineUnavailable(
            f"modules of {PYTHON} are missing: run packaging/prepare test ({done.stderr[-200:]})"
        )
