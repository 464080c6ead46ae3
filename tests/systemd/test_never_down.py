"""A worker that should run and does not is restarted: one that ends well and unasked, one whose
start fails for what it needs, and one whose pause is over."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.crashes import (
    QUICK,
    WORKER,
    account_of,
    install,
    kill,
    records_of,
    wait_for_record,
    wait_for_run,
)
from tests.support.lab import Lab

STAY = QUICK + 'on_clean_exit = "stay"\n'
# Without a trap: the signal ends it.
PLAIN = """\
#!/bin/sh
systemd-notify --ready
while :; do sleep 1000 & wait $!; done
"""
LEAVES = """\
#!/bin/sh
systemd-notify --ready
sleep 0.2
exit 0
"""


def wait_until_idle(lab: Lab) -> None:
    """Until nothing is reported any more and the controller has left nothing to do."""
    pending = Path(lab.paths.pending)
    lab.wait_for(lambda: not os.listdir(pending), what="all reports are handled")


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (WORKER, signal.SIGTERM, 0),
        (PLAIN, signal.SIGTERM, -15),
        (PLAIN, signal.SIGHUP, -1),
        (PLAIN, signal.SIGINT, -2),
    ],
    ids=["status-0", "term", "hup", "int"],
)
def test_an_end_that_nobody_asked_for_is_a_failure(
    lab: Lab, program: str, number: int, code: int
) -> None:
    install(lab, program=program)
    lab.start("tag-0")
    ended = kill(lab, number=number)
    wait_for_run(lab, ended)
    record = wait_for_record(lab, ended, "started")
    assert (record.action, record.kind, record.code) == ("restart", "ended", code)
    assert account_of(lab).restart_count == 1


def test_a_program_that_returns_again_and_again_is_masked_as_any_other(lab: Lab) -> None:
    install(lab, QUICK + "max_restarts = 1\n", program=LEAVES)
    lab.start("tag-0")
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked")
    assert [(each.action, each.kind) for each in records_of(lab)] == [
        ("restart", "ended"),
        ("fail", "ended"),
    ]


def test_a_program_that_may_finish_stays_finished(lab: Lab) -> None:
    install(lab, STAY, program=LEAVES)
    lab.start("tag-0")
    run = lab.get("tag-0", "InvocationID")
    record = wait_for_record(lab, run, "done")
    assert (record.action, record.kind, record.code) == ("ignore", "ended", 0)
    lab.systemctl("start", "nomarr-reconcile.service")
    assert lab.get("tag-0", "InvocationID") == run
    assert len(records_of(lab)) == 1


def test_stops_and_restarts_that_were_requested_are_no_failures(lab: Lab) -> None:
    install(lab)
    names = ["tag-0", "tag-1", "tag-2"]
    lab.start(*names)
    before = lab.get("tag-0", "InvocationID")
    lab.systemctl("restart", "nomarr-worker@tag-0.service")
    assert lab.get("tag-0", "InvocationID") != before
    lab.stop("tag-1")
    lab.systemctl("try-restart", "nomarr-worker@tag-0.service", "nomarr-worker@tag-2.service")
    lab.systemctl("stop", "nomarr-workers.target", "nomarr-worker@tag-2.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_until_idle(lab)
    for name in names:
        assert records_of(lab, name) == []
    assert lab.get("tag-1", "ActiveState") == lab.get("tag-2", "ActiveState") == "inactive"
    hooks = lab.journal("-o", "cat").count("end of worker tag-1.")
    assert not hooks, "a requested stop costs no process"


def test_a_stop_of_what_has_ended_keeps_it_down(lab: Lab) -> None:
    install(lab, QUICK.replace("0.1", "3"))
    lab.start("tag-0")
    ended = kill(lab, number=signal.SIGTERM)
    wait_for_record(lab, ended, "scheduled")
    lab.stop("tag-0")
    wait_for_record_done(lab, ended)
    assert lab.get("tag-0", "ActiveState") == "inactive"
    assert len(records_of(lab)) == 1


def wait_for_record_done(lab: Lab, invocation: str) -> None:
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_record(lab, invocation, "done")


def test_an_end_that_no_hook_reported_is_found(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    hook = "nomarr-wakeup.service.d/99-lost.conf"
    lab.write_unit(hook, "[Service]\nExecStart=\nExecStart=/bin/true\n")
    lab.reload()
    ended = kill(lab, number=signal.SIGTERM)
    lab.wait_until("tag-0", "inactive")
    assert not os.listdir(lab.paths.pending)
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, ended)
    assert [each.kind for each in records_of(lab)] == ["ended"]


NEEDED = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'test -e %t/mended'
"""


def install_with_need(lab: Lab, relation: str) -> None:
    install(lab)
    lab.write_unit("ops-db.service", NEEDED)
    needs = f"[Unit]\n{relation}=ops-db.service\nAfter=ops-db.service\n"
    lab.write_unit("nomarr-worker@tag-0.service.d/50-needs.conf", needs)
    lab.reload()


@pytest.mark.parametrize("relation", ["Requires", "BindsTo"])
def test_what_it_needs_fails_at_the_first_start(lab: Lab, relation: str) -> None:
    """No hook has an invocation to report then; it was down for ever, also after the cure."""
    install_with_need(lab, relation)
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    lab.wait_for(lambda: records_of(lab), what="it is on record")
    lab.wait_for(lambda: count_starts(lab) >= 3, what="it is tried again")
    [record] = records_of(lab)
    assert (record.action, record.kind) == ("hold", "dependency")
    assert "it needs ops-db.service, which is failed" in record.text
    Path(lab.runtime, "mended").touch()
    lab.wait_until("tag-0", "active")
    lab.systemctl("start", "nomarr-reconcile.service")
    [record] = records_of(lab)
    assert record.effect == "done"
    assert account_of(lab).restart_count == 0, "its own retries cost it nothing"


def count_starts(lab: Lab) -> int:
    return lab.journal("-o", "cat").count("Failed to start ops-db.service")


def test_a_stop_of_what_waits_for_its_need_ends_the_tries(lab: Lab) -> None:
    install_with_need(lab, "Requires")
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    lab.wait_for(lambda: records_of(lab), what="it is on record")
    lab.stop("tag-0")
    lab.systemctl("start", "nomarr-reconcile.service")
    [record] = records_of(lab)
    assert record.effect == "done"
    assert lab.get("nomarr-restart@tag-0.timer", "SubState") in ("", "dead")


def test_a_slow_loader_does_not_hold_up_the_target(lab: Lab) -> None:
    """Nor the boot, which waits for the target."""
    install(lab, program="#!/bin/sh\nexec sleep 1000\n")
    links = Path(lab.units, "nomarr-workers.target.wants")
    links.mkdir(exist_ok=True)
    (links / "nomarr-worker@tag-0.service").symlink_to("../nomarr-worker@.service")
    lab.reload()
    lab.systemctl("start", "nomarr-workers.target")
    assert lab.get("nomarr-workers.target", "ActiveState") == "active"
    assert lab.get("tag-0", "ActiveState") == "activating"


@pytest.mark.parametrize("weight", ["", "CPUWeight=500\nNice=-1\n"], ids=["plain", "first"])
def test_what_systemd_cannot_even_try_to_run(lab: Lab, weight: str) -> None:
    """Its unit goes from inactive to failed without a moment of activity."""
    install(lab)
    lacks = f"[Service]\nEnvironmentFile=%t/mended\n{weight}"
    lab.write_unit("nomarr-worker@tag-0.service.d/50-file.conf", lacks)
    lab.reload()
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    run = lab.get("tag-0", "InvocationID")
    record = lab.wait_for(lambda: account_of(lab).find(run), what="a record")
    assert record is not None
    assert (record.action, record.kind) == ("restart", "resources")
    Path(lab.runtime, "mended").touch()
    lab.wait_until("tag-0", "active")
    lab.systemctl("start", "nomarr-reconcile.service")
    assert {each.kind for each in records_of(lab)} == {"resources"}


def test_what_fails_again_without_a_hook_is_decided_about_at_once(lab: Lab) -> None:
    """systemd runs no hook for a unit that was failed before and could not be executed. Without
    the reconciler, and with a controller that other reports keep from its look at everybody."""
    install(lab, QUICK + "max_restarts = 2\n")
    lacks = "[Service]\nEnvironmentFile=%t/nonexistent\n"
    lab.write_unit("nomarr-worker@tag-0.service.d/50-file.conf", lacks)
    nothing = "[Service]\nExecStart=\nExecStart=/bin/true\n"
    lab.write_unit("nomarr-reconcile.service.d/90-nothing.conf", nothing)
    lab.reload()
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)

    def is_masked() -> bool:
        with open(lab.paths.failures, "r+b", buffering=0) as fifo:
            fifo.write(b"another\n")
        return lab.get("tag-0", "LoadState") == "masked"

    lab.wait_for(is_masked, what="it is masked")
    assert [(each.action, each.kind) for each in records_of(lab)] == [
        ("restart", "resources"),
        ("restart", "resources"),
        ("fail", "resources"),
    ]


def test_a_start_by_hand_that_fails_without_a_hook_is_found_soon(lab: Lab) -> None:
    """The unit was failed and stopped, and systemd cannot even try to run it: no hook runs, and no
    backoff has a timer. The reconciler runs soon after each start, here after a second."""
    install(lab, QUICK.replace("0.1", "30"))
    soon = "[Timer]\nOnActiveSec=\nOnActiveSec=1s\n"
    lab.write_unit("nomarr-reconcile-soon.timer.d/90-soon.conf", soon)
    lab.reload()
    lab.start("tag-0")
    wait_for_record(lab, kill(lab), "scheduled")
    lab.stop("tag-0")
    lab.systemctl("stop", "nomarr-controller.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_until("nomarr-reconcile-soon.timer", "inactive")
    assert lab.get("tag-0", "ActiveState") == "failed"
    lacks = "[Service]\nEnvironmentFile=%t/nonexistent\n"
    lab.write_unit("nomarr-worker@tag-0.service.d/50-file.conf", lacks)
    lab.reload()
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    run = lab.get("tag-0", "InvocationID")
    record = lab.wait_for(lambda: account_of(lab).find(run), what="a record")
    assert record is not None
    assert (record.action, record.kind) == ("restart", "resources")
    assert "Triggering OnFailure" not in lab.journal("-o", "cat", f"INVOCATION_ID={run}")


def test_a_restart_of_what_has_failed_excuses_no_later_death(lab: Lab) -> None:
    """systemd starts a service with a greater weight before others, but sockets before all: the
    wanted unit is stopped and started before that run begins."""
    install(lab, QUICK.replace("0.1", "30"))
    lab.write_unit("nomarr-worker@tag-0.service.d/50-weight.conf", "[Service]\nCPUWeight=500\n")
    lab.reload()
    lab.start("tag-0")
    wait_for_record(lab, kill(lab), "scheduled")
    lab.systemctl("restart", "nomarr-worker@tag-0.service")
    died = kill(lab)
    record = lab.wait_for(lambda: account_of(lab).find(died), what="a record")
    assert record is not None
    assert (record.action, record.kind) == ("restart", "signal")


def test_a_restart_that_fails_for_what_it_needs_is_tried_again(lab: Lab) -> None:
    install_with_need(lab, "Requires")
    program = "[Service]\nExecStartPre=/bin/sh -c 'test -e %t/mended'\nExecStart=/bin/sleep 1000\n"
    lab.write_unit("ops-db.service", program)
    lab.reload()
    mended = Path(lab.runtime, "mended")
    mended.touch()
    lab.start("tag-0")
    mended.unlink()
    # It fails without a stop, which would stop the worker as well.
    lab.systemctl("kill", "--signal=KILL", "ops-db.service")
    lab.wait_until("ops-db.service", "failed")
    lab.systemctl("restart", "nomarr-worker@tag-0.service", check=False)
    lab.wait_until("tag-0", "inactive")
    record = lab.wait_for(lambda: records_of(lab), what="it is on record")[-1]
    assert (record.action, record.kind) == ("hold", "dependency")
    mended.touch()
    lab.wait_until("tag-0", "active")
