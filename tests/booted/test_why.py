"""Post-mortems in the system's own scope: a real journald with its rate limit, memory, and those
who may not read everything.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.installed import WORKERS, write
from tests.support.machine import Machine, unit_of

RAISER = """\
#!/usr/bin/python3 -I
def read_tags():
    raise ValueError("no tags")

read_tags()
"""
# The report of what was suppressed comes with the first line after the interval.
CHATTER = """\
#!/bin/sh
systemd-notify --ready
for n in $(seq 1000); do echo "line $n"; done
sleep 2.5
echo the last word
exit 3
"""
CONFIG = f"""\
[policy]
backoff_base_s = 60
backoff_jitter = 0

[pool.raise]
command = ["{WORKERS}/raiser"]

[pool.chat]
command = ["{WORKERS}/chatter"]

[pool.chat.unit]
LogRateLimitIntervalSec = "2s"
LogRateLimitBurst = 20

[pool.glut]
command = ["{WORKERS}/steady", "0"]

[pool.glut.unit]
MemoryMax = "64M"
MemorySwapMax = "0"

[pool.who]
command = ["{WORKERS}/steady", "0"]
"""


@pytest.fixture(scope="module", autouse=True)
def graveyard(machine: Machine) -> None:
    for name, text in (("raiser", RAISER), ("chatter", CHATTER)):
        write(machine.path(f"{WORKERS}/{name}"), text, 0o755)
    override = f"/etc/systemd/system/{unit_of('who-0')}.d/override.conf"
    write(machine.path(override), "[Service]\nUser=nosuchuser\n")
    machine.apply(CONFIG)
    for name in ("raise-0", "chat-0", "who-0"):
        machine.wait_for(lambda: machine.account(name).records, f"{name} has died")  # noqa: B023


def ask(machine: Machine, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(machine.run("nomarrctl", "why", name, "--json").stdout)
    return report


def read_as(machine: Machine, *rights: str) -> subprocess.CompletedProcess[str]:
    """What somebody else than root is told."""
    return machine.run("setpriv", *rights, "nomarrctl", "why", "raise-0", check=False)


def test_an_exception(machine: Machine) -> None:
    """journald knows the unit and the run of every line, however soon it was over."""
    told = "NOMARR_COMPONENT_ID=worker:raise:0"
    machine.wait_for(lambda: machine.journal("--quiet", told), "the decision is in the journal")
    report = ask(machine, "raise-0")
    assert report["trace"]["headline"] == "ValueError: no tags"
    assert report["repeats"]["times"] == 1
    sources = {line["source"] for line in report["journal"]}
    assert sources == {"raiser", "systemd", "nomarr-controller"}


def test_dropped_messages_are_named(machine: Machine) -> None:
    report = ask(machine, "chat-0")
    assert any("dropped" in note and "rate limit" in note for note in report["notes"])
    assert any(line["text"] == "the last word" for line in report["journal"])


def test_a_user_that_is_missing(machine: Machine) -> None:
    text = " ".join(machine.run("nomarrctl", "why", "who-0").stdout.split())
    assert "could not be started: exited with status 217 (its user does not exist)" in text
    assert "getent passwd nosuchuser" in text


def test_out_of_memory(machine: Machine) -> None:
    machine.wait_until_running("glut-0")
    controllers = machine.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout.split()
    if "memory" in controllers:
        machine.apply(CONFIG.replace(f'["{WORKERS}/steady", "0"]', f'["{WORKERS}/glutton"]', 1))
    else:
        # As in test_system_scope: the mark that systemd-oomd leaves, and the kill.
        cgroup = machine.get("glut-0", "ControlGroup")
        mark = "import os, sys; os.setxattr(sys.argv[1], 'user.oomd_ooms', b'1')"
        machine.run("/usr/bin/python3", "-c", mark, f"/sys/fs/cgroup{cgroup}")
        machine.systemctl("kill", "--signal=KILL", unit_of("glut-0"))
    machine.wait_for(lambda: machine.account("glut-0").records, "the failure is on record")
    report = ask(machine, "glut-0")
    assert report["death"]["kind"] == "oom"
    text = machine.run("nomarrctl", "why", "glut-0").stdout
    assert "worker:glut:0 died: out of memory; killed by SIGKILL" in text
    assert "the limit is 64.0 MiB" in text
    assert "MemoryMax = (now 64M) in [pool.glut.unit]" in text


def test_the_group_reads_the_ledger_but_not_the_journal(machine: Machine) -> None:
    done = read_as(machine, "--reuid=65534", "--regid=nomarr-view", "--clear-groups")
    assert done.returncode == 0, done.stderr
    assert "worker:raise:0 died: exited with status 1" in done.stdout
    assert "join the group systemd-journal" in " ".join(done.stdout.split())
    assert "restart: restart 1/5" in done.stdout


def test_others_are_told_what_they_lack(machine: Machine) -> None:
    done = read_as(machine, "--reuid=65534", "--regid=65534", "--clear-groups")
    assert done.returncode == 77, done.stderr
    assert "usermod -aG nomarr-view" in " ".join(done.stderr.split())
