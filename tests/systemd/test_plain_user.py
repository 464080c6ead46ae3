"""User scope as a plain user, with nothing of root's: the demo, and a Python worker's crash loop.

With the system's Python and a copy of ours: what a developer's are installed in may be closed to
others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import CHECKOUT, COMPILED, Lab
from tests.support.users import NOBODY

PYTHON = "/usr/bin/python3"
NEEDED = "click, jinja2, sdnotify, systemd"
DEMO = f"""
import functools, os, sys
sys.path.insert(0, sys.argv.pop(1))
import nomarr_systemd.demo.story as story
from nomarr_systemd.cli.demo import demo


class PlainLab(story.Lab):
    # What is made in here is as private as usual.

    def _prepare(self):
        self._private(super()._prepare)

    def _start(self):
        self._private(super()._start)

    def run(self, *arguments, **options):
        return self._private(super().run, *arguments, **options)

    def _private(self, method, *arguments, **options):
        os.umask(0o022)
        try:
            return method(*arguments, **options)
        finally:
            os.umask(0)


story.Lab = functools.partial(PlainLab, uid={NOBODY})
os.umask(0)  # the story is told by root: what it writes is for the plain user to change
demo()
"""
CTL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from nomarr_systemd.cli.main import main
sys.exit(main())
"""
TAGGER = """
import os
from nomarr_systemd.worker.runtime import Worker

class Tagger(Worker):
    def load(self):
        if not os.path.exists(os.environ["MENDED"]):
            raise RuntimeError("the model is broken")
"""
CONFIG = """\
[policy]
backoff_base_s = 0.05
backoff_jitter = 0

[pool.tag]
entrypoint = "tagger:Tagger"

[pool.tag.unit]
Environment = ["PYTHONPATH={directory}", "MENDED={directory}/mended"]
"""


@pytest.fixture(scope="module")
def installed() -> Iterator[str]:
    """A directory with the package, its units and its templates that everyone can read."""
    have = subprocess.run([PYTHON, "-c", f"import {NEEDED}"], capture_output=True, check=False)
    if have.returncode:
        pytest.skip(f"the system's Python has not all of {NEEDED}: run packaging/prepare test")
    with tempfile.TemporaryDirectory(prefix="nomarr-plain-") as directory:
        os.chmod(directory, 0o755)
        for name in ("nomarr_systemd", "units", "templates", "examples"):
            shutil.copytree(CHECKOUT / name, Path(directory, name), ignore=COMPILED)
        # Nobody can keep there what it compiled.
        subprocess.run([PYTHON, "-m", "compileall", "-q", directory], check=True)
        for path in (directory, *map(str, Path(directory).rglob("*"))):
            os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
        yield directory


@pytest.fixture
def plain(any_lab: Lab) -> Lab:
    return any_lab


pytestmark = pytest.mark.parametrize("any_lab", [NOBODY], indirect=True, ids=["plain"])


@pytest.mark.usefixtures("plain")  # skips where no private systemd can be had
def test_the_demo(installed: str) -> None:
    command = [PYTHON, "-c", DEMO, installed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") >= 10
    assert "Masked: 5 restarts within 5 min, the limit is 5." in done.stdout


def test_a_crash_loop_ends_in_a_mask(plain: Lab, installed: str) -> None:
    """Everything is done by the plain user: nomarrctl, systemd, the workers."""
    directory = Path(plain.directory)
    (directory / "tagger.py").write_text(TAGGER)
    (directory / "nomarr.toml").write_text(CONFIG.replace("{directory}", plain.directory))
    plain.hand_over()

    def ctl(*arguments: str, check: bool = True) -> str:
        config = f"{plain.directory}/nomarr.toml"
        command = [PYTHON, "-c", CTL, installed, "--user", "--config", config, *arguments]
        return plain.run(command, check=check).stdout

    ctl("apply")
    plain.wait_for(lambda: plain.get("tag-0", "LoadState") == "masked", what="the mask")
    account = account_of(plain)
    actions = [row.split("|")[2] for row in account["records"]]
    assert actions == [*["restart"] * 5, "fail"]
    assert account["failure_reason"]

    def is_told() -> bool:
        said = plain.journal("--output=cat", "SYSLOG_IDENTIFIER=nomarr-controller")
        return "Masked: 5 restarts" in said

    plain.wait_for(is_told, what="the mask is told")
    assert "the model is broken" in plain.journal("--output=cat")

    (directory / "mended").touch()
    ctl("reset", "tag-0", "--start")
    plain.wait_until("tag-0", "active")
    for unit in ("tag-0", "nomarr-supervisor.service"):
        assert os.stat(f"/proc/{plain.main_pid(unit)}").st_uid == NOBODY
    plain.wait_for(lambda: health(ctl("status", "--json", check=False)) == "healthy")


def account_of(lab: Lab) -> dict[str, Any]:
    path = Path(lab.home, ".local/state/nomarr/public/tag-0.json")
    account: dict[str, Any] = json.loads(path.read_text())
    return account


def health(status: str) -> str:
    rows: list[dict[str, str]] = json.loads(status or "[]")
    return rows[0]["health"] if rows else ""
