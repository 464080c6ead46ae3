"""``nomarrctl demo`` as a newcomer runs it: it holds what it claims, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_demo_claims_only_what_it_checked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nomarr_systemd.cli.main", "demo"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓") >= 10
    assert "fail: 5 restarts within 5 min, the limit is 5" in done.stdout
    assert "unhealthy → dead  →  stale" in done.stdout
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_does_not_hold_fails_the_demo(tmp_path: Path) -> None:
    """With a ledger that no longer knows its failures the demo must not end well."""
    (tmp_path / "sitecustomize.py").write_text(
        "import nomarr_systemd.core.account as account\n"
        "account.Account.find = lambda *_: None\n"  # failures are no longer recognised
    )
    done = subprocess.run(
        [sys.executable, "-m", "nomarr_systemd.cli.main", "demo"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "not so: each was reported twice and counted once" in done.stderr
