"""``nomarrctl demo`` as a newcomer runs it: it holds what it claims, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systemd.lab import Lab


@pytest.mark.usefixtures("lab")  # skips where no private systemd can be had
def test_the_demo_claims_only_what_it_checked(tmp_path: Path) -> None:
    # Short, because the path of a socket has 107 characters at most.
    temporary = Path(os.environ.get("TMPDIR", "/tmp"), f"nomarr-demo-{os.getpid()}")
    temporary.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nomarr_systemd.cli.main", "demo"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("✓") >= 10
        assert "Masked: 5 restarts within 5 min, the limit is 5." in done.stdout
        assert "\x1b" not in done.stdout
        assert list(temporary.iterdir()) == list(tmp_path.iterdir()) == []
    finally:
        temporary.rmdir()


def test_a_claim_that_does_not_hold_fails_the_demo(lab: Lab, tmp_path: Path) -> None:
    """With a policy that never waits the backoffs are not what the demo says they are."""
    assert lab.directory
    (tmp_path / "sitecustomize.py").write_text(
        "import nomarr_systemd.cli.demo as demo\n"
        "demo.CONFIG = demo.CONFIG.replace('backoff_base_s = 0.1', 'backoff_base_s = 0.05')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "nomarr_systemd.cli.main", "demo"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "not so: each twice the one before, five of them" in done.stderr
