"""``nomarrctl demo`` as a newcomer runs it: it holds what it claims, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.demo import cgroup

COMMAND = [sys.executable, "-m", "nomarr_systemd.cli.main", "demo"]

pytestmark = pytest.mark.usefixtures("lab")  # skips where no private systemd can be had


@pytest.fixture
def temporary() -> Iterator[Path]:
    """TMPDIR, empty afterwards as before. Short: a socket's path has 107 characters at most."""
    place = Path(tempfile.mkdtemp(prefix="demo-"))
    yield place
    place.rmdir()


def run(temporary: Path, cwd: Path, *patches: str) -> subprocess.CompletedProcess[str]:
    """The demo, with something about it changed first."""
    (cwd / "sitecustomize.py").write_text(
        "import nomarr_systemd.demo.story as story, nomarr_systemd.demo.stage as stage\n"
        + "\n".join(patches)
    )
    return subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(cwd)},
    )


def test_the_demo_claims_only_what_it_checked(temporary: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") >= 17
    for said in (
        "a sine of 1 kHz has its centre at 1 kHz",
        "5 broken files failed their own jobs, and nothing else",
        "killed by SIGSEGV after",
        "it killed a worker, was tried once more, killed again, and is set aside",
        "the restarts of the workers are refunded",
        "in _decode_natively",
        "watchdog: no progress was reported; killed by SIGABRT",
        "its backoffs were 100 ms, 200 ms, 400 ms, 800 ms, 1600 ms",
        "Masked: 5 restarts within 5 min, the limit is 5.",
        "5 error, 2 quarantined",
    ):
        assert said in done.stdout, done.stdout
    assert "\x1b" not in done.stdout
    assert list(temporary.iterdir()) == list(tmp_path.iterdir()) == []


def test_a_claim_that_does_not_hold_fails_the_demo(temporary: Path, tmp_path: Path) -> None:
    """Without a wait the backoffs are not what the demo says they are."""
    change = "story.CONFIG = story.CONFIG.replace('backoff_base_s = 0.1', 'backoff_base_s = 0.05')"
    done = run(temporary, tmp_path, change)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this does not hold: each twice the one before, five of them" in done.stderr


def test_a_wait_in_vain_shows_the_worker(temporary: Path, tmp_path: Path) -> None:
    """What was waited for, and what that worker said; not what everybody said."""
    change = "story.CONFIG = story.CONFIG.replace('tagger:Tagger', 'tagger:Nobody')"
    done = run(temporary, tmp_path, change, "stage.PATIENCE_S = 5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not within 5 s: tag-0, tag-1: healthy" in done.stderr
    assert "--- tag-0, which is " in done.stderr
    assert "tag-0: exited with status 78" in done.stderr
    told, _, _ = done.stderr.partition("--- nomarr-supervisor")
    assert "scan-0" not in told


def test_ended_from_outside_it_leaves_nothing(temporary: Path) -> None:
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as running:
        assert running.stdout
        assert running.stderr
        for line in running.stdout:
            if "✓" in line:
                break
        assert list(temporary.iterdir())
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 130
        assert "interrupted" in running.stderr.read()
    assert list(temporary.iterdir()) == []
    for place in cgroup.find_hierarchies():
        assert not any(f"-{running.pid}-" in name for name in os.listdir(place))
