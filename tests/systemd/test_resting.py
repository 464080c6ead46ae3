"""A controller without work rests: nothing is open, nothing is done, and the next failure finds it.
Its programs are a copy of the package that rests after a second."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.host.files import locked
from nomarr_systemd.host.layout import make_programs
from tests.support.crashes import install, kill, records_of, wait_for_record, wait_for_run
from tests.support.lab import Lab, copy_package

UNIT = "nomarr-controller.service"
AT_ONCE = "[policy]\nbackoff_base_s = 0\nwindow_s = 0.001\nmax_lifetime_restarts = 0\n"
ROUNDS = 20


@pytest.fixture
def package(lab: Lab) -> Path:
    """The package that the programs of the lab import."""
    copy = copy_package(Path(lab.directory, "package"), 1.0)
    install(lab, AT_ONCE)
    make_programs(lab.libexec, search=[str(copy.parent)])
    lab.start("tag-0", "tag-1")
    return copy


def fail(lab: Lab, instance: str = "tag-0") -> str:
    """Let a worker fail, and wait until it runs again; returns the invocation that died."""
    died = kill(lab, instance)
    wait_for_run(lab, died, instance)
    wait_for_record(lab, died, "done", instance)
    return died


def list_open(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    return sorted(os.readlink(f"{directory}/{name}") for name in os.listdir(directory))


def memory_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss_Anon"))


def test_it_rests_with_nothing_open_and_does_not_grow(lab: Lab, package: Path) -> None:
    fail(lab)
    pid = lab.wait_for_rest()
    resting = list_open(pid)
    assert not [each for each in resting if "ledger.db" in each]
    fail(lab)
    before_kb = 0
    for number in range(ROUNDS):
        assert lab.wait_for_rest() == pid
        fail(lab)
        before_kb = before_kb or (memory_kb(pid) if number == ROUNDS // 4 else 0)
    assert lab.wait_for_rest() == pid
    assert len(list_open(pid)) == len(resting)
    assert memory_kb(pid) < before_kb + 512


def test_a_ledger_that_was_replaced_meanwhile_is_the_one_written(lab: Lab, package: Path) -> None:
    fail(lab)
    pid = lab.wait_for_rest()
    path = Path(lab.paths.state, "ledger.db")
    shutil.copy(path, path.with_name("restored"))
    os.rename(path.with_name("restored"), path)
    died = fail(lab)
    assert lab.wait_for_rest() == pid
    with closing(sqlite3.connect(path)) as db:
        [(body,)] = db.execute(
            "SELECT body FROM worker_restart_policy WHERE body LIKE ?", (f"%{died}%",)
        )
    assert died in body
    assert len(records_of(lab)) == 2


def test_a_ledger_that_was_damaged_meanwhile_is_set_aside(lab: Lab, package: Path) -> None:
    fail(lab)
    pid = lab.wait_for_rest()
    path = Path(lab.paths.state, "ledger.db")
    path.write_bytes(b"damaged" * 1000)  # the same file
    fail(lab)
    assert lab.wait_for_rest() == pid
    assert list(path.parent.glob("ledger.db.corrupt-*"))


def test_another_version_is_started_by_the_next_failure(lab: Lab, package: Path) -> None:
    """Also where no maintainer script restarts it: installed by pip, for one user."""
    fail(lab)
    pid = lab.wait_for_rest()
    main = package / "controller" / "main.py"
    shutil.copy(main, main.with_name("new"))
    os.rename(main.with_name("new"), main)
    fail(lab)
    assert lab.main_pid(UNIT) != pid
    assert lab.get(UNIT, "NRestarts") == "0"  # it left by itself


def test_a_controller_that_is_stopped_in_its_rest_holds_nobody_up(lab: Lab, package: Path) -> None:
    """The watchdog does not see it for hours; the reconciler does what is owed."""
    fail(lab)
    os.kill(lab.wait_for_rest(), signal.SIGSTOP)
    died = kill(lab)
    lab.systemctl("start", "nomarr-reconcile.service")  # its timer is armed by the failure
    wait_for_run(lab, died)


def test_the_watchdog_is_for_work(lab: Lab, package: Path) -> None:
    quick = "[Service]\nWatchdogSec=3s\nTimeoutAbortSec=1s\n"
    lab.write_unit(f"{UNIT}.d/99-quick.conf", quick)
    lab.reload()
    fail(lab)
    pid = lab.wait_for_rest()
    rested_us = int(lab.get(UNIT, "WatchdogTimestampMonotonic"))

    def is_past() -> bool:
        with open("/proc/uptime") as file:
            return float(file.read().split()[0]) > rested_us / 1e6 + 8

    lab.wait_for(is_past, what="more than its watchdog has passed")
    assert lab.main_pid(UNIT) == pid
    with locked(lab.paths.lock):
        died = kill(lab)
        lab.wait_for(lambda: lab.find_main_pid(UNIT) not in (0, pid), what="it is replaced")
    wait_for_run(lab, died)
