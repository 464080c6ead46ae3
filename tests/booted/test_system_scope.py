"""The system's own scope: users, rights, what ``systemctl`` and ``journalctl`` show, memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nomarr_systemd.controller.main import RESTING
from tests.support.installed import WORKERS, write
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
    machine.wait_until_healthy(PYTHON, SHELL)
    for name in (PYTHON, SHELL):
        assert machine.status(name)["active"] == "active"
    # The line that a worker says about itself; after a crash, with its restarts.
    assert "Status: " in machine.systemctl("status", unit_of(PYTHON))
    assert 'Status: "working"' in machine.systemctl("status", unit_of(SHELL))
    assert machine.systemctl("is-system-running").strip() == "running"


def test_portions_of_workers_are_started(machine: Machine) -> None:
    """From its sandbox, which a user's own systemd does not have."""
    place = machine.path("/run/systemd/system/nomarr-portions.service.d")
    place.mkdir(parents=True)
    (place / "some.conf").write_text('[Service]\nEnvironment="NOMARR_PORTIONS=a-0 b-0"\n')
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "nomarr-portions.service")
    assert machine.get("nomarr-portions.service", "Result") == "success"
    for unit in ("nomarr-portion@a-0.target", "nomarr-portion@b-0.target"):
        machine.wait_for(lambda: machine.get(unit, "ActiveState") == "active", unit)  # noqa: B023
        machine.systemctl("stop", unit)
    shutil.rmtree(place)
    machine.systemctl("daemon-reload")


def test_a_crash_is_explained_where_people_look(machine: Machine) -> None:
    before = len(machine.account(PYTHON).records)
    died = machine.kill(PYTHON)
    machine.wait_until_running(PYTHON, after=died)
    record = machine.account(PYTHON).find(died)
    assert record is not None
    machine.wait_for(
        lambda: (
            "1 restart, last crash SIGKILL at 20" in machine.systemctl("status", unit_of(PYTHON))
        ),
        "its status line tells of the crash",
    )
    died = machine.kill(SHELL)
    machine.wait_until_running(SHELL, after=died)
    machine.wait_for(
        lambda: (
            'Status: "working; 1 restart, last crash SIGKILL at 20'
            in machine.systemctl("status", unit_of(SHELL))
        ),
        "that of a shell worker, too",
    )
    died = record.invocation
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


# It has its job in hand until it is stopped.
WAITING = """\
import time

from nomarr_systemd.worker import Worker


class Waiting(Worker):
    def process(self, job):
        time.sleep(1000)
"""
WAIT = f"""
[pool.wait]
entrypoint = "waiting:Waiting"
stop_timeout_s = 1

[pool.wait.unit]
Environment = ["PYTHONPATH={WORKERS}"]
"""
READ_CLAIMS = f"""\
import sys
sys.path.insert(0, "/usr/lib/nomarr-systemd")
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.store.sqlite.store import SqliteStore
print(*(each["boot"] for each in SqliteStore("{STATE}", "work").find(CLAIMS)))
"""


def test_workers_and_the_supervisor_name_the_same_boot(machine: Machine) -> None:
    """Else a job that killed its worker is taken for one that a reboot interrupted. The /proc of a
    worker, which is its own, has the id of the real machine here."""
    write(machine.path(f"{WORKERS}/waiting.py"), WAITING)
    machine.apply(CONFIG + WAIT)
    machine.run("nomarrctl", "jobs", "add", "--pool", "wait", "/srv/long.flac")
    worker = ("setpriv", "--reuid=nomarr", "--regid=nomarr", "--init-groups")
    read = (*worker, "/usr/bin/python3", "-c", READ_CLAIMS)
    claimed = machine.wait_for(lambda: machine.run(*read).stdout.strip(), "it has its job")
    boot = machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip().replace("-", "")
    assert claimed == boot
    for unit in ("nomarr-supervisor.service", "nomarr-worker@wait-0.service"):
        assert f"NOMARR_BOOT_ID={boot}" in machine.get(unit, "Environment").split()
    died = machine.kill("wait-0")
    machine.wait_for(lambda: machine.account("wait-0").find(died), "the failure is on record")
    record = machine.account("wait-0").find(died)
    assert record is not None
    assert record.boot_id == boot


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
    machine.wait_for(  # the controller tells it after it has booked it
        lambda: (
            "glut-0: out of memory; killed by SIGKILL" in machine.journal("-u", unit_of("glut-0"))
        ),
        "the journal has it",
    )
    machine.apply(CONFIG)


def test_root_alone_tells_the_controller_of_failures(machine: Machine) -> None:
    writes = ("echo 0 1<>/run/nomarr/failures", ": >/run/nomarr/lock", ": >/run/nomarr/new")
    for each in writes:
        done = machine.run(
            *("setpriv", "--reuid=nomarr", "--regid=nomarr", "--init-groups", "sh", "-c", each),
            check=False,
        )
        assert done.returncode != 0
        assert "Permission denied" in done.stderr


UNITS = "/usr/lib/systemd/system"
STRANGER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--")
MEMBER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=nomarr-view", "--")


def test_who_lacks_a_right_is_told_so(machine: Machine) -> None:
    """With one exit status for all of it; and members of the group read jobs."""
    machine.run("nomarrctl", "jobs", "add", "--pool", "tag", "/srv/a.flac")
    for words in (
        "status", f"why {PYTHON}", "history", f"history {PYTHON}", "events", "jobs list --pool tag",
        "jobs add --pool tag /srv/b", f"pause {PYTHON}", f"reset {PYTHON}", "reconcile", "apply",
        "doctor",
    ):  # fmt: skip
        done = machine.run(*STRANGER, "nomarrctl", *words.split(), check=False)
        assert done.returncode == 77, f"{words}: {done.stdout}{done.stderr}"
    for words in ("status", f"why {PYTHON}", "history", "events", "jobs list", "policy show"):
        done = machine.run(*MEMBER, "nomarrctl", *words.split(), check=False)
        assert done.returncode in (0, 3), f"{words}: {done.stdout}{done.stderr}"
    found = machine.run(*MEMBER, "nomarrctl", "jobs", "list", "--pool", "tag", "--json").stdout
    assert [each["path"] for each in json.loads(found)["jobs"]] == ["/srv/a.flac"]
    shown = machine.run(*MEMBER, "nomarrctl", "jobs", "show", "--pool", "tag", "/srv/a.flac").stdout
    assert "/srv/a.flac" in shown
    done = machine.run(*MEMBER, "nomarrctl", "jobs", "show", "/srv/none", check=False)
    assert "there is no job '/srv/none'" in done.stderr
    for words in ("jobs add --pool tag /srv/b", f"pause {PYTHON}", "apply"):
        done = machine.run(*MEMBER, "nomarrctl", *words.split(), check=False)
        assert done.returncode == 77, f"{words}: {done.stdout}{done.stderr}"


def examine(machine: Machine, level: str = "bad") -> dict[str, str]:
    """What doctor finds, with its cures."""
    done = machine.run("nomarrctl", "doctor", "--json", check=False)
    findings = json.loads(done.stdout)["findings"]
    ignored = ("a reboot forgets",)  # this machine's disk is in memory
    return {
        each["text"]: each["mend"]
        for each in findings
        if each["level"] == level and not any(words in each["text"] for words in ignored)
    }


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("controller.socket is masked", "systemctl mask --now nomarr-controller.socket"),
        ("wakeup.service is masked", "systemctl mask nomarr-wakeup.service"),
        ("reconcile.timer is masked", "systemctl mask --now nomarr-reconcile.timer"),
        ("workers.target is masked", "systemctl mask nomarr-workers.target"),
        (f"{STATE}/hold belongs to uid", f"chown nomarr {STATE}/hold"),
        (f"{STATE} can be changed by others", f"chmod 777 {STATE}"),
        ("cannot be used by all who need it", f"chown root:root {STATE}/work/work.db"),
        ("there is no group nomarr-view", "groupdel nomarr-view"),
        ("there is no group nomarr", "userdel --force nomarr"),
        ("unit file is replaced by", f"cp {UNITS}/nomarr-worker@.service /etc/systemd/system/"),
        ("is gone, and the ledger with it", f"rm -r {STATE}"),
        ("unit files of the package are gone",
         f"rm {UNITS}/nomarr-restart@.service"),
        ("cannot read, or others can: tag-0.json", f"chmod 600 {STATE}/public/tag-0.json"),
        ("cannot read, or others can: tag-0.json", f"chgrp root {STATE}/public/tag-0.json"),
        (f"cannot read {STATE}/public, or others can", f"chmod 700 {STATE}/public"),
        (f"cannot read {STATE}/public, or others can", f"chown nomarr {STATE}/public"),
        ("not executable: nomarr-controller", "rm /usr/lib/nomarr-systemd/nomarr-controller"),
    ],
)  # fmt: skip
def test_the_cure_of_doctor_works(machine: Machine, deb: Path, text: str, command: str) -> None:
    """What only the system's scope has; the rest is in tests/systemd/test_operator_cures.py."""
    if not machine.account(PYTHON).records:
        machine.kill(PYTHON)  # so that something is published
    machine.wait_for(lambda: machine.account(PYTHON).records, "a record")
    machine.wait_until_running(PYTHON, SHELL)
    machine.wait_for(lambda: not examine(machine), "doctor is content")
    # A controller that is still at work would publish again, which mends these by itself.
    rests = {"nomarr-controller.service": ("StatusText", RESTING)}
    rests["nomarr-reconcile-soon.timer"] = ("ActiveState", "inactive")
    for unit, (name, value) in rests.items() if "/public" in command else ():
        machine.wait_for(
            lambda unit=unit, name=name, value=value: machine.get(unit, name) == value,  # type: ignore[misc]
            f"{unit} has nothing to do",
            timeout_s=180,
        )
    machine.run("sh", "-c", f"{command} && systemctl daemon-reload")
    found = examine(machine)
    cures = [cure for finding, cure in found.items() if text in finding]
    assert cures, f"not found: {text}; only {found}"
    cure = cures[0]
    if "--reinstall" in cure:
        shutil.copy(deb, machine.path("/root/package.deb"))
        cure = "dpkg --install /root/package.deb"
    machine.run("sh", "-c", cure, timeout_s=120)
    found = {}

    def is_content() -> bool:
        found.update(examine(machine))
        return not examine(machine)

    machine.wait_for(is_content, f"{cure} mends it")
    print(f"meanwhile doctor found {found}")
    machine.wait_until_running(PYTHON, SHELL)
