"""SIGKILL of the controller at every system call of a restart decision and of a mask, under a real
systemd: nothing lost, nothing doubled, and the effect is done in the end.

The runs that are killed are the reconciler's, which goes the same ways as the bell's.
"""

from __future__ import annotations

import collections
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from nomarr_systemd.controller.main import main
from tests.support.crashes import account_of, wait_for_run
from tests.support.forked_ctl import enter
from tests.support.kill_points import run, trace
from tests.support.lab import BELL, Lab

# What changes a file, talks to somebody or starts a program.
CALLS = (
    "pwrite64,write,fdatasync,fsync,rename,unlink,ftruncate,fchmod,flock,socket,connect,sendto,"
    "sendmsg,vfork,clone3,clone,wait4,pipe2,mkdir"
)
OF_ITS_OWN = ("flock", "socket", "connect", "pipe2")  # gone with the process
WORKER = """\
#!/bin/sh
trap "exit 78" USR1
systemd-notify --ready
while :; do sleep 1000 & wait $!; done
"""
CONFIG = """\
[policy]
backoff_base_s = 0
max_restarts = 100
window_s = 0.001
max_lifetime_restarts = 0

[pool.tag]
command = ["{program}"]
watchdog_s = 3600
"""


def install(lab: Lab) -> None:
    lab.install(CONFIG.replace("{program}", lab.write_program("worker", WORKER)))
    # The bell must not be answered: what is killed is started by the test.
    lab.write_unit("nomarr-controller.service.d/90-bell.conf", BELL)
    lab.reload()
    lab.start("tag-0")


def reconcile(lab: Lab) -> None:
    """Be the controller; in a fork of this process."""
    enter(lab.environment, lab.directory, lab.namespaces)
    places = ("--user", f"--runtime={lab.runtime}", f"--state={lab.paths.state}")
    assert main([*places, "--reconcile"]) == 0


def fail(lab: Lab, number: int) -> str:
    """End the worker by a signal, wait until its hook has left, return what died."""
    invocation = lab.get("tag-0", "InvocationID")
    os.kill(lab.main_pid("tag-0"), number)
    lab.wait_until("tag-0", "failed")
    lab.wait_until("nomarr-wakeup.service", "inactive")
    return invocation


def kill_points(lab: Lab) -> list[tuple[str, int]]:
    """The calls of one good run that change something outside of it, by name and number. A kill at
    another call, or at one that failed, leaves what the kill at the next one leaves."""
    log = Path(lab.directory, "strace.log")
    assert trace(partial(reconcile, lab), "-e", f"trace={CALLS}", "-o", str(log)) == 0
    counts: collections.Counter[str] = collections.Counter()
    points = []
    for name, result in re.findall(r"^([a-z0-9]+)\(.*\) += (-?)", log.read_text(), re.MULTILINE):
        counts[name] += 1
        if name not in OF_ITS_OWN and not result:
            points.append((name, counts[name]))
    return points


def kill_at(lab: Lab, name: str, number: int) -> None:
    inject = f"inject={name}:signal=SIGKILL:when={number}"
    options = ("-e", f"trace={CALLS}", "-e", inject, "-o", os.devnull)
    # A call that this run does not make, because a killed one made it before, ends well.
    assert trace(partial(reconcile, lab), *options) in (-9, 0), (name, number)


@pytest.mark.slow
def test_a_restart_killed_anywhere(lab: Lab) -> None:
    install(lab)
    died = fail(lab, signal.SIGKILL)
    # The ledger is made: tests/process/test_kill_points.py has the kills of that.
    assert run(partial(reconcile, lab)) == 0
    wait_for_run(lab, died)
    died = fail(lab, signal.SIGKILL)
    points = kill_points(lab)
    wait_for_run(lab, died)
    print(f"{len(points)} kill points of a restart")
    assert len(points) > 30
    for count, (name, number) in enumerate(points, start=3):
        died = fail(lab, signal.SIGKILL)
        kill_at(lab, name, number)
        assert run(partial(reconcile, lab)) == 0, (name, number)
        restarted = wait_for_run(lab, died)
        account = account_of(lab)
        assert account.restart_count == count, (name, number)
        assert [record.invocation for record in account.records].count(died) == 1
        assert os.listdir(lab.paths.pending) == []
        assert run(partial(reconcile, lab)) == 0
        assert lab.get("tag-0", "InvocationID") == restarted, (name, number)


@pytest.mark.slow
def test_a_mask_killed_anywhere(lab: Lab) -> None:
    install(lab)

    def bring_back() -> None:
        """As an operator does, but for the counts."""
        lab.systemctl("unmask", "nomarr-worker@tag-0.service")
        lab.start("tag-0")

    fail(lab, signal.SIGUSR1)
    assert run(partial(reconcile, lab)) == 0
    bring_back()
    fail(lab, signal.SIGUSR1)
    points = kill_points(lab)
    print(f"{len(points)} kill points of a mask")
    assert len(points) > 30
    for name, number in points:
        bring_back()
        died = fail(lab, signal.SIGUSR1)
        kill_at(lab, name, number)
        assert run(partial(reconcile, lab)) == 0, (name, number)
        assert lab.get("tag-0", "LoadState") == "masked", (name, number)
        account = account_of(lab)
        record = account.find(died)
        assert record is not None
        assert (record.action, record.effect) == ("fail", "done"), (name, number)
        assert [each.invocation for each in account.records].count(died) == 1
        assert os.listdir(lab.paths.pending) == []
    assert account_of(lab).restart_count == 0
