"""What got lost between two engines: failures that wait together, a ledger that cannot be written,
and a person's stop in every state of a worker."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from nomarr_systemd.controller.reports import Report, write_report
from nomarr_systemd.core.death import name_signal
from nomarr_systemd.core.ids import parse_component
from tests.support.crashes import (
    QUICK,
    SLOW,
    WORKER,
    account_of,
    install,
    kill,
    records_of,
    wait_for_record,
    wait_for_run,
)
from tests.support.lab import BELL, Lab

MANY = 6
# Not alike: that would be an incident.
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGUSR1, signal.SIGUSR2, 38)
CONTROLLER = ("nomarr-controller.socket", "nomarr-controller.service")


def install_many(lab: Lab, policy: str = QUICK) -> list[str]:
    path = lab.write_program("worker", WORKER)
    lab.install(
        f'{policy}\n[pool.tag]\nworkers = {MANY}\ncommand = ["{path}", "0"]\nwatchdog_s = 3600\n'
        "[pool.tag.unit]\nLimitCORE = 0\n"
    )
    lab.systemctl("start", "nomarr-controller.socket")
    names = [f"tag-{number}" for number in range(MANY)]
    lab.start(*names)
    return names


def wait_for_hook(lab: Lab, instance: str) -> None:
    lab.wait_until(instance, "failed")
    lab.wait_until("nomarr-wakeup.service", "inactive")


def test_two_failures_of_a_worker_that_wait_together_forget_nobody(lab: Lab) -> None:
    """Booked in the order of their random ids, the older one undid the newer one's restart. The
    first is known by the report of a controller that was killed right after."""
    names = install_many(lab)
    # Held up: a start of a worker starts the socket again, and the hook rings.
    bell = "nomarr-controller.service.d/90-bell.conf"
    lab.write_unit(bell, BELL)
    lab.reload()
    died: dict[str, list[str]] = {name: [] for name in names}
    for _ in range(2):
        for name, number in zip(names, SIGNALS, strict=True):
            died[name].append(kill(lab, name, number))
        for name in names:
            wait_for_hook(lab, name)
        if len(died[names[0]]) == 1:
            for (name, (run,)), number in zip(died.items(), SIGNALS, strict=True):
                words = ("signal", "killed", name_signal(number))
                write_report(lab.paths, Report(parse_component(name), run, *words))
            lab.start(*names)
    Path(lab.units, bell).unlink()
    lab.reload()
    lab.systemctl("stop", "nomarr-controller.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    for name in names:
        wait_for_run(lab, died[name][-1], name)
        booked = [record.invocation for record in records_of(lab, name)]
        assert booked == died[name], "by time"
        assert account_of(lab, name).restart_count == 2


def test_a_ledger_that_can_be_read_and_not_written_stops_nobody(lab: Lab) -> None:
    names = install_many(lab, "[policy]\nbackoff_base_s = 3\nbackoff_jitter = 0\n")
    died = {name: kill(lab, name, number) for name, number in zip(names, SIGNALS, strict=True)}
    for name in names:
        wait_for_record(lab, died[name], "scheduled", name)
    ledger = Path(lab.paths.state, "ledger.db")
    with contextlib.closing(sqlite3.connect(ledger, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")  # a backup, or an sqlite3 shell
        for name in names:
            wait_for_run(lab, died[name], name)
        writer.execute("ROLLBACK")
    for name in names:
        assert len(records_of(lab, name)) == 1


def test_deaths_while_the_ledger_cannot_be_written_are_spooled_and_restarted(lab: Lab) -> None:
    install(lab, QUICK + "backoff_max_s = 0.5\n")
    lab.start("tag-0")
    first = kill(lab)
    wait_for_run(lab, first)  # so that the ledger is there
    with contextlib.closing(
        sqlite3.connect(Path(lab.paths.state, "ledger.db"), isolation_level=None)
    ) as writer:
        writer.execute("BEGIN IMMEDIATE")
        second = kill(lab)
        wait_for_run(lab, second)
        writer.execute("ROLLBACK")
    lab.systemctl("start", "nomarr-reconcile.service")
    assert [record.invocation for record in records_of(lab)] == [first, second]


def check_stays_down(lab: Lab, died: str) -> None:
    """Neither the controller nor the reconciler starts it."""
    for _ in range(2):
        lab.systemctl("start", "nomarr-reconcile.service")
    assert lab.show("tag-0", "ActiveState", "InvocationID") == {
        "ActiveState": "failed",
        "InvocationID": died,
    }
    wait_for_record(lab, died, "done")


def test_a_stop_before_the_timer_is_made_is_kept(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    lab.systemctl("stop", *CONTROLLER)
    died = kill(lab)
    wait_for_hook(lab, "tag-0")
    lab.stop("tag-0")
    lab.systemctl("start", "nomarr-controller.socket")
    check_stays_down(lab, died)
    assert account_of(lab).restart_count == 1, "it failed before it was stopped"


def test_a_stop_after_the_timer_has_fired_is_kept(lab: Lab) -> None:
    """The ring waits for a controller that is away."""
    install(lab, QUICK.replace("0.1", "2"))
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    lab.systemctl("stop", *CONTROLLER)
    ring = Path(lab.paths.pending, "due-tag-0")
    lab.wait_for(ring.exists, what="the backoff is over")
    lab.stop("tag-0")
    lab.systemctl("start", "nomarr-controller.socket")
    check_stays_down(lab, died)


@pytest.mark.parametrize("why", ["incident: 3 workers of tag died alike", "supervisor"])
def test_a_stop_of_a_held_worker_is_kept(lab: Lab, why: str) -> None:
    """It has no timer that the stop could cancel."""
    install(lab, SLOW, answer=75)
    lab.start("tag-0")
    number = signal.SIGKILL
    if why == "supervisor":
        number = signal.SIGTERM  # answered with 75, and there is no supervisor
    else:
        Path(lab.paths.hold, "tag-0").write_text(f"{why}\n")
    lab.systemctl("stop", *CONTROLLER)
    died = kill(lab, "tag-0", number)
    wait_for_hook(lab, "tag-0")
    lab.stop("tag-0")
    if why == "supervisor":
        lab.systemctl("start", "nomarr-supervisor.service")
    lab.systemctl("start", "nomarr-controller.socket")
    check_stays_down(lab, died)


def test_a_restart_that_ends_badly_is_not_counted(lab: Lab) -> None:
    """The unit has moved on when the controller looks: only the wanted unit tells."""
    install(lab, answer=1)
    lab.start("tag-0")
    lab.systemctl("restart", parse_component("tag-0").unit)
    lab.systemctl("start", "nomarr-reconcile.service")
    assert all(record.action == "ignore" for record in records_of(lab))
    assert lab.get("tag-0", "ActiveState") == "active"


@pytest.mark.slow
def test_nothing_runs_while_nothing_is_owed(lab: Lab) -> None:
    """Not one start of a program of ours by a timer for longer than the minute it used to be."""
    install(lab, QUICK + "[health]\nstartup_timeout_s = 3600\n")  # they send no frames
    lab.systemctl("start", "nomarr-workers.target")
    lab.start("tag-0", "tag-1", "tag-2")
    died = kill(lab)
    wait_for_run(lab, died)
    # The controller rests after its last look, which finds all done.
    pid = lab.wait_for_rest()
    begun_s, used = time.monotonic(), cpu_ticks(pid)
    lab.wait_until("nomarr-reconcile-soon.timer", "inactive")
    wait_for_record(lab, died, "done")

    def starts() -> int:
        said = lab.journal("-o", "cat", "--grep=^(Starting|Started) nomarr-(reconcile|controller)")
        return len([line for line in said.splitlines() if ".service" in line])

    before = starts()
    lab.wait_for(lambda: time.monotonic() > begun_s + 65, timeout_s=120, what="more than a minute")
    assert starts() == before
    assert cpu_ticks(pid) == used
    timers = lab.systemctl("list-timers", "--no-legend", "nomarr-*")
    assert [line.split()[-2] for line in timers.splitlines()] == ["nomarr-reconcile.timer"]
    shown = lab.systemctl("show", "--property=TimersMonotonic", "nomarr-reconcile.timer")
    assert "OnUnitInactiveUSec=1h" in shown


def cpu_ticks(pid: int) -> list[str]:
    """The process's CPU time, and how often it has waited."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [*stat[11:13], *(line for line in lines if line.startswith("voluntary_ctxt_switches"))]


def test_a_directory_of_reports_that_was_deleted_is_made_again(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    Path(lab.paths.pending).rmdir()
    died = kill(lab)
    lab.wait_until("tag-0", "failed")
    assert lab.get("nomarr-reconcile-soon.timer", "ActiveState") == "active"
    lab.systemctl("start", "nomarr-reconcile.service")  # the timer does it in a minute
    wait_for_run(lab, died)
    assert [record.invocation for record in records_of(lab)] == [died]


def test_a_hold_that_cannot_be_read_keeps_only_its_own_worker_down(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0", "tag-1")
    Path(lab.paths.hold, "tag-0").mkdir()
    held, other = kill(lab, "tag-0"), kill(lab, "tag-1", signal.SIGSEGV)
    wait_for_run(lab, other, "tag-1")
    assert wait_for_record(lab, held, "pending").action == "hold"
    assert lab.get("tag-0", "ActiveState") == "failed"


def test_the_reconciler_comes_back_while_something_is_owed(lab: Lab) -> None:
    """Also when the timer itself has started it."""
    install(lab)
    lab.write_unit(
        "nomarr-reconcile-soon.timer.d/90-soon.conf", "[Timer]\nOnActiveSec=\nOnActiveSec=1s\n"
    )
    lab.reload()
    lab.start("tag-0")
    lab.systemctl("stop", *CONTROLLER)
    Path(lab.paths.state, "ledger.db").mkdir()
    kill(lab)

    def runs() -> int:
        return lab.journal("-o", "cat").count("Finished nomarr-reconcile.service")

    lab.wait_for(lambda: runs() >= 3, what="three looks")
    Path(lab.paths.state, "ledger.db").rmdir()
    lab.wait_for(lambda: len(records_of(lab)) == 1, what="it is booked")
    lab.wait_until("nomarr-reconcile-soon.timer", "inactive")


def test_the_reconciler_comes_back_for_a_worker_that_is_starting(lab: Lab) -> None:
    """As at a boot: systemd had queued the start, and the decision stayed open for an hour."""
    install(lab)
    lab.write_unit(
        "slow.service", "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'read line <%t/gate'\n"
    )
    needs = "[Unit]\nWants=slow.service\nAfter=slow.service\n"
    lab.start("tag-0")
    lab.systemctl("stop", *CONTROLLER)
    died = kill(lab)
    wait_for_hook(lab, "tag-0")
    os.mkfifo(f"{lab.runtime}/gate")
    lab.write_unit("nomarr-worker@tag-0.service.d/60-slow.conf", needs)
    lab.reload()
    lab.systemctl("start", "--no-block", "nomarr-worker@tag-0.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_record(lab, died, "scheduled")
    assert lab.get("nomarr-reconcile-soon.timer", "ActiveState") == "active"
    Path(lab.runtime, "gate").write_text("\n")
    wait_for_run(lab, died)
    lab.systemctl("start", "nomarr-reconcile.service")  # the timer does it in a minute
    wait_for_record(lab, died, "done")


def test_a_lock_that_cannot_be_had_stops_nobody(lab: Lab) -> None:
    """The controller died of it a few times a second, and no worker was restarted."""
    install(lab)
    lab.start("tag-0")
    Path(lab.paths.lock).unlink(missing_ok=True)
    Path(lab.paths.lock).mkdir()
    wait_for_run(lab, kill(lab))
    assert "the lock cannot be used: continuing without it" in lab.journal("-o", "cat")


def test_a_ledger_that_is_lost_starts_nobody_who_was_stopped(lab: Lab) -> None:
    install(lab, SLOW)
    lab.start("tag-0", "tag-1")
    stopped = kill(lab)
    waiting = kill(lab, "tag-1", signal.SIGUSR1)
    wait_for_record(lab, stopped, "scheduled")
    wait_for_record(lab, waiting, "scheduled", "tag-1")
    lab.stop("tag-0")
    lab.systemctl("stop", "nomarr-controller.service")
    for name in Path(lab.paths.state).glob("ledger.db*"):
        name.unlink()
    for name in Path(lab.paths.public).iterdir():
        name.unlink()
    lab.systemctl("start", "nomarr-reconcile.service")
    # The other one is found by its failed unit, and gets its restart anew.
    wait_for_record(lab, waiting, "scheduled", "tag-1")
    assert lab.get("tag-0", "ActiveState") == "failed"
    assert lab.get("nomarr-restart@tag-0.timer", "ActiveState") == "inactive"
    assert [each.effect for each in records_of(lab)] in ([], ["done"])


def test_a_start_by_hand_before_the_controller_looks_loses_no_failure(lab: Lab) -> None:
    """systemd shows only when it was: the death is counted, once, and its cause is unknown."""
    install(lab)
    lab.start("tag-0")
    first = kill(lab)
    wait_for_run(lab, first)
    lab.wait_for_rest()
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    died = kill(lab)
    lab.wait_until("tag-0", "failed")
    lab.start("tag-0")
    run = lab.get("tag-0", "InvocationID")
    for _ in range(3):
        lab.systemctl("start", "nomarr-reconcile.service")
    assert lab.get("tag-0", "InvocationID") == run != died
    one, other = records_of(lab)
    assert (one.invocation, one.kind, one.code) == (first, "signal", -9)
    assert (other.kind, other.code, other.action, other.effect) == ("exit", -1, "restart", "done")
    assert other.lifetime_used == one.lifetime_used + 1


def test_a_requested_restart_is_no_death(lab: Lab) -> None:
    """Whatever ends first: the wanted unit is started again before the worker has stopped."""
    install(lab)
    lab.start("tag-0")
    lab.systemctl("restart", parse_component("tag-0").unit)
    lab.stop("tag-0")
    lab.start("tag-0")
    for _ in range(2):
        lab.systemctl("start", "nomarr-reconcile.service")
    assert records_of(lab) == []


def test_a_reload_of_systemd_starts_no_reconciler(lab: Lab) -> None:
    """Each mask is one, and so is each package that is installed."""
    install(lab)
    timer, service = "nomarr-reconcile.timer", "nomarr-reconcile.service"
    lab.systemctl("start", timer)
    lab.wait_for(lambda: lab.get(timer, "LastTriggerUSec") not in ("", "0", "n/a"), what="a look")
    lab.wait_until(service, "inactive")
    before = lab.get(timer, "LastTriggerUSecMonotonic")
    lab.reload()
    lab.reload()
    # A timer of our own that is armed by the same reload shows when the other would have elapsed.
    lab.write_unit("probe.timer", "[Timer]\nOnActiveSec=2s\nAccuracySec=10ms\n")
    lab.write_unit("probe.service", "[Service]\nType=oneshot\nExecStart=/bin/true\n")
    lab.reload()
    lab.systemctl("start", "probe.timer")
    lab.wait_for(
        lambda: lab.get("probe.timer", "LastTriggerUSec") not in ("", "0", "n/a"), what="the probe"
    )
    assert lab.get(timer, "LastTriggerUSecMonotonic") == before
