"""From a death to the next run, under a real systemd: our way beside ``Restart=always``.

Every worker, ours or native, says on one FIFO when it has said READY=1, which is when systemd calls
it running; what is measured lies between the kill and that line.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from nomarr_systemd.host.layout import make_programs
from tests.bench.timing import report
from tests.support.lab import Lab, copy_package

ROUNDS = 15
DEBIAN_MODULES = "/usr/lib/python3/dist-packages"
IDLE_S = 0.3  # until the controller rests: the bench waits for it
MEMORY = "/dev/shm"
MANY = 200
WORKER = """\
#!/bin/sh
systemd-notify --ready --pid=$$
echo $1 > {fifo}
while :; do sleep 1000; done
"""
CONFIG = """\
[policy]
backoff_base_s = 0
max_restarts = 100
window_s = 0.001
max_lifetime_restarts = 0

[health]
startup_timeout_s = 3600
staleness_interval_s = 3600
frame_interval_s = 3000

[pool.tag]
workers = {many}
command = ["{worker}", "ours"]
watchdog_s = 3600

[pool.tag.unit]
LimitCORE = 0

[pool.hang]
workers = 1
command = ["{worker}", "hang"]
watchdog_s = 1
"""
NATIVE = """\
[Unit]
StartLimitIntervalSec=0
[Service]
Type=notify
NotifyAccess=all
ExecStart={program} native
Restart=always
RestartSec=0
KillMode=mixed
WatchdogSec={watchdog_s}
TimeoutAbortSec=10
LimitCORE=0
"""


class Starts:
    """The FIFO on which workers announce themselves."""

    def __init__(self, path: str) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def wait_for(self, count: int, timeout_s: float = 120.0) -> float:
        """When the last of so many starts was announced."""
        ends = time.monotonic() + timeout_s
        seen = 0
        while seen < count:
            if not select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise SystemExit(f"only {seen} of {count} workers came back")
            seen += os.read(self._fd, 65536).count(b"\n")
        return time.monotonic()


@cache
def _disk() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nomarr-bench-")


@contextlib.contextmanager
def lab_in_memory() -> Iterator[Lab]:
    """A lab whose runtime directory is in memory, as it is everywhere else, and whose state is on
    a disk: hooks make and remove files all the time, and a disk would be measured with them.

    The state is removed at the end of the program: ext4 looks for each new file at all that were
    removed within five minutes, and with thousands of them takes half a millisecond each time."""
    disk = tempfile.mkdtemp(dir=_disk().name)
    with contextlib.ExitStack() as end:
        is_there = os.access(MEMORY, os.W_OK)
        lab = Lab()
        before, tempfile.tempdir = tempfile.tempdir, MEMORY if is_there else tempfile.tempdir
        try:
            end.enter_context(lab)
        finally:
            tempfile.tempdir = before
        if is_there:
            os.rmdir(lab.home)
            os.symlink(disk, lab.home)
        yield lab


@contextlib.contextmanager
def make_lab() -> Iterator[tuple[Lab, Starts]]:
    with lab_in_memory() as lab:
        fifo = f"{lab.directory}/starts"
        starts = Starts(fifo)
        worker = lab.write_program("worker", WORKER.replace("{fifo}", fifo))
        for name, watchdog_s in (("native", 3600), ("nhang", 1)):
            text = NATIVE.replace("{program}", worker).replace("{watchdog_s}", str(watchdog_s))
            lab.write_unit(f"{name}@.service", text)
        config = CONFIG.replace("{many}", str(MANY))
        lab.install(config.replace("{worker}", worker))
        package = copy_package(Path(lab.directory, "package"), IDLE_S)
        # As the package runs them: Debian's Python starts quicker than one built by hand.
        is_debian = os.path.exists(f"{DEBIAN_MODULES}/systemd")
        python = "/usr/bin/python3" if is_debian else sys.executable
        search = [str(package.parent), *([DEBIAN_MODULES] if is_debian else [])]
        subprocess.run([python, "-m", "compileall", "-q", str(package)], check=True)
        make_programs(lab.libexec, python=python, search=search)
        lab.systemctl("start", "nomarr-controller.socket")
        yield lab, starts


def time_crash(lab: Lab, starts: Starts, unit: str) -> float:
    pid = int(lab.get(unit, "MainPID"))
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    taken = starts.wait_for(1) - begun
    lab.wait_until(unit, "active")
    return taken


def measure_crash(lab: Lab, starts: Starts) -> None:
    """One of MANY that run, as on a machine that does its work.

    After a pause a machine has its processor and its caches to wake too, and ``Restart=always``
    takes twice as long: so native is measured after the same pause, and without one.
    """
    ours, native = "nomarr-worker@tag-0.service", "native@0.service"
    others = [f"nomarr-worker@tag-{number}.service" for number in range(1, MANY)]
    lab.systemctl("start", "nomarr-supervisor.service", ours, native, *others, timeout_s=120)
    starts.wait_for(MANY + 1)

    def absent() -> float:
        lab.systemctl("stop", "nomarr-controller.service")
        return time_crash(lab, starts, ours)

    def at_rest(unit: str) -> float:
        time_crash(lab, starts, ours)
        lab.wait_for_rest()
        return time_crash(lab, starts, unit)

    contenders: dict[str, Callable[[], float]] = {
        "absent": absent,
        "awake": lambda: time_crash(lab, starts, ours),
        "native": lambda: time_crash(lab, starts, native),
        "at rest": lambda: at_rest(ours),
        "native after a pause": lambda: at_rest(native),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            taken[name].append(contender())
    first, quick, floor, slow, calm = (statistics.median(times) for times in taken.values())
    report("crash to running, native Restart=always", f"{floor * 1e3:.0f} ms")
    report("  ours, controller awake", f"{quick * 1e3:.0f} ms, {quick / floor:.2f}", "bar 2")
    report("  ours, controller not there", f"{first * 1e3:.0f} ms, {first / floor:.2f}")
    report("the same after a pause, native", f"{calm * 1e3:.0f} ms, {calm / floor:.2f}")
    both = f"{slow * 1e3:.0f} ms, {slow / calm:.2f}"
    report("  ours, controller at rest", both, f"bar 4; {slow / floor:.2f} of no pause")
    lab.systemctl("stop", ours, native, *others, timeout_s=120)


def measure_hang(lab: Lab, starts: Starts) -> None:
    """A worker that hangs from its start on, with a watchdog of one second."""
    figures = []
    for unit in ("nhang@0.service", "nomarr-worker@hang-0.service"):
        lab.systemctl("start", unit)
        begun = starts.wait_for(1)
        times = []
        for _ in range(4):
            ended = starts.wait_for(1)
            times.append(ended - begun)
            begun = ended
        lab.systemctl("stop", unit)
        figures.append(statistics.median(times))
    native, ours = figures
    report("hang to running, native, WatchdogSec=1", f"{native * 1e3:.0f} ms")
    report("  ours", f"{ours * 1e3:.0f} ms, {ours / native:.2f}", "bar 1.15")


def measure_many(lab: Lab, starts: Starts) -> None:
    figures = []
    for name in ("native@{}.service", "nomarr-worker@tag-{}.service"):
        units = [name.format(number) for number in range(MANY)]
        lab.systemctl("start", *units, timeout_s=120)
        starts.wait_for(MANY)
        text = lab.systemctl("show", "--property=MainPID", "--value", *units)
        pids = [int(line) for line in text.split()]
        begun = time.monotonic()
        # Not alike: that would be an incident, and they would wait for a canary.
        for number, pid in enumerate(pids):
            os.kill(pid, (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE)[number % 3])
        figures.append(starts.wait_for(MANY) - begun)
    native, ours = figures
    report(f"{MANY} killed at once, all running, native", f"{native:.2f} s")
    report("  ours", f"{ours:.2f} s, {ours / native:.2f}", "bar 1.5")


def measure() -> None:
    with make_lab() as (lab, starts):
        measure_crash(lab, starts)
        measure_hang(lab, starts)
        measure_many(lab, starts)
