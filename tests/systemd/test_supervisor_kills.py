"""The supervisor is killed and restarted over and over while fifty workers frame: a subscriber
accounts for every frame, and no worker notices.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from nomarr_systemd.config.check import MAX_WORKERS
from nomarr_systemd.live.client import ask
from nomarr_systemd.supervisor.pipe_store import PARCEL
from nomarr_systemd.systemd.unit_files import find_data
from tests.support.frames_seen import Gap, Subscriber, find_gaps, match_gaps
from tests.support.lab import Lab

WORKERS = 50
# Frames until it is told to send the last one. A frame that finds no room ends it, and the test.
WORKER = """\
#!/usr/bin/python3 -IS
import os, signal, socket

me = os.environ["NOMARR_COMPONENT_ID"]
pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
seq, job = 0, "one of many"
while job != "last":
    seq += 1
    if signal.sigtimedwait([signal.SIGUSR1], 0.1):
        job = "last"
    text = f'"component_id":"{me}","status":"healthy","job":"{job}","seq":{seq}'
    os.write(pipe, b"HEALTH|{" + text.encode() + b"}\\n")
while True:
    signal.pause()
"""
EVERY_S, FOR_S = 0.2, 10.0
AIMED = 12
RESTARTS = 4
SUPERVISOR = "nomarr-supervisor.service"


class Killer:
    """Kills whatever supervisor is there, by its cgroup: systemd need not be asked."""

    def __init__(self, lab: Lab) -> None:
        below = lab.get(SUPERVISOR, "ControlGroup").rpartition("/manager/")[2]
        self._lists = [f"{place}/manager/{below}/cgroup.procs" for place in lab.cgroups]
        self.kills = 0
        self.aimed = 0  # so many more are killed as they hand over what they read first
        self.aimed_at = -1  # the connection that the last of those served

    def kill(self) -> None:
        for path in self._lists:
            try:
                with open(path, encoding="ascii") as file:
                    pids = [int(line) for line in file]
            except OSError:  # it is gone, and the next one not yet there
                continue
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
            return

    def see(self, connection: int, piece: int) -> None:
        if self.aimed and piece == 1 + connection % 20:
            self.kill()
            self.aimed_at = connection
            self.aimed -= 1


@pytest.fixture
def killer(lab: Lab) -> Killer:
    """The supervisor and its workers run."""
    worker = lab.write_program("worker", WORKER)
    lab.install(f'[pool.tag]\nworkers = {WORKERS}\ncommand = ["{worker}"]\nwatchdog_s = 3600\n')
    lab.systemctl("start", "nomarr-controller.socket", SUPERVISOR)
    lab.start(*names())
    return Killer(lab)


def names() -> list[str]:
    return [f"tag-{number}" for number in range(WORKERS)]


def runs_of(lab: Lab) -> str:
    units = [f"nomarr-worker@{name}.service" for name in names()]
    return lab.systemctl("show", "--property=Id,MainPID,InvocationID,ActiveState", *units)


def test_every_frame_is_accounted_for(lab: Lab, killer: Killer) -> None:
    runs = runs_of(lab)
    subscriber = Subscriber(lab.paths.live, killer.see)
    subscriber.wait_for_data(0)

    rhythm = threading.Event()  # nothing is waited for: this is how often it is killed
    begun = time.monotonic()
    for number in range(1, round(FOR_S / EVERY_S) + 1):
        rhythm.wait(begun + number * EVERY_S - time.monotonic())
        killer.kill()
    by_clock = killer.kills

    # Most of those were killed as they started. These are as they read what had gathered.
    killer.aimed = AIMED
    lab.wait_for(lambda: not killer.aimed, what="all of those are killed")
    subscriber.wait_for_data(killer.aimed_at + 1)
    killed = set(range(subscriber.connection))

    for _ in range(RESTARTS):
        served = subscriber.connection
        lab.systemctl("restart", SUPERVISOR)
        subscriber.wait_for_data(served + 1)

    for pid in lab.main_pids(*names()):
        os.kill(pid, signal.SIGUSR1)
    subscriber.wait_for(rb"\"job\":\"last\"", WORKERS)
    answer = ask(lab.paths.live, {"op": "snapshot"}, timeout_s=20)
    subscriber.close()

    seen = subscriber.frames()
    assert len(seen) == WORKERS
    gaps = [gap for component, frames in seen.items() for gap in find_gaps(component, frames)]
    tell(by_clock, killed, gaps, sum(len(frames) for frames in seen.values()))
    assert match_gaps(gaps, killed) == [], "more was lost than one read for each kill"

    assert runs_of(lab) == runs, "a worker ended"
    assert int(lab.get(SUPERVISOR, "NFileDescriptorStore")) == 1
    assert os.listdir(f"{lab.paths.state}/public") == []
    for worker in answer["workers"]:
        assert (worker["status"], worker["drops"], worker["last_crash"]) == ("healthy", {}, None)


def test_systemds_store_has_room_for_every_pipe_by_itself_and_for_parcels() -> None:
    unit = Path(find_data("units"), SUPERVISOR).read_text()
    (room,) = re.findall("^FileDescriptorStoreMax=([0-9]+)$", unit, re.MULTILINE)
    assert int(room) > MAX_WORKERS + MAX_WORKERS / PARCEL


def tell(by_clock: int, killed: set[int], gaps: list[Gap], seen: int) -> None:
    missing = sum(gap.last - gap.first + 1 for gap in gaps)
    print(
        f"{by_clock} kills by the clock and {AIMED} aimed met {len(killed)} supervisors that"
        f" served, then {RESTARTS} restarts; {seen} frames were seen, {missing} lost in"
        f" {len(gaps)} interrupted reads"
    )
