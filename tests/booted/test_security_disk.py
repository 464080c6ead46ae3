"""A worker fills every place that it can write, on a disk that keeps nothing for root and has the
whole machine on it: root books failures and decides as before."""

from __future__ import annotations

import json

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine

EVIL = "/opt/evil"
MIB = 1 << 20
DEATHS = 30
CONFIG = f"""\
[policy]
backoff_base_s = 0.1
backoff_max_s = 0.2
backoff_jitter = 0
max_restarts = {DEATHS}
max_lifetime_restarts = 0

[health]
frame_interval_s = 0.2

[pool.tag]
workers = 2
command = ["{WORKERS}/steady", "0"]
"""
FILLERS = f"""
[pool.fill]
command = ["/usr/bin/python3", "{EVIL}/fill.py"]
[pool.fill.health]
startup_timeout_s = 86_400  # it writes no frames
"""
# Takes what is free on the ledger's disk, in every directory that it can write, as soon as it is.
FILL = """\
import itertools, os, select, socket
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\\0"))
notify.send(b"READY=1")
disk = os.stat("/var/lib").st_dev

def is_open(place):
    return os.access(place, os.W_OK) and os.stat(place).st_dev == disk

roots = ["/var", "/var/lib/nomarr/work", "/etc", "/opt", "/srv", "/home", "/run"]
places = [place for root in roots for place, _, _ in os.walk(root) if is_open(place)]
files = [open(f"{place}/.fill", "ab", buffering=0) for place in places]
print("fills", *places, flush=True)
zeros = memoryview(bytes(1 << 20))
left = -1
for turn in itertools.count():
    for file in files if os.statvfs("/var/lib").f_bfree != left else ():
        size = len(zeros)
        while size:
            try:
                file.write(zeros[:size])
            except OSError:
                size //= 2
    left = os.statvfs("/var/lib").f_bfree
    if not turn % 1000:
        notify.send(b"WATCHDOG=1")
    select.select([], [], [], 0.001)
"""
READ = """\
import json, sys
sys.path.insert(0, "/usr/lib/nomarr-systemd")
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.sqlite.store import SqliteStore
store = SqliteStore("/var/lib/nomarr", "policy")
account = Ledger(store).account(sys.argv[1])
store.close()
print(json.dumps([[each.invocation, each.action] for each in account.records]))
"""


@pytest.fixture(autouse=True)
def full(machine: Machine) -> None:
    machine.run("mkdir", "-p", EVIL)
    machine.path(f"{EVIL}/fill.py").write_text(FILL)
    machine.apply(CONFIG)
    machine.wait_until_running("tag-0", "tag-1")
    machine.systemctl("start", "nomarr-reconcile.service")
    machine.leave_free(48 * MIB)
    machine.apply(CONFIG + FILLERS)
    wait_until_full(machine)


def wait_until_full(machine: Machine) -> None:
    machine.wait_for(lambda: machine.free_bytes() < 65536, "the disk is full")


def read_ledger(machine: Machine, component: str) -> dict[str, str]:
    """The decisions that the ledger itself has: copies for people need room."""
    said = machine.run("/usr/bin/python3", "-c", READ, component).stdout
    return dict(json.loads(said))


def is_told_full(machine: Machine) -> bool:
    """Whether status says so: journald may have made room a moment ago."""
    return "The ledger's disk is full" in machine.run("nomarrctl", "status", check=False).stdout


def die(machine: Machine, name: str) -> str:
    died = machine.kill(name)
    machine.wait_until_running(name, after=died)
    return died


def test_a_worker_that_fills_all_it_can_stops_no_decision(machine: Machine) -> None:
    wait_until_full(machine)
    places = machine.journal("--unit=nomarr-worker@fill-0", "--grep=^fills", "--output=cat")
    assert "/var/lib/nomarr/work" in places
    died = [die(machine, "tag-0") for _ in range(DEATHS)]
    assert read_ledger(machine, "worker:tag:0") == dict.fromkeys(died, "restart")
    # The one too many, by another controller.
    machine.systemctl("stop", "nomarr-controller.service")
    last = machine.kill("tag-0")
    machine.wait_for(lambda: machine.get("tag-0", "LoadState") == "masked", "tag-0 is masked")
    assert read_ledger(machine, "worker:tag:0") == dict.fromkeys(died, "restart") | {last: "fail"}
    assert not any(machine.path(f"{STATE}/spool").iterdir())
    machine.wait_for(
        lambda: not list(machine.path("/run/nomarr/pending").iterdir()), "no report is left"
    )
    machine.wait_for(lambda: is_told_full(machine), "status says that the disk is full")

    machine.reboot()
    wait_until_full(machine)
    machine.wait_until_running("tag-1")
    other = die(machine, "tag-1")
    machine.wait_for(lambda: other in read_ledger(machine, "worker:tag:1"), "it is booked")
    assert machine.get("tag-0", "LoadState") == "masked"

    machine.systemctl("stop", "nomarr-worker@fill-0.service")
    machine.run("sh", "-c", "rm -f $(find / -xdev -name .fill)")
    for _ in range(2):  # one may be at work since before there was room
        machine.systemctl("start", "nomarr-reconcile.service")
    assert len(machine.account("tag-0").records) == DEATHS + 1
    assert machine.account("tag-1").find(other)
    sizes = {
        suffix: machine.path(f"{STATE}/ledger.db{suffix}").stat().st_size
        for suffix in ("", "-wal", "-shm")
    }
    assert sizes[""] < 10 * MIB
    assert sizes["-wal"] < 10 * MIB
    assert sizes["-shm"] < MIB
