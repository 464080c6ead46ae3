"""Every way a worker dies, under a real systemd with the real supervisor and controller: each has
its class, its decision, its journal entry and its effect.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from nomarr_systemd.core.ledger_record import Record
from tests.support.actor import ACTOR
from tests.support.crashes import account_of, records_of, wait_for_run
from tests.support.lab import Lab

# A worker of forty lines that misbehaves as its first argument says.
CONFIG = """\
[policy]
backoff_base_s = 0.1
backoff_jitter = 0

[health]
frame_interval_s = 0.1
staleness_interval_s = 0.5
startup_timeout_s = 3
min_recovery_s = 0.5
max_recovery_s = 2

[pool.tag]
command = ["{actor}", "{mode}", "{once}"]
watchdog_s = {watchdog_s}
{more}
"""


def install(lab: Lab, mode: str, *, watchdog_s: float = 3600, more: str = "") -> None:
    actor = lab.write_program("actor", ACTOR)
    values = {
        "actor": actor,
        "mode": mode,
        "once": f"{lab.directory}/once",
        "watchdog_s": str(watchdog_s),
        "more": more,
    }
    text = CONFIG
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    lab.install(text)
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")


def die_and_come_back(lab: Lab, act: Callable[[], None] | None = None) -> Record:
    """Start it, let it die, and wait until it runs again; the one record there is."""
    lab.systemctl("start", "--no-block", "nomarr-worker@tag-0.service")
    if act is not None:
        lab.wait_until("tag-0", "active")
        act()
    record = lab.wait_for(lambda: records_of(lab), what="a record")[0]
    wait_for_run(lab, record.invocation)
    assert record.action == "restart"
    assert account_of(lab).restart_count == 1
    said = lab.journal(f"NOMARR_INVOCATION_ID={record.invocation}", "--output=cat")
    assert said.startswith("tag-0: ")
    return record


@pytest.mark.parametrize(
    ("mode", "kind", "code"),
    [("exit1", "exit", 1), ("exit70", "exit", 70), ("exit75", "exit", 75)],
)
def test_it_leaves_with_a_status(lab: Lab, mode: str, kind: str, code: int) -> None:
    """75 with a living supervisor is EX_TEMPFAIL like any program's: it counts."""
    install(lab, mode)
    record = die_and_come_back(lab)
    assert (record.kind, record.code) == (kind, code)


@pytest.mark.parametrize(("number", "kinds"), [(9, {"signal"}), (11, {"signal", "core-dump"})])
def test_it_is_killed(lab: Lab, number: int, kinds: set[str]) -> None:
    install(lab, "live", more="[pool.tag.unit]\nLimitCORE = 0\n")
    record = die_and_come_back(lab, lambda: os.kill(lab.main_pid("tag-0"), number))
    assert record.kind in kinds
    assert record.code == -number


def test_a_hung_loop_with_a_live_frame_thread_is_the_watchdogs(lab: Lab) -> None:
    install(lab, "watchdog", watchdog_s=1)
    record = die_and_come_back(lab)
    assert (record.kind, record.code) == ("watchdog", -2)


@pytest.mark.parametrize(
    ("mode", "kind", "code"),
    [
        ("recovering", "recovery-timeout", -2),
        ("invalid", "invalid-heartbeat", -3),
        ("closed", "stale", -2),
    ],
)
def test_the_supervisor_ends_it(lab: Lab, mode: str, kind: str, code: int) -> None:
    install(lab, mode)
    record = die_and_come_back(lab)
    assert (record.kind, record.code) == (kind, code)


def test_a_silent_start(lab: Lab) -> None:
    """systemd's start timeout and the supervisor's are the same: whoever is first, the class is."""
    install(lab, "silent")
    assert die_and_come_back(lab).kind == "start-timeout"


def test_a_stopped_process_falls_silent(lab: Lab) -> None:
    install(lab, "live")
    record = die_and_come_back(lab, lambda: os.kill(lab.main_pid("tag-0"), signal.SIGSTOP))
    assert (record.kind, record.code) == ("stale", -2)


def test_a_restart_that_fails_by_a_dependency_is_tried_again(lab: Lab) -> None:
    """The restart is due, and what the unit needs is down: not counted, and tried until it runs."""
    lab.write_unit(
        "broken.service",
        "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f"ExecStart=/bin/sh -c '[ ! -e {lab.directory}/break ]'\n",
    )
    install(lab, "live")
    lab.write_unit(
        "nomarr-worker@tag-0.service.d/99-test.conf",
        "[Unit]\nRequires=broken.service\nAfter=broken.service\n",
    )
    lab.reload()
    lab.start("tag-0")
    with open(f"{lab.directory}/break", "w", encoding="utf-8"):
        pass
    lab.systemctl("stop", "--no-block", "--job-mode=ignore-dependencies", "broken.service")
    lab.wait_until("broken.service", "inactive")
    died = lab.get("tag-0", "InvocationID")
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    record = lab.wait_for(lambda: account_of(lab).find(f"{died}#1"), what="the start job")
    assert record is not None
    assert (record.kind, record.action) == ("dependency", "hold")
    os.unlink(f"{lab.directory}/break")
    wait_for_run(lab, died)


def test_a_stopped_supervisor_holds_its_workers(lab: Lab) -> None:
    """They finish, leave with 75, are held and not counted, and come back with it."""
    program = lab.write_program("leaver", LEAVER)
    lab.install(f'[pool.tag]\ncommand = ["{program}"]\nwatchdog_s = 3600\n')
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")
    lab.start("tag-0")
    lab.systemctl("start", "nomarr-reconcile.service")
    died = lab.get("tag-0", "InvocationID")
    lab.systemctl("stop", "nomarr-supervisor.service")
    lab.wait_until("tag-0", "failed")
    record = lab.wait_for(lambda: account_of(lab).find(died), what="a record")
    assert record is not None
    assert (record.action, record.code) == ("hold", 75)
    lab.systemctl("start", "nomarr-supervisor.service")
    wait_for_run(lab, died)
    assert account_of(lab).restart_count == 0


LEAVER = """\
#!/usr/bin/python3 -I
import os, socket, sys, time

pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
me = os.environ["NOMARR_COMPONENT_ID"]
while True:
    try:
        os.write(pipe, f'HEALTH|{{"component_id":"{me}","status":"healthy"}}\\n'.encode())
    except BlockingIOError:
        pass
    except BrokenPipeError:
        sys.exit(75)
    time.sleep(0.05)
"""
