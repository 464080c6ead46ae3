"""What a worker, the supervisor's user, a member of nomarr-view and anybody else cannot do to the
supervisor: signal it, take its socket, fill its directory, write another pool's pipe, use up the
places on its socket; and what a supervisor that lies cannot do to the workers.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine, unit_of

LIVE = "/run/nomarr/live.sock"
PIPES = "/run/nomarr-supervisor/health"
SUPERVISOR = "nomarr-supervisor.service"
CONFIG = f"""\
[policy]
backoff_base_s = 0.1
backoff_jitter = 0

[health]
frame_interval_s = 0.2
staleness_interval_s = 3
max_misses = 2

[pool.tag]
command = ["{WORKERS}/steady", "75"]
crash_max_retries = 50

[pool.own]
user = "music"
entrypoint = "tagger:Tagger"

[pool.own.unit]
Environment = ["PYTHONPATH={WORKERS}"]
"""
# What systemd hands over is the live socket; whatever it is asked, it says the worst.
LIAR = """\
#!/usr/bin/python3
import json, socket
listening = socket.socket(fileno=3)
while True:
    peer = listening.accept()[0]
    asked = json.loads(peer.makefile("rb").readline())
    word = {"settled": True, "jobs": [], "quarantined": [], "refund": [],
            "fail_pool": "because I say so"}
    outcomes = {death["invocation"]: word for death in asked.get("deaths", [])}
    peer.sendall(json.dumps({"ok": True, "outcomes": outcomes, "labels": {}}).encode() + b"\\n")
    peer.close()
"""
ASK = """
import json, socket, sys
live = socket.socket(socket.AF_UNIX)
live.connect("/run/nomarr/live.sock")
lines = live.makefile("rwb")
for op in sys.argv[1:]:
    run = {"component": "tag-0", "invocation": "a" * 32}
    lines.write(json.dumps({"op": op, **run, "runs": [run], "deaths": [run]}).encode() + b"\\n")
    lines.flush()
    print(op, json.loads(lines.readline())["ok"])
"""
CROWD = """
import os, socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(300)]
for live in held:
    try:
        live.connect("/run/nomarr/live.sock")
    except OSError:
        pass
os.write(1, b"held\\n")
sys.stdin.read()
"""
WRITE = """
import sys
sys.path.insert(0, "/usr/lib/nomarr-systemd")
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.store.open import open_work_store
store = open_work_store(StoreSettings("sqlite:///var/lib/nomarr"))
store.insert("jobs", {"_key": sys.argv[1], "pool": "own", "status": "done"})
"""


@pytest.fixture(scope="module", autouse=True)
def running(machine: Machine) -> None:
    for user in ("music", "anna", "stranger"):
        machine.run("useradd", "--system", user)
    machine.run("usermod", "--append", "--groups=nomarr-view", "anna")
    machine.apply(CONFIG)
    machine.wait_until_running("tag-0", "own-0")
    machine.wait_until_healthy("tag-0", "own-0")


def run_as(
    machine: Machine, user: str, *command: str, groups: str = ""
) -> subprocess.CompletedProcess[str]:
    extra = f"--groups={groups}" if groups else "--init-groups"
    return machine.run(
        *("setpriv", f"--reuid={user}", f"--regid={user}", extra, *command), check=False
    )


def shell_as(machine: Machine, user: str, script: str) -> int:
    return run_as(machine, user, "sh", "-c", script).returncode


def test_each_runs_as_its_user(machine: Machine) -> None:
    users = {"tag-0": "nomarr", "own-0": "music", SUPERVISOR: "nomarr-supervisor"}
    for name, user in users.items():
        pid = machine.get(name, "MainPID")
        assert machine.run("stat", "--format=%U", f"/proc/{pid}").stdout.strip() == user
        powers = machine.run("grep", "CapEff", f"/proc/{pid}/status").stdout.split()[1]
        # CAP_KILL is the sixth capability.
        assert int(powers, 16) == (1 << 5 if name == SUPERVISOR else 0)


@pytest.mark.parametrize("user", ["nomarr", "music", "anna", "stranger"])
def test_nobody_else_can_touch_it(machine: Machine, user: str) -> None:
    pid = machine.get(SUPERVISOR, "MainPID")
    assert shell_as(machine, user, f"kill -9 {pid}") != 0
    assert shell_as(machine, user, f"rm -f {LIVE}") != 0
    assert shell_as(machine, user, f"mv {LIVE} /tmp/away") != 0
    for place in ("/run/nomarr", "/run/nomarr/pending", "/run/nomarr-supervisor", PIPES):
        assert shell_as(machine, user, f"echo > {place}/big") != 0
    assert shell_as(machine, user, "cat /run/nomarr-supervisor/memory") != 0
    found = run_as(machine, user, *("find", "/run/nomarr", "/run/nomarr-supervisor", "-writable"))
    assert set(found.stdout.split()) <= {LIVE}
    for verb in (("stop", SUPERVISOR), ("kill", SUPERVISOR), ("restart", unit_of("tag-0"))):
        assert run_as(machine, user, "systemctl", "--no-ask-password", *verb).returncode != 0
    assert machine.get(SUPERVISOR, "MainPID") == pid


@pytest.mark.parametrize(
    ("user", "writable"),
    [("nomarr", {"tag-0"}), ("music", {"own-0"}), ("anna", set()), ("stranger", set())],
)
def test_a_pipe_is_open_to_the_user_of_its_pool(
    machine: Machine, user: str, writable: set[str]
) -> None:
    for name in ("tag-0", "own-0"):
        done = shell_as(machine, user, f": > {PIPES}/{name}")
        assert (done == 0) == (name in writable)
        assert shell_as(machine, user, f"timeout 5 cat {PIPES}/{name}") != 0


def test_members_read_and_change_nothing(machine: Machine) -> None:
    ask = ("/usr/bin/python3", "-c", ASK)
    reads = ("snapshot", "blackbox", "label", "labels")
    changes = ("crashed", "set_failed", "reset")
    done = run_as(machine, "anna", *ask, *reads, *changes)
    answers = dict(line.split() for line in done.stdout.splitlines())
    assert answers == dict.fromkeys(reads, "True") | dict.fromkeys(changes, "False")
    for user in ("nomarr", "music", "stranger"):
        assert "PermissionError" in run_as(machine, user, *ask, "snapshot").stderr
    shown = run_as(machine, "anna", "nomarrctl", "status", "--json")
    assert [row["health"] for row in json.loads(shown.stdout)] == ["healthy", "healthy"]
    for place in (f"{STATE}/hold", f"{STATE}/public", f"{STATE}/work", STATE, "/etc/nomarr"):
        assert shell_as(machine, "anna", f"echo > {place}/new") != 0


def test_idle_connections_cut_nobody_off(machine: Machine) -> None:
    command = machine.command(
        *("setpriv", "--reuid=anna", "--regid=anna", "--init-groups"),
        *("/usr/bin/python3", "-c", CROWD),
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout
        assert crowd.stdout.readline() == b"held\n"
        assert machine.status("tag-0")["health"] == "healthy"
        # A label that only the supervisor knows reaches the record all the same.
        died = stop_by_signal(machine, "own-0")
        record = machine.wait_for(lambda: machine.account("own-0").find(died), "it is on record")
        assert record is not None
        assert record.kind == "stale"
        crowd.communicate(timeout=60)


def stop_by_signal(machine: Machine, name: str) -> str:
    """Hang a worker; the supervisor, another user's process, ends it."""
    died = machine.get(name, "InvocationID")
    machine.systemctl("kill", "--signal=STOP", unit_of(name))
    machine.wait_until_running(name, after=died)
    return died


def test_a_lost_socket_is_replaced_at_a_restart(machine: Machine) -> None:
    runs = [machine.get(name, "InvocationID") for name in ("tag-0", "own-0")]
    machine.run("rm", LIVE)
    machine.run("ln", "-s", "/run/systemd/private", LIVE)
    machine.systemctl("restart", SUPERVISOR)
    machine.wait_until_healthy("tag-0")
    facts = machine.run("stat", "--format=%F %A %U:%G", LIVE).stdout.strip()
    assert facts == "socket srw-rw---- root:nomarr-view"
    assert [machine.get(name, "InvocationID") for name in ("tag-0", "own-0")] == runs


def test_the_jobs_store_is_shared_by_those_who_need_it(machine: Machine) -> None:
    program = ("/usr/bin/python3", "-c", WRITE)
    for user, groups in (("music", "nomarr"), ("nomarr-supervisor", "nomarr"), ("nomarr", "")):
        done = run_as(machine, user, *program, f"own:{user}:1", groups=groups)
        assert done.returncode == 0, done.stderr
    for user in ("music", "anna", "stranger"):  # without the unit's group
        assert run_as(machine, user, *program, f"own:{user}:2").returncode != 0
    modes = machine.run("sh", "-c", f"stat --format=%a:%G {STATE}/work/work.db*").stdout.split()
    assert set(modes) == {"660:nomarr"}


def test_the_supervisors_absence_is_an_excuse_once(machine: Machine) -> None:
    decided = []
    for _ in range(2):
        run = machine.get("tag-0", "InvocationID")
        machine.systemctl("kill", "--signal=KILL", SUPERVISOR)
        machine.wait_for(lambda: machine.get(SUPERVISOR, "ActiveState") == "active", "it is back")
        machine.wait_until_healthy("tag-0")
        machine.kill("tag-0", "TERM")  # it leaves with 75
        machine.wait_until_running("tag-0", after=run)
        record = machine.account("tag-0").find(run)
        assert record is not None
        decided.append((record.action, record.code))
    assert decided == [("hold", 75), ("restart", 75)]


def test_a_supervisor_that_lies_fails_no_pool(machine: Machine) -> None:
    machine.path("/opt/liar").write_text(LIAR)
    machine.path("/opt/liar").chmod(0o755)
    place = "/run/systemd/system/nomarr-supervisor.service.d"
    machine.run("mkdir", "-p", place)
    lines = "[Service]\nType=simple\nWatchdogSec=0\nExecStart=\nExecStart=/opt/liar\n"
    machine.path(f"{place}/99-liar.conf").write_text(lines)
    try:
        machine.systemctl("daemon-reload")
        machine.systemctl("restart", SUPERVISOR)
        died = machine.kill("tag-0")
        machine.wait_until_running("tag-0", after=died)
        machine.wait_until_settled("tag-0")
        assert machine.get("tag-0", "LoadState") == "loaded"
        assert machine.account("tag-0").failure_reason is None
    finally:
        machine.run("rm", "-r", place)
        machine.systemctl("daemon-reload")
        machine.systemctl("restart", SUPERVISOR)
    machine.wait_until_healthy("tag-0")
