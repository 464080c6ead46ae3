"""The system's own scope: users, rights, what ``systemctl`` and ``journalctl`` show, memory."""

from __future__ import annotations

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine, unit_of

CONFIG = f"""\
[policy]
backoff_base_s = 0.2
backoff_jitter = 0

[health]
frame_interval_s = 0.5

[pool.tag]
workers = 2
entrypoint = "tagger:Tagger"

[pool.tag.unit]
Environment = ["PYTHONPATH={WORKERS}"]

[worker.tag-1.policy]
backoff_base_s = 30

[pool.scan]
command = ["{WORKERS}/shell-worker.sh", "1"]

[pool.glut]
command = ["{WORKERS}/steady", "0"]

[pool.glut.unit]
MemoryMax = "64M"
MemorySwapMax = "0"
"""
PYTHON, SHELL = "tag-0", "scan-0"
PATIENT = "tag-1"


@pytest.fixture(autouse=True)
def running(machine: Machine) -> None:
    machine.apply(CONFIG)
    machine.wait_until_running(PYTHON, SHELL)


def user_of(machine: Machine, name: str) -> str:
    pid = machine.get(name, "MainPID")
    return machine.run("stat", "--format=%U", f"/proc/{pid}").stdout.strip()


def test_workers_and_supervisor_run_as_their_user(machine: Machine) -> None:
    for name in (PYTHON, SHELL):
        assert user_of(machine, name) == "nomarr"
    assert user_of(machine, "nomarr-supervisor.service") == "nomarr-supervisor"
    for name in (PYTHON, SHELL):
        machine.wait_for(
            lambda name=name: machine.status(name)["health"] == "healthy",  # type: ignore[misc]
            f"{name} is healthy",
        )
        assert machine.status(name)["active"] == "active"
    # The line that a worker says about itself.
    assert "Status: " in machine.systemctl("status", unit_of(PYTHON))
    assert 'Status: "working"' in machine.systemctl("status", unit_of(SHELL))
    assert machine.systemctl("is-system-running").strip() == "running"


def test_a_crash_is_explained_where_people_look(machine: Machine) -> None:
    before = len(machine.account(PYTHON).records)
    died = machine.kill(PYTHON)
    machine.wait_until_running(PYTHON, after=died)
    record = machine.account(PYTHON).find(died)
    assert record is not None
    assert (record.action, record.kind, record.code) == ("restart", "signal", -9)
    assert len(machine.account(PYTHON).records) == before + 1
    entry = machine.journal("--catalog", f"NOMARR_INVOCATION_ID={died}")
    assert f"Subject: Worker {PYTHON} failed and will be restarted" in entry
    assert "It is started again in 200 ms." in entry
    assert f"Why: {record.text}\n" in entry
    assert f"systemctl stop nomarr-worker@{PYTHON}\n" in entry
    assert f"{PYTHON}: killed by SIGKILL after" in machine.journal("--unit", unit_of(PYTHON))


def test_the_status_of_a_worker_that_waits_shows_why(machine: Machine) -> None:
    """Of one that runs, ``systemctl status`` shows only what came since its start."""
    machine.wait_until_running(PATIENT)
    died = machine.kill(PATIENT)
    machine.wait_for(lambda: machine.account(PATIENT).find(died), "the failure is on record")
    shown = machine.systemctl("status", "--full", unit_of(PATIENT), check=False)
    assert f"{PATIENT}: killed by SIGKILL after" in shown
    assert "Decided: restart 1/5 within 5 min, 1/20 in all, after 30 s." in shown
    machine.wait_for(
        lambda: machine.account(PATIENT).records[-1].effect == "scheduled", "it is scheduled"
    )
    assert machine.status(PATIENT)["next_restart_in_s"] > 0
    machine.run("nomarrctl", "reset", "--start", PATIENT)
    machine.wait_until_running(PATIENT, after=died)
    assert machine.account(PATIENT).restart_count == 0


def test_the_ledger_is_roots_and_the_published_accounts_are_for_the_group(
    machine: Machine,
) -> None:
    died = machine.kill(SHELL)
    machine.wait_until_running(SHELL, after=died)
    stat = machine.run(
        *("stat", "--format=%A %U:%G", f"{STATE}/ledger.db", f"{STATE}/public/{SHELL}.json")
    )
    ledger, published = stat.stdout.splitlines()
    assert ledger.startswith("-rw------- root:")  # its group has no right in it
    assert published == "-rw-r----- root:nomarr-view"

    def reads(path: str, group: str) -> bool:
        command = ("setpriv", "--reuid=nobody", f"--regid={group}", "--clear-groups", "cat", path)
        return machine.run(*command, check=False).returncode == 0

    assert reads(f"{STATE}/public/{SHELL}.json", "nomarr-view")
    assert not reads(f"{STATE}/ledger.db", "nomarr-view")
    assert not reads(f"{STATE}/public/{SHELL}.json", "nomarr")


def test_out_of_memory_has_a_class_of_its_own(machine: Machine) -> None:
    controllers = machine.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout.split()
    if "memory" in controllers:
        machine.apply(CONFIG.replace(f"{WORKERS}/steady", f"{WORKERS}/glutton"))
    else:
        # cgroup v1 has the memory controller here, and systemd hears nothing of the kernel's OOM
        # killer by it. What systemd-oomd does is left: a mark on the cgroup, and the kill.
        machine.wait_until_running("glut-0")
        cgroup = machine.get("glut-0", "ControlGroup")
        mark = "import os, sys; os.setxattr(sys.argv[1], 'user.oomd_ooms', b'1')"
        machine.run("/usr/bin/python3", "-c", mark, f"/sys/fs/cgroup{cgroup}")
        machine.systemctl("kill", "--signal=KILL", unit_of("glut-0"))
    machine.wait_for(lambda: machine.account("glut-0").records, "the failure is on record")
    record = machine.account("glut-0").records[0]
    assert (record.action, record.kind, record.code) == ("restart", "oom", -9)
    assert "glut-0: out of memory; killed by SIGKILL" in machine.journal("-u", unit_of("glut-0"))
    machine.apply(CONFIG)


def test_root_alone_tells_the_controller_of_failures(machine: Machine) -> None:
    writes = ("echo 0 1<>/run/nomarr/failures", ": >/run/nomarr/lock", ": >/run/nomarr/new")
    for write in writes:
        done = machine.run(
            *("setpriv", "--reuid=nomarr", "--regid=nomarr", "--init-groups", "sh", "-c", write),
            check=False,
        )
        assert done.returncode != 0
        assert "Permission denied" in done.stderr
