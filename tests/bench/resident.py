"""What the supervisor costs while nothing happens but frames, beside supervisord with as many.

Both in the same Python, with the same shell program as workers; ours also have full black boxes
and have written history. Memory as RSS and as PSS (what is shared counts in part).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.ids import Component
from nomarr_systemd.ledger import health_history
from nomarr_systemd.supervisor.frame_ring import CAPACITY
from tests.bench.timing import report
from tests.support import supervision
from tests.support.lab import Lab

MANY, MOST = 200, 2000
FRAME_S = 2.5
WATCH_S = 24 * FRAME_S  # what is done from time to time is done once
BATCH = 20  # frames that fit into a pipe beside others
WORKER = """\
#!/bin/sh
exec 3>"${NOMARR_HEALTH_PIPE:-/dev/null}"
[ -z "$NOTIFY_SOCKET" ] || systemd-notify --ready
while :; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 2.5
done
"""
CONFIG = """\
[pool.tag]
workers = {count}
command = ["{worker}"]
watchdog_s = 3600
"""
SUPERVISORD = """\
[supervisord]
nodaemon = true
logfile = /dev/null
logfile_maxbytes = 0
pidfile = {directory}/pid

[program:tag]
command = {worker}
numprocs = {count}
process_name = %(process_num)s
stdout_logfile = NONE
stderr_logfile = NONE
"""


class Cost(NamedTuple):
    """Of one process, over WATCH_S; processor time also of its helpers."""

    rss_mb: float
    pss_mb: float
    cpu: float  # of one processor
    wakeups: float  # a second


def watch(pid: int) -> Cost:
    before_s, before = _spent(pid)
    begun = time.monotonic()
    time.sleep(WATCH_S)
    passed = time.monotonic() - begun
    after_s, after = _spent(pid)
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, kilobytes = line.split()[:2]
        sizes[name] = int(kilobytes) / 1024
    return Cost(
        sizes["Rss:"], sizes["Pss:"], (after_s - before_s) / passed, (after - before) / passed
    )


def _spent(pid: int) -> tuple[float, int]:
    """Processor time of its threads and of children that have ended, and how often a thread was
    woken."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used_ns = sum(map(int, numbers[13:15])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    woken = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # stat counts in hundredths of a second, and only few of them are used meanwhile.
        used_ns += int((thread / "schedstat").read_text().split()[0])
        for line in (thread / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                woken += int(line.split()[1])
    return used_ns / 1e9, woken


def fill(directory: str, count: int) -> None:
    """Full black boxes, as after some minutes of work."""
    for turn in range(CAPACITY // BATCH):
        for number in range(count):
            name = Component("tag", number).component_id
            pipe = os.open(f"{directory}/tag-{number}", os.O_WRONLY)
            for seq in range(turn * BATCH, (turn + 1) * BATCH):
                job = f"/music/{seq % 7}.flac"
                os.write(pipe, encode(name, "healthy", phase="processing", job=job, seq=seq))
            os.close(pipe)


def wait_for_history(state: str) -> None:
    """Until it was written once, after a minute."""
    path = f"{state}/work/work.db"
    while not os.path.exists(path):
        time.sleep(0.1)
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        while not _has_history(db):
            time.sleep(0.5)
    time.sleep(1)


def _has_history(db: sqlite3.Connection) -> bool:
    tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    if (health_history.COLLECTION,) not in tables:
        return False
    return db.execute(f"SELECT 1 FROM {health_history.COLLECTION}").fetchone() is not None


def measure_ours(count: int) -> Cost:
    """Real units under a real systemd."""
    with Lab() as lab:
        worker = lab.write_program("worker", WORKER)
        lab.install(CONFIG.replace("{worker}", worker).replace("{count}", str(count)))
        lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")
        units = [f"nomarr-worker@tag-{number}.service" for number in range(count)]
        lab.systemctl("start", *units, timeout_s=300)
        fill(lab.paths.health, count)
        wait_for_history(lab.paths.state)
        return watch(lab.main_pid("nomarr-supervisor.service"))


def measure_pipes(count: int) -> Cost:
    """Writers of pipes instead of units, all in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with supervision.make_lab() as lab:
            os.makedirs(f"{lab.paths.state}/work")
            lab.configure(tag=count)
            lab.start()
            for number in range(count):
                lab.begin_run(f"tag-{number}")
            fill(lab.paths.health, count)
            with _framing(lab.paths.health, count):
                wait_for_history(lab.paths.state)
                return watch(lab.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _framing(directory: str, count: int) -> Iterator[None]:
    """A process that frames for all of them, spread evenly, as they would be."""
    code = (
        "import os, time; from nomarr_systemd.core.frames import encode\n"
        f"pipes = [os.open(f'{directory}/tag-{{n}}', os.O_WRONLY) for n in range({count})]\n"
        "print(flush=True); begun = time.monotonic(); done = 0\n"
        "while True:\n"
        f"    n = done % {count}\n"
        "    os.write(pipes[n], encode(f'worker:tag:{n}', 'healthy', seq=done)); done += 1\n"
        f"    wait = begun + done * {FRAME_S} / {count} - time.monotonic()\n"
        "    if wait > 0: time.sleep(wait)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        try:
            yield
        finally:
            writer.kill()


def measure_supervisord(count: int) -> Cost:
    program = os.path.join(os.path.dirname(sys.executable), "supervisord")
    with tempfile.TemporaryDirectory() as directory:
        worker = Path(directory, "worker")
        worker.write_text(WORKER)
        worker.chmod(0o755)
        text = SUPERVISORD.replace("{directory}", directory).replace("{count}", str(count))
        conf = Path(directory, "supervisord.conf")
        conf.write_text(text.replace("{worker}", str(worker)))
        command = [program, "-c", str(conf)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                while len(children.read_text().split()) < count:
                    time.sleep(0.1)
                return watch(process.pid)
            finally:
                process.terminate()


def tell(name: str, cost: Cost, bar: str = "", idle_bar: str = "") -> None:
    report(f"{name}: RSS, PSS", f"{cost.rss_mb:.1f} MB, {cost.pss_mb:.1f} MB", bar)
    report("  idle: processor, wakeups", f"{cost.cpu:.2%}, {cost.wakeups:.1f}/s", idle_bar)


def measure() -> None:
    theirs = measure_supervisord(MANY)
    tell(f"supervisord, {MANY} programs", theirs)
    ours = measure_ours(MANY)
    bar = f"{ours.rss_mb / theirs.rss_mb:.2f} of its RSS; bar 0.6"
    tell(f"ours, {MANY} units", ours, bar, "bar 0.30%, 10/s")
    tell(f"ours, {MOST} writers of pipes", measure_pipes(MOST))
