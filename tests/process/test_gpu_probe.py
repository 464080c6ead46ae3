"""The check of the GPU: a real command that succeeds, fails, hangs, cannot be run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.jobs.stats import GpuHealth, read_gpu
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.worker.gpu_probe import Probe
from tests.support.running_worker import Start, workers
from tests.support.waiting import PATIENCE_S, wait_for

PROBE = "nomarr_systemd.worker.gpu_probe:GpuProbe"
# What it does is in a file, which can be changed while the probe runs.
CHECK = """#!/bin/sh
. "$0.what"
"""


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


class Check:
    """A program that checks no GPU."""

    def __init__(self, place: Path) -> None:
        self.path = place / "check"
        self.path.write_text(CHECK)
        self.path.chmod(0o755)

    def be(self, what: str) -> None:
        new = self.path.with_name("new")
        new.write_text(what)
        new.rename(f"{self.path}.what")


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def probe(check: Check, timeout_s: float = 60.0) -> GpuHealth:
    return Probe([str(check.path)], timeout_s).check(lambda: None)


def test_a_check_that_succeeds_or_fails(check: Check) -> None:
    check.be("echo GPU 0: fine")
    assert probe(check) == GpuHealth(True)
    check.be("echo first; printf 'No devices\\033[1m were found' >&2; exit 6")
    found = probe(check)
    assert found == GpuHealth(False, "check: exit status 6: No devices\\x1b[1m were found")
    check.be("kill -SEGV $$")
    assert probe(check) == GpuHealth(False, "check: killed by signal 11")
    missing = Probe(["/nonexistent/nvidia-smi"], 1).check(lambda: None)
    assert missing.reason == "nvidia-smi cannot be run: No such file or directory"


def test_a_check_that_hangs_is_killed_with_its_children(check: Check, tmp_path: Path) -> None:
    child = tmp_path / "child"
    check.be(f"trap '' TERM; sleep 1000 & echo $! >{child}; wait")
    assert probe(check, 0.5) == GpuHealth(False, "check did not end within 0.5 s")
    state = Path(f"/proc/{int(child.read_text())}/stat")

    def is_gone() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_for(is_gone, PATIENCE_S, "the child is killed")


def test_the_worker_writes_what_it_finds(start: Start, check: Check, tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path), "work")
    check.be("exit 0")
    settings = {"store": {"url": f"sqlite://{tmp_path}"}}
    environment = {
        "GPU_CHECK": f"'{check.path}' -L",
        "GPU_CHECK_EVERY_S": "0.05",
        "GPU_CHECK_TIMEOUT_S": "0.5",
    }
    worker = start(
        [sys.executable, "-m", "nomarr_systemd.worker.main", PROBE], settings, environment
    )

    def is_found(available: bool, reason: str) -> bool:
        found = read_gpu(store, 60)
        return found is not None and found.available == available and reason in found.reason

    worker.until(lambda: is_found(True, ""))
    check.be("exit 3")
    worker.until(lambda: is_found(False, "exit status 3"))
    check.be("sleep 1000")
    worker.until(lambda: is_found(False, "did not end within 0.5 s"))
    check.be("exit 0")
    worker.until(lambda: is_found(True, ""))
    assert worker.stop() == 0
    assert "the GPU is not available: check: exit status 3" in worker.stdout
    store.close()


def test_what_is_asked_wrongly_is_said(start: Start, tmp_path: Path) -> None:
    settings = {"store": {"url": f"sqlite://{tmp_path}"}}
    command = [sys.executable, "-m", "nomarr_systemd.worker.main", PROBE]
    for wrong in ({"GPU_CHECK": "'"}, {"GPU_CHECK_EVERY_S": "soon"}, {"GPU_CHECK_EVERY_S": "nan"}):
        worker = start(command, settings, wrong)
        assert worker.wait() == 78
        assert next(iter(wrong)) in worker.stderr
