"""What the tests add to a clean system beside the package: their workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.support.steady import make_worker

CHECKOUT: Final = Path(__file__).parents[2]
WORKERS: Final = "/opt/nomarr-workers"

TAGGER: Final = '''\
"""A worker that waits for jobs which never come."""

from nomarr_systemd.worker.runtime import Worker


class Tagger(Worker):
    pass
'''
STEADY: Final = make_worker(
    pause_s=1, ready="READY=1\nSTATUS=waiting for a SIGTERM", later="WATCHDOG=1"
)
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
    """A tree to be copied onto a root."""
    workers = root / WORKERS[1:]
    write(workers / "tagger.py", TAGGER)
    for name, text in (("steady", STEADY), ("crasher", CRASHER), ("glutton", GLUTTON)):
        write(workers / name, text, 0o755)
    shutil.copy(CHECKOUT / "examples/shell-worker.sh", workers / "shell-worker.sh")
    for directory in (root, *root.rglob("*")):
        if directory.is_dir():
            directory.chmod(0o755)  # whatever the umask: the machine's / is everybody's


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
