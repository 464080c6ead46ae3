"""What outlives a reboot, and what a shutdown must not leave: masks, backoffs, pauses, counts.

Each test has a pool of its own name, and so an account of its own.
"""

from __future__ import annotations

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import Machine, unit_of


def configure(machine: Machine, pool: str, program: str, policy: str, workers: int = 1) -> None:
    command = ", ".join(f'"{word}"' for word in f"{WORKERS}/{program}".split())
    machine.apply(
        f"[policy]\nbackoff_jitter = 0\n{policy}\n"
        f"[pool.{pool}]\nworkers = {workers}\ncommand = [{command}]\n"
    )


def read_boot_id(machine: Machine) -> str:
    return machine.path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def test_a_mask_and_its_reason_stay(machine: Machine) -> None:
    configure(machine, "loop", "crasher", "backoff_base_s = 0.05\nmax_restarts = 2")
    machine.wait_for(lambda: machine.get("loop-0", "LoadState") == "masked", "loop-0 is masked")
    machine.wait_until_settled("loop-0")
    before = machine.account("loop-0")
    assert [record.action for record in before.records] == ["restart", "restart", "fail"]

    def is_shown() -> bool:
        shown = machine.systemctl("status", "--full", unit_of("loop-0"), check=False)
        return "Masked: 2 restarts within 5 min, the limit is 2." in shown

    machine.wait_for(is_shown, "systemctl status shows the reason")

    machine.reboot()
    assert machine.account("loop-0") == before
    shown = machine.status("loop-0")
    assert shown["state"] == "masked"
    assert shown["health"] == "failed", "not stopped: the supervisor knows of it, too"
    assert shown["failure_reason"] == "2 restarts within 5 min, the limit is 2"
    assert machine.get("loop-0", "LoadState") == "masked"
    entry = machine.journal("--catalog", "NOMARR_DECISION=fail")
    assert "Subject: Worker loop-0 failed for good and is masked" in entry
    assert "nomarrctl reset --start loop-0" in entry

    machine.path("/run/mended").touch()
    machine.run("nomarrctl", "reset", "--start", "loop-0")
    machine.wait_until_running("loop-0")
    account = machine.account("loop-0")
    assert (account.restart_count, account.failure_reason) == (0, None)
    machine.wait_until_healthy("loop-0")  # it is judged again


@pytest.mark.parametrize(("pool", "backoff_s"), [("patient", 60), ("due", 1)])
def test_a_reboot_during_a_backoff_is_counted_once(
    machine: Machine, pool: str, backoff_s: int
) -> None:
    name = f"{pool}-0"
    configure(machine, pool, "steady 0", f"backoff_base_s = {backoff_s}")
    machine.wait_until_running(name)
    died = machine.kill(name)
    machine.wait_for(
        lambda: (found := machine.account(name).find(died)) and found.effect == "scheduled",
        "the restart is scheduled",
    )
    boot_id = read_boot_id(machine)

    machine.reboot()
    assert read_boot_id(machine) != boot_id
    machine.wait_until_running(name, after=died)
    machine.wait_until_settled(name)
    account = machine.account(name)
    assert [(each.invocation, each.boot_id) for each in account.records] == [(died, boot_id)]
    assert account.restart_count == 1
    assert machine.get(f"nomarr-restart@{name}.timer", "ActiveState") == "inactive"


def test_paused_workers_stay_down(machine: Machine) -> None:
    configure(machine, "rest", "steady 0", "backoff_base_s = 0.05", workers=2)
    machine.wait_until_running("rest-0", "rest-1")
    died = machine.kill("rest-0")
    machine.wait_until_running("rest-0", after=died)
    machine.systemctl("restart", "nomarr-reconcile.service")  # it sees that the restart is done
    machine.wait_until_settled("rest-0")
    counted = machine.account("rest-0")
    machine.run("nomarrctl", "pause", "rest")

    machine.reboot()
    for name in ("rest-0", "rest-1"):
        assert machine.get(name, "ActiveState") == "inactive"
        assert machine.get(name, "ConditionResult") == "no"
    machine.run("nomarrctl", "resume", "rest")
    machine.wait_until_running("rest-0", "rest-1")
    account = machine.account("rest-0")
    assert (account.restart_count, account.window) == (counted.restart_count, counted.window)
    acts = [(each.action, each.by) for each in machine.account("rest-1").records]
    assert acts == [("pause", "root (uid 0)"), ("resume", "root (uid 0)")]
    # Written by root's own hand, and still for the group to read.
    shown = machine.run("stat", "--format=%A %U:%G", "/var/lib/nomarr/public/rest-1.json")
    assert shown.stdout.strip() == "-rw-r----- root:nomarr-view"


def test_workers_that_a_shutdown_ends_badly_are_not_counted(machine: Machine) -> None:
    configure(machine, "sore", "steady 1", "backoff_base_s = 0.05", workers=3)
    names = ("sore-0", "sore-1", "sore-2")
    machine.wait_until_running(*names)

    machine.reboot()
    machine.wait_until_running(*names)
    ended = machine.journal("--boot=-1", "--unit", unit_of("sore-0"))
    assert "Failed with result 'exit-code'" in ended
    machine.systemctl("start", "nomarr-reconcile.service")
    for name in names:
        account = machine.account(name)
        assert account.restart_count == 0
        assert {record.action for record in account.records} <= {"ignore"}


def test_a_pause_with_an_end_ends_after_a_reboot(machine: Machine) -> None:
    configure(machine, "nap", "steady 0", "backoff_base_s = 0.05")
    machine.wait_until_running("nap-0")
    machine.run("nomarrctl", "pause", "nap", "--for", "1h", "--reason", "a new disk")
    machine.reboot()
    assert machine.get("nap-0", "ActiveState") == "inactive"
    shown = machine.status("nap-0")
    assert (shown["state"], shown["trouble"]) == ("paused", None)
    # The timer that ends it is made again at boot; with an hour it is still to come.
    machine.wait_for(
        lambda: machine.get("nomarr-pause-end.timer", "ActiveState") == "active", "its timer"
    )
    machine.run("nomarrctl", "pause", "nap", "--for", "15s")
    machine.reboot()
    machine.wait_until_running("nap-0")
    acts = [each.action for each in machine.account("nap-0").records]
    assert acts == ["pause", "pause", "resume"]


def test_a_slow_loader_does_not_hold_up_the_boot(machine: Machine) -> None:
    """The boot waited for READY=1 of every worker."""
    program = f"{WORKERS}/loader"
    machine.path(program).write_text(f"#!/bin/sh\nsleep 8\nexec {WORKERS}/steady 0\n")
    machine.path(program).chmod(0o755)
    configure(machine, "slow", "loader", "backoff_base_s = 0.05")
    machine.reboot()
    machine.wait_until_running("slow-0")
    began = {
        name: int(machine.get(name, "ActiveEnterTimestampMonotonic"))
        for name in ("nomarr-workers.target", "multi-user.target", "slow-0")
    }
    assert 0 < began["nomarr-workers.target"] <= began["multi-user.target"] < began["slow-0"]


def test_many_workers_are_started_in_portions(machine: Machine) -> None:
    script = "systemd-notify --ready; exec sleep 1000"
    machine.apply(f'[pool.many]\nworkers = 70\ncommand = ["/bin/sh", "-c", "{script}"]\n')
    machine.reboot()
    units = [unit_of(f"many-{number}") for number in range(70)]
    show = ("show", "--property=ActiveState", "--value", *units)
    machine.wait_for(lambda: set(machine.systemctl(*show).split()) == {"active"}, "all run")
    machine.wait_for(
        lambda: machine.get("nomarr-portions.service", "ActiveState") == "inactive", "it ends"
    )
    assert machine.get("nomarr-portions.service", "Result") == "success"
    assert not any(machine.path("/run").glob("nomarr-portions/*"))
    assert "ordering cycle" not in machine.journal("--boot")
