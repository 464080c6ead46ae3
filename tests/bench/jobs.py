"""Jobs through the queue: claim, do nothing, complete, on each backend, with one worker and more;
and what finding one costs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg2

from nomarr_systemd.core.job import Owner
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.arango_standin.running import run_standin
from tests.bench.books import bare_commit
from tests.bench.timing import compare, repeat, report
from tests.support.places import DATABASE, Place, dump_place
from tests.support.postgres import ADMIN, Postgres, run_postgres

JOBS = 1024  # in a race: many batches for each worker, so that its end counts for little
ROUNDS = 5
WORKERS = (1, 2, 4, 8)
BATCHES = (1, 16)
COMMITS = 50
FEW, MANY = 100, 1_000_000
LOOKS = 200

# At each line of input, the size of a batch, it does jobs until there are none, as the worker's
# runtime does.
WORKER = """
import os, sys
from nomarr_systemd.core.job import Owner
from nomarr_systemd.jobs.claims import Claims, End
from tests.support.places import load_place
owner = Owner("worker:tag:0", os.urandom(16).hex())
claims = Claims(load_place(sys.argv[1]).open("work"), "tag", owner)
claims.take_batch(1)
print("ready", flush=True)
for line in sys.stdin:
    batch = int(line)
    done, jobs = 0, claims.take_batch(batch)
    while jobs:
        key, done = jobs.pop(0)["_key"], done + 1
        _, jobs = claims.end_and_take(key, End("done"), batch, jobs)
    print(done, flush=True)
"""


def fill(store: Store, number: int, start: int = 0) -> None:
    paths = (f"/music/library/{n:07d}.flac" for n in range(start, start + number))
    queue.add(store, "tag", paths, on_page=lambda *_: None)


class Crew:
    """Workers on one store, of which some do the jobs of a round."""

    def __init__(self, place: Place, size: int) -> None:
        command = [sys.executable, "-c", WORKER, dump_place(place)]
        self._children = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for _ in range(size)
        ]
        for each in self._children:
            if self._hear(each) != "ready":
                raise RuntimeError("a worker did not start")

    def race(self, workers: int, batch: int, jobs: int) -> float:
        """Seconds until the queue is empty."""
        chosen = self._children[:workers]
        started = time.perf_counter()
        for each in chosen:
            if each.stdin is not None:
                each.stdin.write(f"{batch}\n")
        done = [int(self._hear(each)) for each in chosen]
        taken = time.perf_counter() - started
        if sum(done) != jobs:
            raise RuntimeError(f"not every job was done once: {done}")
        return taken

    def close(self) -> None:
        for each in self._children:
            each.communicate()

    def _hear(self, child: subprocess.Popen[str]) -> str:
        return child.stdout.readline().strip() if child.stdout is not None else ""


@contextlib.contextmanager
def on_sqlite(directory: str) -> Iterator[tuple[Place, Callable[[], object]]]:
    place = tempfile.mkdtemp(dir=directory)
    db, commit = bare_commit(f"{place}/bare.db")
    with contextlib.closing(db):
        yield Place(place), commit


@contextlib.contextmanager
def on_postgres(server: Postgres) -> Iterator[tuple[Place, Callable[[], object]]]:
    """The server with nothing in it, and one bare durable commit of it."""
    server.sql(f"DROP DATABASE IF EXISTS {DATABASE}", f"CREATE DATABASE {DATABASE}")
    connection = psycopg2.connect(
        host=server.host, port=server.port, user=ADMIN, password=server.password, dbname=DATABASE
    )
    connection.autocommit = True
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("CREATE TABLE bare (key int PRIMARY KEY, body text)")
        cursor.execute("INSERT INTO bare VALUES (0, '')")
        sql = "UPDATE bare SET body = body || 'x'"
        yield Place("", server, DATABASE), partial(cursor.execute, sql)


@contextlib.contextmanager
def on_standin() -> Iterator[tuple[Place, Callable[[], object]]]:
    """ArangoDB's stand-in, a Python program in memory, and one bare request to it."""
    with run_standin() as server:
        server.call("POST", "/_api/database", {"name": DATABASE})
        api = f"/_db/{DATABASE}/_api"
        server.call("POST", f"{api}/collection", {"name": "bare"})
        yield Place("", server, DATABASE), partial(server.call, "POST", f"{api}/document/bare", {})


Begin = Callable[[], contextlib.AbstractContextManager[tuple[Place, Callable[[], object]]]]


def measure_queue(name: str, begin: Begin, jobs: int = JOBS, rounds: int = ROUNDS) -> None:
    """Rounds of all sizes of batches and numbers of workers in turn, each beside bare commits: a
    busy moment of the machine or its disk hits all of them. Medians, of ratios within a round."""
    cases = [(batch, workers) for batch in BATCHES for workers in WORKERS]
    costs: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    rates: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    floors = []
    with (
        begin() as (place, commit),
        contextlib.closing(place.open("work")) as store,
        contextlib.closing(Crew(place, max(WORKERS))) as crew,
    ):
        for number in range(rounds * len(cases)):
            batch, workers = case = cases[number % len(cases)]
            fill(store, jobs, number * jobs)
            (before,) = compare([commit], COMMITS)
            seconds = crew.race(workers, batch, jobs) / jobs
            (after,) = compare([commit], COMMITS)
            floors.append((before + after) / 2)
            costs[case].append(seconds / floors[-1])
            rates[case].append(1 / seconds)
    for batch, workers in cases:
        rate, cost = (statistics.median(each[batch, workers]) for each in (rates, costs))
        alone = relate(rates[batch, workers], rates[batch, 1])
        singly = relate(rates[batch, workers], rates[1, workers])
        report(
            f"{name}: {workers} workers, claim_batch {batch}",
            f"{rate:.0f} jobs/s",
            f"{cost:.2f} bare commits each; {alone:.2f} of one worker's rate, bar 1"
            + (f"; {singly:.2f} of claim_batch 1, bar 1" if batch > 1 else ""),
        )
    report(f"  to one bare durable commit of {name}", f"{statistics.median(floors) * 1e3:.2f} ms")


def relate(rates: list[float], others: list[float]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(rates, others, strict=True))


def measure() -> None:
    # In the working directory: /tmp may be memory, where a commit costs nothing.
    with tempfile.TemporaryDirectory(dir=os.curdir, prefix=".bench-") as directory:
        measure_queue("SQLite", partial(on_sqlite, directory))
        with run_postgres() as running:
            measure_queue("PostgreSQL", partial(on_postgres, running.server))
        # It searches without an index; its figures say nothing of a server.
        measure_queue("ArangoDB's stand-in", on_standin, jobs=40, rounds=2)
        measure_finding(directory)


def measure_finding(directory: str) -> None:
    looks = []
    for number in (FEW, MANY):
        os.mkdir(f"{directory}/{number}")
        store = SqliteStore(f"{directory}/{number}", "work")
        fill(store, number)
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
