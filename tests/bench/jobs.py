"""Jobs through the queue on SQLite: claim, do nothing, complete; and what finding one costs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

from nomarr_systemd.core.job import Owner
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.bench.books import bare_commit
from tests.bench.timing import compare, repeat, report

JOBS = 2000
WORKERS = (1, 2, 4)
FEW, MANY = 100, 1_000_000
LOOKS = 200

# Takes jobs until there are none; says how many.
WORKER = """
import os, sys
from nomarr_systemd.core.job import Owner
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.store.sqlite.store import SqliteStore
owner = Owner("worker:tag:0", os.urandom(16).hex())
claims = Claims(SqliteStore(sys.argv[1], "work"), "tag", owner)
print("ready", flush=True)
sys.stdin.readline()
done = 0
while job := claims.take_next():
    claims.end(job["_key"], End("done"))
    done += 1
print(done)
"""


def fill(place: str, number: int) -> SqliteStore:
    os.mkdir(place)
    store = SqliteStore(place, "work")
    paths = (f"/music/library/{n:07d}.flac" for n in range(number))
    queue.add(store, "tag", paths, on_page=lambda *_: None)
    return store


def race(place: str, workers: int) -> float:
    """Seconds until the queue is empty."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(workers)
    ]
    for child in children:
        if child.stdout is None or child.stdout.readline() != "ready\n":
            raise RuntimeError("a worker did not start")
    started = time.perf_counter()
    for child in children:
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    outputs = [child.communicate()[0] for child in children]
    taken = time.perf_counter() - started
    if sum(map(int, outputs)) != JOBS:
        raise RuntimeError(f"not every job was done once: {outputs}")
    return taken


def measure() -> None:
    # In the working directory: /tmp may be memory, where a commit costs nothing.
    with tempfile.TemporaryDirectory(dir=os.curdir, prefix=".bench-") as directory:
        for workers in WORKERS:
            place = f"{directory}/{workers}"
            fill(place, JOBS).close()
            db, commit = bare_commit(f"{place}/bare.db")
            (floor,) = compare([commit], 300)
            db.close()
            seconds = race(place, workers)
            report(
                f"claim, do nothing, complete: {workers} workers",
                f"{JOBS / seconds:.0f} jobs/s",
                f"{seconds / JOBS / floor:.2f} bare commits each",
            )
        report("  to one bare durable commit", f"{floor * 1e3:.2f} ms")
        looks = []
        for number in (FEW, MANY):
            store = fill(f"{directory}/{number}", number)
            claims = Claims(store, "tag", Owner("worker:tag:0", "a" * 32))
            # Half of them done would be kinder: all pending is the longest queue there is.
            where = {"pool": "tag", "status": "pending"}
            looks.append(repeat(partial(store.find, queue.JOBS, where, limit=1), LOOKS))
            job = claims.take_next()
            if job is None:
                raise RuntimeError("there is no job")
            claims.end(job["_key"], End("done"))
        few, many = compare(looks, 20)
        report(f"find a job among {FEW}", f"{few / LOOKS * 1e6:.0f} µs")
        report(f"find a job among {MANY:,}", f"{many / few:.2f} times that", "bar 2")
