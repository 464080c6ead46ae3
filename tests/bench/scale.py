"""Growth from 10 to 1,000 workers under a real systemd, beside bare template instances: apply, an
apply without changes, what a person asks, the death of all at once, a reboot, and the supervisor's
memory.

Workers are a small C program, so that what is measured is systemd and ours. ``python -m
tests.bench.scale 4096`` measures this count only. All of one day are drawn together (growth.py).
systemd does not answer while it loads units, starts what is queued, or handles deaths, so its
slowest answer is shown at each step, beside that with bare instances. For deaths there is a third:
when bare instances die and nothing follows. No supervisor on systemd can be below that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from nomarr_systemd.operate.waiting import queue_gently
from nomarr_systemd.systemd.dbus.connection import PROPERTIES, Bus, BusError, Call
from nomarr_systemd.systemd.manager import Manager
from tests.bench import growth
from tests.bench.live import Starts, lab_in_memory
from tests.bench.timing import report
from tests.support.lab import Lab
from tests.support.operator_site import Installation

Row = dict[str, float]
COUNTS = (10, 100, 1000)  # 4,096 takes a quarter of an hour more
HANGS_S = 1800.0  # only a hang takes longer, also on a busy machine
PING_S = 0.05
WORKER = r"""
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int count, char **words) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un there = {.sun_family = AF_UNIX};
    int ready = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int starts = open(words[1], O_WRONLY | O_CLOEXEC);
    strncpy(there.sun_path, path, sizeof there.sun_path - 1);
    if (there.sun_path[0] == '@')
        there.sun_path[0] = 0;
    sendto(ready, "READY=1", 7, 0, (struct sockaddr *)&there,
           offsetof(struct sockaddr_un, sun_path) + strlen(path));
    write(starts, "\n", 1);
    close(ready);
    close(starts);
    for (;;)
        pause();
}
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
workers = {count}
command = ["{worker}", "{fifo}"]
watchdog_s = 3600

[pool.tag.unit]
LimitCORE = 0
"""
BARE = """\
[Unit]
StartLimitIntervalSec=0
[Service]
Type=notify
ExecStart={worker} {fifo}
Restart=always
RestartSec=0
WatchdogSec=3600
LimitCORE=0
"""


class Patience:
    """How long the manager takes to answer, meanwhile: the worst of one question at a time."""

    def __init__(self, lab: Lab) -> None:
        self.worst_s = 0.0
        self._lab = lab
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        call = Call(
            "Get", "ss", ("org.freedesktop.systemd1.Manager", "Version"), interface=PROPERTIES
        )
        bus = Bus(user=True, timeout_s=HANGS_S)
        begun = 0.0
        while not self._over.wait(PING_S):
            begun = begun or time.monotonic()
            with contextlib.suppress(BusError):  # systemd hangs up on who waits for 90 s: again
                bus.call_all([call])  # on a connection of its own each time, as systemctl would
                self.worst_s, begun = max(self.worst_s, time.monotonic() - begun), 0.0
            bus.close()
        if begun:
            self.worst_s = max(self.worst_s, time.monotonic() - begun)


class Site:
    """A lab with a number of workers, ours or bare ones."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.starts = Starts(f"{lab.directory}/starts")
        self.operator = Installation(lab)
        source = Path(lab.directory, "worker.c")
        source.write_text(WORKER)
        self.program = f"{lab.directory}/worker-c"
        subprocess.run(["gcc", "-O2", "-w", "-o", self.program, str(source)], check=True)
        bare = BARE.replace("{worker}", self.program).replace("{fifo}", self._fifo)
        lab.write_unit("bare@.service", bare)
        lab.write_unit("once@.service", bare.replace("Restart=always", "Restart=no"))
        lab.write_unit("bare.target", "[Unit]\n")
        lab.reload()

    @property
    def _fifo(self) -> str:
        return f"{self.lab.directory}/starts"

    def configure(self, count: int) -> None:
        text = CONFIG.replace("{count}", str(count)).replace("{worker}", self.program)
        self.operator.config.write_text(text.replace("{fifo}", self._fifo))

    def ctl(self, *arguments: str) -> float:
        """Seconds of one nomarrctl."""
        begun = time.monotonic()
        done = self.lab.run(self.operator.command(*arguments), check=False, timeout_s=HANGS_S)
        taken = time.monotonic() - begun
        assert done.returncode in (0, 1, 3), f"{arguments}: {done.stderr[-2000:]}"
        return taken

    def used_s(self) -> float:
        """The processor time of the manager."""
        fields = Path(f"/proc/{self.lab.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill_all(self, units: list[str]) -> None:
        """Kill them and wait until all run again."""
        self.kill(units)
        self.starts.wait_for(len(units), HANGS_S)

    def kill(self, units: list[str]) -> None:
        """Kill them, but not all alike: that would be one incident."""
        for number, pid in enumerate(self._pids(units)):
            os.kill(pid, (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE)[number % 3])

    def wait_until_failed(self, count: int) -> None:
        """Until systemd has handled the deaths of so many."""
        while True:
            with contextlib.closing(Manager(user=True, tell=lambda _line: None)) as manager:
                if len(manager.list_failed("once@*.service")) == count:
                    return
            time.sleep(PING_S)

    def start(self, target: str, count: int) -> None:
        """Start the target and wait until all its workers run."""
        # systemctl gives up while systemd loads thousands of units; the job is queued all the same.
        self.lab.systemctl("start", "--no-block", target, check=False, timeout_s=HANGS_S)
        self.starts.wait_for(count, HANGS_S)

    def _pids(self, units: list[str]) -> list[int]:
        # Not by systemctl: for each unit it has the manager read all directories of units.
        with contextlib.closing(Manager(user=True, tell=lambda _line: None)) as manager:
            shown = manager.show(units, ["MainPID"])
        pids = [int(shown[unit]["MainPID"]) for unit in units]
        assert all(pids), "one does not run"
        return pids

    def wait_until_settled(self) -> None:
        """Until the controller has nothing left to do: what was decided is on record as done."""
        self.lab.wait_for(
            lambda: not os.listdir(self.lab.runtime + "/nomarr/pending"),
            what="no report waits",
            timeout_s=HANGS_S,
        )


class Timed:
    """Seconds of a step, systemd's own of them, which a busy machine hardly changes, and its
    slowest answer meanwhile."""

    def __init__(self, site: Site, row: Row, name: str) -> None:
        self._site, self._row, self._name = site, row, name
        self._patience = Patience(site.lab)

    def __enter__(self) -> None:
        self._began, self._used = time.monotonic(), self._site.used_s()
        self._patience.__enter__()

    def __exit__(self, *_error: object) -> None:
        self._row[self._name] = time.monotonic() - self._began
        self._row[f"{self._name}_cpu"] = self._site.used_s() - self._used
        self._patience.__exit__()
        self._row[f"{self._name}_answer"] = self._patience.worst_s


def measure_bare(site: Site, row: Row) -> None:
    """Start, death of all at once, and a reboot, of bare template instances."""
    count = int(row["workers"])
    units = [f"bare@{number}.service" for number in range(count)]
    with Timed(site, row, "bare"):
        site.lab.systemctl("start", *units, timeout_s=HANGS_S)
    site.starts.wait_for(count, HANGS_S)
    load = f"load {os.getloadavg()[0]:.0f}"
    report(f"{count} workers: start of bare instances", spell(row, "bare"), load)
    with Timed(site, row, "native"):
        site.kill_all(units)
    report("  all killed at once, all running, native", spell(row, "native"))
    measure_deaths_alone(site, row)
    wants = "".join(f"Wants={unit}\n" for unit in units)
    site.lab.write_unit("bare.target.d/wants.conf", f"[Unit]\n{wants}")
    site.lab.reboot()
    with Timed(site, row, "native_boot"):
        site.start("bare.target", count)
    report("  systemd started again, all running, bare", spell(row, "native_boot"))


def measure_deaths_alone(site: Site, row: Row) -> None:
    """systemd's slowest answer while bare instances die that nothing restarts."""
    count = int(row["workers"])
    site.lab.reboot()
    units = [f"once@{number}.service" for number in range(count)]
    with contextlib.closing(Manager(user=True, tell=lambda _line: None)) as manager:
        queue_gently(manager, "start", units, "", lambda _line: None)
    site.starts.wait_for(count, HANGS_S)
    with Patience(site.lab) as patience:
        site.kill(units)
        site.wait_until_failed(count)
    row["floor_answer"] = patience.worst_s


def measure_ours(site: Site, row: Row, first: Row) -> None:
    """The same of our workers, and what else grows with their number."""
    count = int(row["workers"])
    site.lab.reboot()
    site.configure(count)
    with Timed(site, row, "apply"):
        site.ctl("apply", "--yes")
        site.starts.wait_for(count, HANGS_S)
    report("  apply, all running", spell(row, "apply", "bare"), "bar 1.3 at 1,000")
    report_answer(row, "apply", "bare")
    site.lab.wait_for(
        lambda: site.lab.get("nomarr-reconcile.service", "ActiveState") == "inactive",
        what="the reconciler has looked",
        timeout_s=HANGS_S,
    )
    row["nothing"] = site.ctl("apply", "--yes")
    report("  apply without changes", f"{row['nothing']:.2f} s", "bar 2 s at 4,096")
    for name, *words in (("status",), ("why", "tag-0"), ("doctor",), ("events",)):
        row[name] = site.ctl(name, *words)
        report(f"  {name}", f"{row[name]:.2f} s", "bar 1 s at 4,096")
    status = Path(f"/proc/{site.lab.main_pid('nomarr-supervisor.service')}/status").read_text()
    row["rss"] = int(status.partition("VmRSS:")[2].split()[0])
    if row is not first:
        grown = (row["rss"] - first["rss"]) / (count - first["workers"])
        report("  supervisor, memory per worker", f"{grown:.1f} kB", "bar 10 kB")
    units = [f"nomarr-worker@tag-{number}.service" for number in range(count)]
    with Timed(site, row, "death"):
        site.kill_all(units)
    report("  all killed at once, all running", spell(row, "death", "native"), "bar 1.5 at 200")
    report_answer(row, "death", "native", f"; deaths alone {row['floor_answer'] * 1e3:.0f} ms")
    site.wait_until_settled()
    site.lab.reboot()
    with Timed(site, row, "boot"):
        site.start("nomarr-workers.target", count)
    report("  systemd started again, all running", spell(row, "boot", "native_boot"))
    report_answer(row, "boot", "native_boot")


def report_answer(row: Row, name: str, floor: str, more: str = "") -> None:
    slowest, native = (f"{row[f'{step}_answer'] * 1e3:.0f} ms" for step in (name, floor))
    report("    systemd's slowest answer meanwhile", f"{slowest}, bare {native}", f"bar 1 s{more}")


def spell(row: Row, name: str, floor: str = "") -> str:
    """Seconds, and systemd's own of them; then how many times the floor each is."""
    figures = f"{row[name]:.2f} s ({row[f'{name}_cpu']:.2f})"
    if not floor:
        return figures
    times = row[name] / row[floor]
    own = row[f"{name}_cpu"] / max(row[f"{floor}_cpu"], 0.01)
    return f"{figures}, {times:.2f} ({own:.2f})"


@contextlib.contextmanager
def make_site() -> Iterator[Site]:
    # In the environment for Patience.
    with lab_in_memory() as lab, patch.dict(os.environ, {"XDG_RUNTIME_DIR": lab.runtime}):
        yield Site(lab)


def measure(counts: tuple[int, ...] = COUNTS) -> None:
    print("seconds; in brackets those of systemd itself")
    rows: list[Row] = []
    for count in counts:
        rows.append({"workers": count})
        with make_site() as site:
            measure_bare(site, rows[-1])
            measure_ours(site, rows[-1], rows[0])
        rows[-1]["load"] = os.getloadavg()[0]
        growth.keep(rows)


if __name__ == "__main__":
    measure(tuple(map(int, sys.argv[1:])) or COUNTS)
