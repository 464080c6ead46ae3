"""What an operator does to workers, against a real systemd: pause, resume, restart, reset."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation

# A job that lasts until the test lets it end; SIGTERM waits for it.
BUSY = """\
#!/bin/sh
trap "stop=1" TERM
systemd-notify --ready
while [ -z "$stop" ] || [ -e "$0.job" ]; do
    sleep 0.05 & wait $!
done
: >"$0.finished"
"""


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def test_pause_and_resume(site: Installation) -> None:
    site.bring_up(2)
    assert site.good("pause") == "worker:tag:0, worker:tag:1: paused\n"
    for name in ("tag-0", "tag-1"):
        assert site.lab.get(name, "ActiveState") == "inactive"
    # Not even by hand: the condition of the unit looks for the hold.
    site.lab.systemctl("start", "nomarr-worker@tag-0.service")
    assert site.lab.get("tag-0", "ActiveState") == "inactive"
    assert site.good("pause", "tag").endswith(": was paused already\n")
    row = site.row()
    assert (row["state"], row["held"]) == ("paused", "paused by root (uid 0)")
    assert site.good("resume") == "worker:tag:0, worker:tag:1: resumed\n"
    site.wait_until_healthy("tag-0", "tag-1")
    assert site.good("resume", "tag-1") == "worker:tag:1: was not paused\n"
    assert site.account().restart_count == 0
    assert os.listdir(site.state / "hold") == []


def test_who_did_it_is_in_the_ledger_and_in_the_journal(site: Installation) -> None:
    site.bring_up(1)
    anna = {"SUDO_USER": "anna\x1b[31m", "SUDO_UID": "1000"}
    site.good("pause", "tag-0", **anna)
    site.good("resume", "tag-0", **anna)
    site.wait_until_healthy("tag-0")
    site.good("restart", "tag-0", **anna)
    site.good("reset", "tag-0", **anna)
    told = [(each.action, each.by) for each in site.records()]
    who = "anna\\x1b[31m (uid 1000), by sudo"
    assert told == [(act, who) for act in ("pause", "resume", "manual", "reset")]
    assert all(each.reason == "manual" and each.effect == "done" for each in site.records())
    said = site.lab.journal("SYSLOG_IDENTIFIER=nomarrctl", "NOMARR_INSTANCE=tag-0", "--output=cat")
    acts = ("paused", "resumed", "restarted", "reset")
    assert said.splitlines() == [f"tag-0: {act} by {who}" for act in acts]


def test_a_pause_lets_the_job_finish(site: Installation) -> None:
    site.lab.write_program("worker", BUSY)
    job = Path(site.worker + ".job")
    site.configure(1)
    site.good("apply")
    site.lab.wait_until("tag-0", "active")
    job.touch()
    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("pause")],
        env=site.lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as pause:
        site.lab.wait_until("tag-0", "deactivating")
        assert pause.poll() is None
        assert not Path(site.worker + ".finished").exists()
        job.unlink()
        said, _ = pause.communicate(timeout=60)
    assert said == "worker:tag:0: paused\n"
    assert Path(site.worker + ".finished").exists()
    assert site.lab.get("tag-0", "Result") == "success"


def test_a_pause_cancels_a_backoff_and_keeps_the_counts(site: Installation) -> None:
    site.bring_up(1, backoff_s=30)
    died = site.kill()
    timer = "nomarr-restart@tag-0.timer"
    site.lab.wait_until(timer, "active")
    site.lab.wait_for(lambda: site.account().find(died), what="a record")
    row = site.lab.wait_for(
        lambda: (each := site.row())["next_restart_in_s"] is not None and each, what="the backoff"
    )
    assert isinstance(row, dict)
    assert row["state"] == "restarting"
    assert 0 < row["next_restart_in_s"] <= 30
    site.good("pause", "tag")
    assert site.lab.get(timer, "ActiveState") == "inactive"
    site.good("reconcile")
    assert site.lab.get(timer, "ActiveState") == "inactive"
    site.good("resume", "tag")
    site.wait_until_healthy("tag-0")
    assert site.account().restart_count == 1


def test_a_resume_that_was_killed_is_completed_by_the_next(site: Installation) -> None:
    site.bring_up(1)
    site.good("pause")
    hold = site.state / "hold" / "tag-0"
    hold.rename(f"{hold}.resuming")  # as a kill before the start leaves it
    # The controller completes it, too, if it looks before.
    assert site.good("resume") in ("worker:tag:0: resumed\n", "worker:tag:0: was not paused\n")
    site.wait_until_healthy("tag-0")
    assert os.listdir(hold.parent) == []


def test_a_hold_of_the_controllers_is_not_a_pause(site: Installation) -> None:
    site.bring_up(1)
    site.lab.stop("tag-0")
    hold = site.state / "hold" / "tag-0"
    hold.write_text("its pool has failed\n")
    assert site.row()["state"] == "held"
    held = "worker:tag:0: is held, and was not paused: nomarrctl doctor tells more\n"
    assert site.good("resume") == held
    assert site.json("restart", "tag-0", status=1)["workers"][0]["result"] == "held"
    assert site.good("reset", "--pool", "tag", "--start") == "worker:tag:0: reset and started\n"
    site.wait_until_healthy("tag-0")
    assert not hold.exists()


def test_restart_begins_a_run_that_nobody_counts(site: Installation) -> None:
    site.bring_up(2, backoff_s=30)
    runs = [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")]
    died = site.kill("tag-1")
    site.lab.wait_for(lambda: site.account("tag-1").find(died), what="a record")
    site.lab.wait_until("nomarr-restart@tag-1.timer", "active")
    document = site.json("restart", "tag")
    assert [each["result"] for each in document["workers"]] == ["restarted"] * 2
    assert document["by"] == "root (uid 0)"
    assert runs[0] != site.lab.get("tag-0", "InvocationID")
    assert runs[1] != site.lab.get("tag-1", "InvocationID")
    assert site.lab.get("nomarr-restart@tag-1.timer", "ActiveState") == "inactive"
    assert site.account("tag-0").restart_count == 0
    assert site.account("tag-1").restart_count == 1
    assert all(each.effect == "done" for each in site.records("tag-1"))


def test_reset_unmasks_and_does_not_start(site: Installation) -> None:
    site.bring_up(1)
    site.mask()
    row = site.row()
    assert row["state"] == "masked"
    assert row["failure_reason"] == "2 restarts within 5 min, the limit is 2"
    assert site.json("restart", "tag-0", status=1)["workers"][0]["result"] == "masked"
    site.good("pause")
    assert "failed for good" in site.good("resume")
    assert site.good("reset", "worker:tag:0") == "worker:tag:0: reset\n"
    assert site.lab.get("tag-0", "ActiveState") == "inactive"
    assert site.account().restart_count == 0
    assert site.good("reset", "tag-0", "--start") == "worker:tag:0: reset and started\n"
    site.wait_until_healthy("tag-0")
    assert site.lab.get("tag-0", "NRestarts") == "0"


def test_a_worker_that_runs_is_restarted_after_a_reset_as_before(site: Installation) -> None:
    site.bring_up(1)
    site.crash()
    site.good("reset", "tag-0")
    assert site.account().restart_count == 0
    site.crash()
    site.wait_until_healthy("tag-0")
    assert site.account().restart_count == 1


def test_a_reset_of_a_paused_worker_leaves_it_paused(site: Installation) -> None:
    site.bring_up(1)
    site.good("pause")
    said = site.json("reset", "tag-0", "--start")
    assert said["workers"] == [{"component": "worker:tag:0", "result": "paused"}]
    assert site.lab.get("tag-0", "ActiveState") == "inactive"


def test_a_hold_that_cannot_be_read_keeps_only_its_worker_down(site: Installation) -> None:
    site.bring_up(2)
    site.lab.stop("tag-0")
    (site.state / "hold" / "tag-0").mkdir()
    assert site.row()["state"] == "held"
    assert "its hold cannot be read: Is a directory" in site.row()["held"]
    said = site.ctl("reset", "tag-0", "--start")
    assert "reset, and not started: its hold cannot be read" in said.stdout
    site.crash("tag-1")
    site.wait_until_healthy("tag-1")
    (site.state / "hold" / "tag-0").rmdir()
    site.good("restart", "tag-0")
    site.wait_until_healthy("tag-0")


def test_a_store_that_is_away_keeps_nobody_from_pausing(site: Installation) -> None:
    site.bring_up(1)
    site.wait_until_reconciled()  # else that one makes the file again
    (site.state / "ledger.db").unlink(missing_ok=True)
    (site.state / "ledger.db").mkdir()
    done = site.ctl("pause")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "worker:tag:0: paused\n"
    assert "the ledger has no record of this" in done.stderr
    assert site.ctl("reset", "tag-0").returncode == 1


def test_reconcile_says_what_is_left(site: Installation) -> None:
    site.bring_up(1, backoff_s=30)
    died = site.kill()
    site.lab.wait_for(
        lambda: (found := site.account().find(died)) and found.effect == "scheduled",
        what="the restart is scheduled",
    )
    left = site.json("reconcile")
    assert left["unfinished"] == [
        {
            "component": "worker:tag:0",
            "invocation": died,
            "action": "restart",
            "effect": "scheduled",
        }
    ]
    assert "worker:tag:0: restart, scheduled" in site.good("reconcile")
    site.good("reset", "tag-0")
    assert site.good("reconcile") == "Nothing is left undone.\n"


def test_breaking_off_leaves_it_to_systemd(site: Installation) -> None:
    site.lab.write_program("worker", BUSY)
    job = Path(site.worker + ".job")
    site.configure(1)
    site.good("apply")
    site.lab.wait_until("tag-0", "active")
    job.touch()
    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("pause")], env=site.lab.environment, stderr=subprocess.PIPE
    ) as pause:
        site.lab.wait_until("tag-0", "deactivating")
        pause.send_signal(signal.SIGINT)
        assert pause.wait(60) == 130
    job.unlink()
    site.lab.wait_until("tag-0", "inactive")
    assert (site.state / "hold" / "tag-0").exists()


@pytest.mark.parametrize("act", ["pause", "resume", "restart tag-0", "reset tag-0 --start"])
def test_an_act_waits_for_the_controller(lab: Lab, act: str) -> None:
    """Otherwise a reset and a mask at the same time left a unit masked without a reason, and a
    pause could be replaced by a hold of the controller's."""
    site = Installation(lab)
    site.bring_up(1)
    site.good("pause") if act == "resume" else None
    hold = site.state / "hold" / "tag-0"
    before = _state_of(site)
    enter = ["nsenter", f"--target={lab.pid}", "--mount", "--"]
    with open(f"{lab.runtime}/nomarr/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [*enter, *site.command(*act.split())]
        with subprocess.Popen(command, env=lab.environment, stdin=subprocess.DEVNULL) as started:
            locks = Path("/proc/locks")
            waiting = f" {started.pid} "
            lab.wait_for(
                lambda: any("->" in line and waiting in line for line in _lines(locks)),
                what="it waits",
            )
            assert _state_of(site) == before
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert started.returncode == 0
    assert hold.exists() == (act == "pause")
    assert _state_of(site) != before


def test_a_reset_during_a_mask_leaves_no_mask(lab: Lab) -> None:
    """The controller is about to mask, and holds the lock; the person resets; the mask is gone."""
    site = Installation(lab)
    site.bring_up(1)
    site.mask()
    enter = ["nsenter", f"--target={lab.pid}", "--mount", "--"]
    with open(f"{lab.runtime}/nomarr/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [*enter, *site.command("reset", "tag-0", "--start")]
        with subprocess.Popen(command, env=lab.environment, stdin=subprocess.DEVNULL) as reset:
            lab.wait_for(
                lambda: any(
                    "->" in line and f" {reset.pid} " in line
                    for line in _lines(Path("/proc/locks"))
                ),
                what="it waits",
            )
            assert site.account().failure_reason
            lab.systemctl("mask", "nomarr-worker@tag-0.service")  # as the controller does, again
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert reset.returncode == 0
    site.wait_until_healthy("tag-0")
    assert lab.get("tag-0", "LoadState") == "loaded"
    assert site.account().failure_reason is None


def test_a_pause_ends_when_the_worker_is_resumed(site: Installation) -> None:
    """It waited for ever for a worker to be down that was not to be down any more."""
    site.lab.write_program("worker", BUSY)
    job = Path(site.worker + ".job")
    site.configure(1)
    site.good("apply")
    site.lab.wait_until("tag-0", "active")
    job.touch()
    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("pause", "--json")],
        env=site.lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as pause:
        site.lab.wait_until("tag-0", "deactivating")
        site.good("resume")
        said, _ = pause.communicate(timeout=60)
    assert json.loads(said)["workers"] == [{"component": "worker:tag:0", "result": "resumed"}]
    job.unlink()
    site.lab.wait_until("tag-0", "active")


def _state_of(site: Installation) -> tuple[object, ...]:
    """What an act changes: the hold, the record and the unit."""
    return (
        (site.state / "hold" / "tag-0").exists(),
        len(site.records()),
        site.lab.get("tag-0", "InvocationID"),
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
