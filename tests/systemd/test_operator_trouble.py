"""``status`` and ``doctor`` know every worker that is down and not meant to be, whatever the cause;
``status`` says it by its exit status, too."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import sqlite3
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation

POOLS = """
[pool.once]
command = ["{leaves}"]
watchdog_s = 3600

[pool.once.policy]
on_clean_exit = "stay"

[pool.need]
workers = 2
command = ["{worker}"]
watchdog_s = 3600

[pool.need.policy]
backoff_base_s = 60

[pool.fail]
command = ["/bin/false"]
watchdog_s = 3600

[pool.late]
command = ["/bin/false"]
watchdog_s = 3600

[pool.late.policy]
backoff_base_s = 60
"""
LEAVES = "#!/bin/sh\nsystemd-notify --ready\nsleep 0.2\n"
NEEDED = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh -c 'test -e %t/there'\n"


@pytest.fixture
def site(lab: Lab) -> Installation:
    site = Installation(lab)
    leaves = lab.write_program("leaves", LEAVES)
    lab.write_unit("ops-db.service", NEEDED)
    for name, relation in (("need-0", "Requires"), ("need-1", "BindsTo")):
        text = f"[Unit]\n{relation}=ops-db.service\nAfter=ops-db.service\n"
        lab.write_unit(f"nomarr-worker@{name}.service.d/50-needs.conf", text)
    Path(lab.runtime, "there").touch()
    lab.reload()
    site.bring_up(6, more=POOLS.format(leaves=leaves, worker=site.worker))
    return site


def show_on_terminal(site: Installation, *arguments: str, rows: int) -> list[str]:
    """The lines that a terminal of this height gets; the kernel keeps them all until we read."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", rows, 100, 0, 0))
    try:
        subprocess.run(
            ["nsenter", f"--target={site.lab.pid}", "--mount", "--", *site.command(*arguments)],
            env=site.lab.environment | {"TERM": "xterm", "NO_COLOR": "1"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            check=False,
            timeout=60,
        )
        os.set_blocking(ours, False)
        return os.read(ours, 65536).decode().replace("\r", "").splitlines()
    finally:
        os.close(ours)
        os.close(theirs)


def wait_for_state(site: Installation, name: str, state: str) -> dict[str, Any]:
    site.lab.wait_for(lambda: site.row(name)["state"] == state, what=f"{name} is {state}")
    return site.row(name)


def test_every_way_to_be_down_is_told(site: Installation) -> None:
    lab = site.lab
    site.good("pause", "tag-1")
    lab.stop("tag-2")
    lab.systemctl("mask", "--now", "nomarr-worker@tag-3.service")
    # A bound unit's stop takes need-1 along; need-0 has the same, as Requires= does.
    lab.systemctl("stop", "ops-db.service")
    Path(lab.runtime, "there").unlink()
    lab.systemctl("start", "nomarr-worker@need-0.service", check=False)
    # Nobody looks at it: the controller will be gone, and so will the reconciler.
    never = "[Unit]\nConditionPathExists=/nonexistent\n"
    lab.write_unit("nomarr-reconcile-soon.timer.d/60-never.conf", never)
    for name, state in (("fail-0", "masked"), ("late-0", "restarting"), ("need-0", "waiting")):
        wait_for_state(site, name, state)
    lab.reload()  # first: each try of need-0 would start the timer again
    lab.systemctl("stop", "nomarr-reconcile.timer", "nomarr-reconcile-soon.timer")
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    lab.systemctl("kill", "--signal=KILL", "nomarr-worker@tag-4.service")
    # systemd does not load what has no type that it knows.
    lab.write_unit("nomarr-worker@tag-5.service.d/60-broken.conf", "[Service]\nType=nonsense\n")
    lab.stop("tag-5")
    lab.write_unit(
        "nomarr-worker@tag-5.service.d/60-broken.conf", "[Service]\nExecStart=\nType=oneshot\n"
    )
    lab.reload()

    assert wait_for_state(site, "tag-0", "healthy")["trouble"] is None
    assert wait_for_state(site, "tag-1", "paused")["trouble"] is None
    assert wait_for_state(site, "tag-2", "stopped")["trouble"] is None
    assert wait_for_state(site, "once-0", "finished")["trouble"] is None
    late = wait_for_state(site, "late-0", "restarting")
    assert late["trouble"] == "it failed, and its restart is due"
    assert late["next_restart_in_s"] > 0
    masked = wait_for_state(site, "tag-3", "masked")
    assert masked["trouble"] == "masked, but not by a decision on record: it was masked by hand"
    fail = wait_for_state(site, "fail-0", "masked")
    assert fail["trouble"] == "failed for good: 2 restarts within 5 min, the limit is 2"
    # Each try of need-0 starts what it needs again, which is activating for a moment.
    waits = "it waits: it needs ops-db.service, which is failed"
    lab.wait_for(lambda: site.row("need-0")["trouble"] == waits, what=waits)
    bound = "it was stopped with ops-db.service, which is failed"
    lab.wait_for(lambda: site.row("need-1")["trouble"] == bound, what=bound)
    lost = wait_for_state(site, "tag-4", "failed")
    assert lost["trouble"] == "it is failed, and nothing will start it"
    broken = site.row("tag-5")
    assert broken["trouble"] == f"systemd cannot load its unit: {broken['load']}"
    assert broken["load"] in ("bad-setting", "error")

    wrong = ["fail-0", "late-0", "need-0", "need-1", "tag-3", "tag-4", "tag-5"]
    done = site.ctl("status", "--problems", "--json")
    assert done.returncode == 3
    shown = [each["instance"] for each in json.loads(done.stdout)]
    assert sorted(shown) == wrong
    text = site.ctl("status", "--problems").stdout
    for name in ("tag-0", "tag-1", "tag-2", "once-0"):
        assert f"\n{name} " not in text
    for name in wrong:
        assert f"\n{name} " in text
    assert "tag-4: it is failed, and nothing will start it" in text
    findings = [
        each for each in site.json("doctor", status=1)["findings"] if each["check"] == "workers"
    ]
    bad = " ".join(each["text"] for each in findings if each["level"] == "bad")
    for name in ("fail-0", "need-0", "need-1", "tag-3", "tag-4", "tag-5"):
        assert name in bad
    assert findings
    assert "once-0" not in bad + " ".join(
        each["text"] for each in findings if each["level"] == "warn"
    )
    said = "was stopped with ops-db.service, which is failed: it cannot run without"
    lab.wait_for(lambda: said in site.json("why", "need-1")["headline"], what=said)
    # Each cure is a command that can be given.
    [cure] = [each["mend"] for each in findings if "need-1" in each["text"]]
    assert cure == "systemctl --user start ops-db.service nomarr-worker@need-1.service"


def test_what_was_stopped_with_the_target_is_told(lab: Lab) -> None:
    """Also if systemd has forgotten its units, and with them that a stop was requested, which it
    does when nothing that is active refers to them."""
    site = Installation(lab)
    site.bring_up(2)
    lab.systemctl("stop", "nomarr-workers.target")
    why = "it was stopped with nomarr-workers.target, which is inactive"
    for name in ("tag-0", "tag-1"):
        assert wait_for_state(site, name, "stopped")["trouble"] == why
    assert site.ctl("status", "--problems").returncode == 3
    bad = [each for each in site.json("doctor", status=1)["findings"] if each["level"] == "bad"]
    bad = [each for each in bad if "a reboot forgets" not in each["text"]]
    start = "systemctl --user start nomarr-workers.target"
    assert [(each["text"], each["mend"]) for each in bad] == [
        ("nomarr-workers.target is inactive", start)
    ]
    report = site.json("why", "tag-0")
    assert report["headline"] == "worker:tag:0 was stopped: nomarr-workers.target is inactive"
    assert [each["command"] for each in report["advice"]] == [start]
    others = ("supervisor.service", "supervisor.socket", "controller.socket", "reconcile.timer")
    lab.systemctl("stop", *(f"nomarr-{each}" for each in others))
    lab.wait_for(lambda: lab.get("tag-0", "InvocationID") == "", what="systemd has forgotten it")
    for name in ("tag-0", "tag-1"):
        assert wait_for_state(site, name, "stopped")["trouble"] == why
    report = site.json("why", "tag-0")
    assert report["headline"] == "worker:tag:0 does not run: nomarr-workers.target is inactive"
    assert [each["command"] for each in report["advice"]] == [start]


def test_what_is_not_decided_yet_is_told(lab: Lab) -> None:
    """Between a failure and its record, which the hook and the controller make in a moment."""
    lab.replace_controller()
    # Nor does the reconciler decide, which runs a second after the start of the manager.
    never = "[Unit]\nConditionPathExists=/nonexistent\n"
    lab.write_unit("nomarr-reconcile.service.d/60-never.conf", never)
    site = Installation(lab)
    site.bring_up(1)
    site.kill()
    row = wait_for_state(site, "tag-0", "failed")
    assert row["trouble"] == "it has just become failed, and what follows is not decided yet"
    found = site.json("doctor")["findings"]
    [cure] = [each["mend"] for each in found if "not decided about yet" in each["text"]]
    assert cure == "nomarrctl --user reconcile"


def test_the_exit_status_says_it(site: Installation) -> None:
    site.lab.wait_for(lambda: site.row("fail-0")["state"] == "masked", what="fail-0 is masked")
    assert site.ctl("status", "tag").returncode == 0
    assert site.ctl("status", "tag", "--problems").stdout == (
        "No problems: 6 workers, none in trouble.\n"
    )
    assert site.ctl("status", "tag", "--problems").returncode == 0
    assert site.ctl("status").returncode == 3
    site.good("pause", "tag-1")
    assert site.ctl("status", "tag").returncode == 3
    assert site.ctl("status", "tag", "--problems").returncode == 0, "a pause is no problem"
    site.good("resume", "tag-1")
    site.wait_until_healthy("tag-1")
    site.lab.systemctl("stop", "nomarr-supervisor.socket", "nomarr-supervisor.service")
    assert site.ctl("status", "tag-0").returncode == 1, "nobody knows whether it is healthy"


def test_when_it_is_longer_than_the_screen_trouble_comes_first(site: Installation) -> None:
    site.lab.wait_for(lambda: site.row("fail-0")["state"] == "masked", what="fail-0 is masked")
    lines = show_on_terminal(site, "status", rows=12)
    pools = [line.partition(":")[0] for line in lines if " worker" in line and ": " in line]
    assert pools[0] == "fail"
    assert pools.index("late") < pools.index("tag")
    assert not [line for line in lines if line.startswith("tag-")], "only counted"
    assert [line for line in lines if line.startswith("tag: 6 workers, 6 healthy")]
    assert [line for line in lines if "healthy, and only counted here" in line]
    lines = show_on_terminal(site, "status", rows=60)
    assert [line for line in lines if line.startswith("tag-5 ")]


def test_a_ledger_that_is_away_is_told_and_so_is_the_restart(lab: Lab) -> None:
    """It is decided blindly, and nothing of it is on record yet."""
    site = Installation(lab)
    site.bring_up(1)
    site.crash()  # there is a ledger
    site.wait_until_healthy("tag-0")
    with contextlib.closing(sqlite3.connect(site.state / "ledger.db", isolation_level=None)) as own:
        own.execute("BEGIN IMMEDIATE")
        os.kill(site.lab.main_pid("tag-0"), signal.SIGKILL)
        # After the longest backoff, and not after that which could not be booked.
        lab.wait_for(lambda: (site.row()["next_restart_in_s"] or 0) > 10, what="a restart is due")
        row = site.row()
        assert (row["state"], row["statistics"]["total_restarts"]) == ("restarting", 1)
        text = site.ctl("status").stdout
        assert "The ledger is away: 1 failure not booked yet; see nomarrctl doctor" in text
        assert "tag-0: it is failed" not in text
        own.execute("ROLLBACK")


def test_the_last_restart_is_announced(lab: Lab) -> None:
    site = Installation(lab)
    site.bring_up(1)
    site.crash()
    site.wait_until_healthy("tag-0")
    assert site.row()["last_chance"] is None
    site.crash()  # max_restarts is 2
    site.wait_until_healthy("tag-0")
    said = "no restart is left in its window, and another failure too soon masks it"
    row = site.row()
    assert (row["last_chance"], row["trouble"]) == ("window", said)
    done = site.ctl("status", "--problems")
    assert f"tag-0: {said}" in done.stdout
    assert done.returncode == 1
    assert site.ctl("status").returncode == 0, "it is healthy all the same"
    assert "the last one in the window: another failure too soon masks it" in lab.journal(
        "-o", "cat", "NOMARR_DECISION=restart"
    )
    findings = site.json("doctor", status=site.ctl("doctor").returncode)["findings"]
    assert [each["level"] for each in findings if said in each["text"]] == ["warn"]
