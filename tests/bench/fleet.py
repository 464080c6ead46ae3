"""A store that hosts share: what each kind of write costs a real PostgreSQL, and how long a failure
waits for its decision on each backend. Jobs/s are in ``jobs``.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from nomarr_systemd.config.store_url import PostgresUrl
from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.health import Sample
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import Owner
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.fleet.leases import HostLease
from nomarr_systemd.jobs import queue, stats
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.jobs.lost_hosts import LostHosts
from nomarr_systemd.ledger.health_history import append
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import Domain
from nomarr_systemd.supervisor.host_lease import describe_host
from nomarr_systemd.supervisor.workers import Crash, Workers
from tests.arango_standin.running import PASSWORD as ARANGO_PASSWORD
from tests.arango_standin.running import run_standin
from tests.bench.books import a_death
from tests.bench.timing import report
from tests.support.lab import Lab
from tests.support.operator_site import Installation
from tests.support.postgres import ADMIN, PASSWORD, Postgres, run_postgres

OF_HOST = 50
ROUNDS = 200
DEATHS = 20
DATABASE = "bench"
RULES = Rules(max_restarts=100, max_lifetime_restarts=0)

SERVER = """
[store]
url = "{scheme}://{user}@127.0.0.1:{port}/latency"
password_file = "{directory}/secret"
work_user = "worker"
work_password_file = "{directory}/secret-of-jobs"
"""
POLICY = """
[policy]
backoff_base_s = 0.1
backoff_max_s = 0.1
backoff_jitter = 0
max_restarts = 100
max_lifetime_restarts = 0
[pool.tag]
workers = 1
command = ["{worker}"]
watchdog_s = 3600
"""


def open_at(port: int, domain: Domain = "work") -> PostgresStore:
    url = PostgresUrl(ADMIN, (("127.0.0.1", port),), DATABASE, tls=False)
    return PostgresStore(url, domain, password=PASSWORD, timeout_s=20)


def measure_writes(server: Postgres) -> None:
    """Time at the client, and write-ahead log at the server, of what hosts write all the time."""
    with closing(open_at(server.port)) as work, closing(open_at(server.port, "policy")) as policy:
        numbers = itertools.count()
        workers = Workers()
        for number in range(OF_HOST):
            worker = workers.add(Component("tag", number), -1)
            worker.crash = Crash(1, "killed by SIGSEGV", "f" * 32, "restart: 1 of 5 restarts")
        about = describe_host(workers, Config(pools=(Pool("tag", OF_HOST),)), "healthy")
        lease = HostLease("host", "host-12345678", "boot/0")
        lost = LostHosts("host", lambda _lease: None)
        path = "/music/library/0000001.flac"
        line = encode("worker:tag:0", "healthy", phase="processing", job=path, pid=1, seq=1)

        def renew() -> None:
            lease.renew(work, 30, about)
            list(lost.look(work, 0.0, 1))

        def sample() -> None:
            wall_ms = 1_700_000_000_000 + next(numbers)
            names = (f"worker:tag:{number}" for number in range(OF_HOST))
            fields = ("healthy", "f" * 32, 0, 0, 0, "", line)
            append(work, [Sample(name, wall_ms, *fields) for name in names], "host")

        def publish() -> None:
            with work.batch():
                for number in range(OF_HOST):
                    figures = {"avg_time_s": 1.5, "files_processed": next(numbers)}
                    stats.publish(work, f"worker:tag:{number}", figures, "host")

        def take() -> None:
            claims = Claims(work, "tag", Owner("worker:tag:0", "a" * 32, "host"))
            job = claims.take_next()
            if job is None:
                raise RuntimeError("there is no job")
            claims.end(job["_key"], End("done"))

        ledger = Ledger(policy, host="host")
        for _ in range(DEATHS):
            ledger.record_failure(a_death(0), RULES)
        paths = (f"/music/{n:07d}.flac" for n in range(2 * ROUNDS))
        queue.add(work, "tag", paths, on_page=lambda *_: None)
        for name, write in (
            ("a lease is renewed, others are looked at", renew),
            (f"a sample of {OF_HOST} workers", sample),
            (f"figures of {OF_HOST} workers", publish),
            ("a job is claimed and completed", take),
            ("a failure is booked, 20 on record", lambda: ledger.record_failure(a_death(0), RULES)),
        ):
            write()
            seconds, log = cost_of(server, write)
            report(f"PostgreSQL: {name}", f"{seconds * 1e3:.2f} ms, {log / 1024:.1f} kB")
        for table in ("hosts", "health_history"):
            sql = f"SELECT avg(octet_length(body::text))::int FROM nomarr_work.{table}"
            [(size,)] = server.sql(sql, database=DATABASE)
            report(f"  a document of {table}", f"{size} bytes")


def cost_of(server: Postgres, write: Callable[[], object]) -> tuple[float, float]:
    """The median seconds of a write, and the mean bytes of write-ahead log."""
    position = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    server.sql("CHECKPOINT")
    write()  # the first write of a page after a checkpoint logs the whole page
    [(before,)] = server.sql(position)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        write()
        times.append(time.perf_counter() - started)
    [(after,)] = server.sql(position)
    return statistics.median(times), float(after - before) / ROUNDS


class Backend(NamedTuple):
    """A server to keep the ledger in."""

    scheme: str
    user: str
    port: int
    password: str


def measure_latency(title: str, server: Backend | None) -> None:
    """From a kill to the decision, and to its commit, which the published account shows."""
    with Lab() as lab:
        site = Installation(lab)
        text = POLICY.replace("{worker}", site.worker)
        if server:
            for name in ("secret", "secret-of-jobs"):
                secret = Path(lab.directory, name)
                secret.touch(0o600)
                secret.write_text(server.password)
            text = SERVER.format(directory=lab.directory, **server._asdict()) + text
        site.config.write_text(text)
        site.good("apply")
        site.wait_until_healthy("tag-0")
        site.wait_until_reconciled()
        decided, committed = [], []
        public = site.state / "public/tag-0.json"
        for number in range(DEATHS):
            lab.wait_until("tag-0", "active")
            died = lab.get("tag-0", "InvocationID")
            at_ms = time.time() * 1000
            os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
            lab.wait_for(lambda: any(r.invocation == died for r in site.records()))  # noqa: B023
            seen_ms = public.stat().st_mtime_ns / 1e6
            (record,) = [r for r in site.records() if r.invocation == died]
            if number:  # the first one also starts the controller
                decided.append(record.wall_ms - at_ms)
                committed.append(seen_ms - at_ms)
        figure = f"{statistics.median(decided):.0f} ms, {statistics.median(committed):.0f} ms"
        report(f"{title}: killed → decided, committed", figure)


def measure() -> None:
    with run_postgres(synchronous_commit="on", max_connections="60") as running:
        server = running.server
        server.sql(f"CREATE DATABASE {DATABASE}", "CREATE DATABASE latency")
        server.sql(f"CREATE ROLE worker SUPERUSER LOGIN PASSWORD $x${PASSWORD}$x$")
        measure_writes(server)
        measure_latency("SQLite", None)
        measure_latency("PostgreSQL", Backend("postgresql", ADMIN, server.port, server.password))
        with run_standin("--account", f"worker:{ARANGO_PASSWORD}:latency") as arango:
            arango.call("POST", "/_api/database", {"name": "latency"})
            backend = Backend("arangodb", arango.user, arango.port, arango.password)
            measure_latency("ArangoDB's stand-in", backend)
