"""The hook, the wanted units and the hold, with real deaths; the controller is not there."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.demo.lab import LabError
from nomarr_systemd.systemd.dbus.connection import Bus
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.stop_intent import (
    UNIT_FACTS,
    WANTED_FACTS,
    was_asked_to_stop,
)
from nomarr_systemd.systemd.unit_files import find_data
from tests.support.lab import Lab

WORKER = """\
#!/bin/sh
# $1: what a SIGTERM is answered with; "deaf" answers nothing, "silent" is never ready either.
case $1 in
    deaf) trap "" TERM ;;
    silent) trap "" TERM; exec sleep 1000 ;;
    *) trap "exit $1" TERM ;;
esac
systemd-notify --ready
while :; do sleep 1000 & wait $!; done
"""
QUIET = "watchdog_s = 3600\n"


def install(lab: Lab, settings: str = QUIET, *, answer: str = "0", health: str = "") -> None:
    lab.replace_controller()
    program = lab.write_program("worker", WORKER)
    lab.install(f'{health}\n[pool.tag]\ncommand = ["{program}", "{answer}"]\n{settings}')


def wait_for_hook(lab: Lab) -> None:
    """Wait until the hook has rung, once, and has ended."""
    lab.wait_for(lab.read_bell, what="the hook rings")
    lab.wait_until("nomarr-wakeup.service", "inactive")
    assert lab.read_bell() == [""]


def wait_for_end_of_hook(lab: Lab) -> None:
    """Wait until the hook has run and ended."""
    hook = "nomarr-wakeup.service"
    lab.wait_for(lambda: int(lab.get(hook, "ExecMainExitTimestampMonotonic") or 0), what="it ran")
    lab.wait_until(hook, "inactive")
    assert lab.get(hook, "Result") == "success"


def is_wanted_now(lab: Lab, instance: str = "tag-0") -> bool:
    return lab.get(f"nomarr-wanted@{instance}.target", "ActiveState") == "active"


def was_stopped(lab: Lab, instance: str = "tag-0") -> bool:
    """Whether the unit's last run was asked to stop, by what systemd shows."""
    unit = lab.show(instance, *UNIT_FACTS)
    return was_asked_to_stop(unit, lab.show(f"nomarr-wanted@{instance}.target", *WANTED_FACTS))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_death_and_an_unasked_end_are_rung(any_lab: Lab, number: int) -> None:
    install(any_lab)
    any_lab.start("tag-0")
    os.kill(any_lab.main_pid("tag-0"), number)
    wait_for_hook(any_lab)
    assert is_wanted_now(any_lab)
    assert not was_stopped(any_lab)


def test_a_missed_watchdog_is_rung(lab: Lab) -> None:
    install(lab, "watchdog_s = 0.2\n")
    lab.start("tag-0")
    wait_for_hook(lab)
    assert lab.get("tag-0", "Result") == "watchdog"


def test_a_start_that_takes_too_long_is_rung(lab: Lab) -> None:
    settings = QUIET + "stop_timeout_s = 0.1\n"
    install(lab, settings, answer="silent", health="[health]\nstartup_timeout_s = 0.2\n")
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    wait_for_hook(lab)
    assert lab.get("tag-0", "Result") == "timeout"
    assert not was_stopped(lab)


def test_fifty_die_at_once_and_the_last_is_rung_for(any_lab: Lab) -> None:
    """The hook runs less often than workers die, and at least once after the last death that has
    not found it running."""
    install(any_lab, QUIET + "workers = 50\n")
    names = [f"tag-{n}" for n in range(50)]
    any_lab.start(*names)
    with closing(Manager(bus=Bus(place=any_lab.socket))) as manager:
        pids = any_lab.main_pids(*names)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def look() -> bool:
            found, is_over = manager.list_idle("nomarr-worker@*")
            # Before the first death systemd has not begun the hook, either.
            has_rung = bool(any_lab.read_bell())
            return has_rung and is_over and list(found.values()) == ["failed"] * 50

        any_lab.wait_for(look, what="all are failed, and the hook has ended")
    assert 1 <= len(any_lab.read_bell()) <= 50


def test_a_stop_that_was_asked_for_is_shown_by_systemd(any_lab: Lab) -> None:
    install(any_lab)
    any_lab.start("tag-0")
    assert is_wanted_now(any_lab)
    any_lab.stop("tag-0")
    assert any_lab.get("tag-0", "ActiveState") == "inactive"
    assert not is_wanted_now(any_lab)


@pytest.mark.parametrize(("answer", "result"), [("1", "exit-code"), ("deaf", "timeout")])
def test_a_stop_that_ends_badly_is_rung_and_shown(lab: Lab, answer: str, result: str) -> None:
    install(lab, QUIET + "stop_timeout_s = 0.2\n", answer=answer)
    lab.start("tag-0")
    lab.stop("tag-0")
    wait_for_hook(lab)
    assert lab.get("tag-0", "Result") == result
    assert was_stopped(lab)
    assert not is_wanted_now(lab)


def test_a_restart_leaves_it_wanted(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    invocation = lab.get("tag-0", "InvocationID")
    lab.systemctl("restart", "nomarr-worker@tag-0.service")
    assert lab.get("tag-0", "InvocationID") != invocation
    assert is_wanted_now(lab)
    assert not was_stopped(lab), "the new run was not"


def test_a_held_worker_does_not_start_and_that_is_no_failure(any_lab: Lab) -> None:
    install(any_lab)
    hold = Path(any_lab.paths.hold, "tag-0")
    hold.touch()
    any_lab.start("tag-0")
    shown = any_lab.show("tag-0", "ActiveState", "ConditionResult")
    assert shown == {"ActiveState": "inactive", "ConditionResult": "no"}
    assert not any_lab.read_bell()

    hold.unlink()
    any_lab.start("tag-0")
    assert any_lab.get("tag-0", "ActiveState") == "active"


def test_the_target_starts_and_stops_all_workers(any_lab: Lab) -> None:
    install(any_lab, QUIET + "workers = 3\n")
    # What else the target wants are programs, which have their own tests.
    for name in ("nomarr-supervisor.service", "nomarr-reconcile.service"):
        any_lab.write_unit(
            f"{name}.d/99-test.conf",
            "[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart=/bin/true\n",
        )
    any_lab.reload()
    any_lab.systemctl("start", "nomarr-workers.target")
    workers = [f"tag-{n}" for n in range(3)]
    for worker in workers:  # the target does not wait for them
        any_lab.wait_until(worker, "active")

    any_lab.systemctl("stop", "nomarr-workers.target")
    for worker in workers:
        any_lab.wait_until(worker, "inactive")
    assert not any(is_wanted_now(any_lab, worker) for worker in workers)
    assert any_lab.get("nomarr-controller.socket", "ActiveState") == "active"


def test_a_missing_supervisor_is_not_started_by_a_worker(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    assert lab.get("nomarr-supervisor.service", "ActiveState") == "inactive"


def test_directories_lost_with_a_reboot_are_made_again(any_lab: Lab) -> None:
    install(any_lab)
    for directory in (any_lab.paths.pending, f"{any_lab.runtime}/nomarr"):
        os.rmdir(directory)
    any_lab.start("tag-0")
    os.kill(any_lab.main_pid("tag-0"), signal.SIGKILL)
    wait_for_hook(any_lab)
    assert os.path.isdir(any_lab.paths.pending)


def test_without_the_fifo_nothing_is_in_its_place(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    lab.systemctl("stop", "nomarr-controller.service", "nomarr-controller.socket")
    os.unlink(lab.paths.failures)
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    wait_for_end_of_hook(lab)
    assert not os.path.lexists(lab.paths.failures)


def test_without_a_reader_the_hook_does_not_wait(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    lab.systemctl("stop", "nomarr-controller.service", "nomarr-controller.socket")
    assert stat.S_ISFIFO(os.stat(lab.paths.failures).st_mode)
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    wait_for_end_of_hook(lab)


def test_the_hook_needs_no_program_but_its_shell(lab: Lab) -> None:
    install(lab)
    lab.write_unit("nomarr-wakeup.service.d/99-test.conf", "[Service]\nEnvironment=PATH=/nowhere\n")
    lab.reload()
    lab.start("tag-0")
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    wait_for_hook(lab)


def test_the_hook_works_in_its_sandbox(lab: Lab) -> None:
    """Root's user manager can make the system's sandbox; only the network's part is missing."""
    install(lab)
    name = "nomarr-wakeup.service.d/10-system.conf"
    lab.write_unit(name, Path(find_data("units"), name).read_text())
    lab.reload()
    lab.start("tag-0")
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    wait_for_hook(lab)


def test_an_instance_that_is_not_configured_fails_for_good(lab: Lab) -> None:
    install(lab)
    with pytest.raises(LabError, match="failed"):
        lab.start("other-0")
    wait_for_hook(lab)
    assert lab.get("other-0", "ExecMainStatus") == "78"
    assert "other-0 is not configured" in lab.journal()


@pytest.mark.parametrize("state", ["failed", "held"])
def test_a_stop_of_a_worker_that_is_down_is_shown(lab: Lab, state: str) -> None:
    install(lab)
    lab.start("tag-0")
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    lab.wait_until("tag-0", "failed")
    if state == "held":
        Path(lab.paths.hold, "tag-0").write_text("held\n")
        lab.start("tag-0")  # its condition is not met
    assert is_wanted_now(lab)
    lab.stop("tag-0")
    assert not is_wanted_now(lab)
    assert not was_stopped(lab), "nobody asked a run that had ended"
