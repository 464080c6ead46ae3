"""A wheel in a fresh virtual environment, and nothing of the checkout: ``nomarrctl --user apply``
works from it.

With the system's Python, whose packages are all that the wheel depends on.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nomarr_systemd.demo.lab import LabUnavailable
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import SYSTEM_PYTHON, Installation

PARTS = ("nomarr_systemd", "units", "templates", "examples")
FILES = ("pyproject.toml", "setup.py", "README.md")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def nomarrctl(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        shutil.copytree(CHECKOUT / part, tree / part, ignore=ignored)
    for name in FILES:
        shutil.copy(CHECKOUT / name, tree)
    pip = (SYSTEM_PYTHON, "-m", "pip")
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("needs python3-pip, setuptools and wheel of the system: packaging/prepare rpm")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(*pip, "wheel", *options, "--wheel-dir", tmp_path, ".", cwd=tree)
    [wheel] = tmp_path.glob("*.whl")
    shutil.rmtree(tree)
    fresh = tmp_path / "fresh"
    run(SYSTEM_PYTHON, "-m", "venv", "--system-site-packages", fresh)
    run(fresh / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    return fresh / "bin/nomarrctl"


class Installed(Installation):
    """The installation of nomarrctl in a virtual environment."""

    forks = False
    nomarrctl: Path

    def command(self, *arguments: str) -> list[str]:
        return [str(self.nomarrctl), "--user", "--config", str(self.config), *arguments]


def test_a_wheel_carries_all_that_apply_needs(nomarrctl: Path) -> None:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = Installed(lab)
        site.nomarrctl = nomarrctl
        site.bring_up(2)
        site.kill("tag-0")
        lab.wait_for(lambda: site.account("tag-0").restart_count == 1, what="it is counted")
        site.wait_until_healthy("tag-0", "tag-1")
        assert "killed by SIGKILL" in site.good("why", "tag-0")
        # The programs are the wheel's own.
        program = (site.state / "libexec/nomarr-supervisor").read_text()
        assert str(nomarrctl.parent.parent) in program
        assert str(CHECKOUT) not in program
    finally:
        lab.end()
