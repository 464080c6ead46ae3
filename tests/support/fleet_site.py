"""Hosts of a fleet: private systemds with host names and machine-ids of their own, on a PostgreSQL
with a streaming standby that has every commit before it is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.store_url import PostgresUrl
from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import Doc, Domain
from tests.support.lab import Lab
from tests.support.operator_site import Installation
from tests.support.postgres import ADMIN, PASSWORD, Running, free_port

DATABASE, SECRET = "fleet", "secret of the fleet"
LEASE_S = 10
CONFIG = """\
[store]
url = "postgresql://ledger@{hosts}/{database}"
password_file = "{place}/secret-of-ledger"
work_user = "worker"
work_password_file = "{place}/secret-of-jobs"
[fleet]
lease_s = {lease_s}
max_restarts_at_once = {at_once}
[health]
snapshot_interval_s = 1
{more}
"""
POOL = """
[pool.{name}]
workers = {workers}
entrypoint = "tests.support.crash_workers:Recorder"
watchdog_s = 3600
{settings}
[pool.{name}.unit]
Environment = ["PLACE={place}"]
"""


class Servers:
    """The primary and its standby."""

    def __init__(self, directory: Path) -> None:
        self.primary = Running(directory)
        self.primary.make()
        self.primary.start(synchronous_standby_names="")
        server = self.primary.server
        server.sql(
            f"CREATE ROLE ledger LOGIN PASSWORD '{SECRET}'",
            f"CREATE ROLE worker LOGIN PASSWORD '{SECRET}'",
            f"CREATE DATABASE {DATABASE}",
        )
        server.sql(
            "CREATE SCHEMA nomarr_policy AUTHORIZATION ledger",
            "CREATE SCHEMA nomarr_work AUTHORIZATION worker",
            database=DATABASE,
        )
        self.standby = self.primary.clone(directory / "standby", free_port())
        self.standby.start(synchronous_standby_names="")
        self.standby.wait_for_copy(self.primary)
        # From now on a commit is answered when the standby has it, too.
        self.primary.stop()
        self.primary.start(synchronous_standby_names="*")
        self.standby.wait_for_copy(self.primary)
        self.all = [self.primary, self.standby]

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{each.port}" for each in (self.primary, self.standby))

    def kill_primary(self) -> None:
        self.primary.stop(signal.SIGKILL)
        self.all.remove(self.primary)

    def promote(self) -> None:
        """Make the standby the primary."""
        self.standby.server.sql("SELECT pg_promote(true, 60)")

    def are_leases_over(self) -> bool:
        """By the clock of the standby, which can be read."""
        now_ms = "extract(epoch FROM clock_timestamp()) * 1000"
        over = f"{now_ms} > (body->>'renewed_ms')::bigint + (body->>'lease_ms')::bigint"
        sql = f"SELECT bool_and({over}) FROM nomarr_work.hosts"
        [(is_over,)] = self.standby.server.sql(sql, database=DATABASE)
        return bool(is_over)

    def stop(self) -> None:
        for each in self.all:
            each.stop()
        self.all = []

    def open(self, domain: Domain = "work") -> PostgresStore:
        places = tuple(("127.0.0.1", each.port) for each in (self.primary, self.standby))
        url = PostgresUrl(ADMIN, places, DATABASE, tls=False)
        return PostgresStore(url, domain, password=PASSWORD, timeout_s=20)

    def jobs(self) -> list[Doc]:
        with closing(self.open()) as store:
            return store.find(queue.JOBS)

    def claims(self) -> list[Doc]:
        with closing(self.open()) as store:
            return store.find(CLAIMS)


class Host(Installation):
    """One host; ``pools`` has the number of workers and the settings of each pool."""

    def __init__(
        self,
        lab: Lab,
        servers: Servers,
        place: Path,
        pools: dict[str, tuple[int, str]],
        more: str = "",
        at_once: int = 0,
    ) -> None:
        super().__init__(lab)
        for name in ("ledger", "jobs"):
            secret = Path(lab.directory, f"secret-of-{name}")
            secret.touch(0o600)
            secret.write_text(SECRET)
        text = CONFIG.format(
            hosts=servers.hosts,
            database=DATABASE,
            place=lab.directory,
            lease_s=LEASE_S,
            at_once=at_once,
            more=more,
        )
        for name, (workers, settings) in pools.items():
            text += POOL.format(name=name, workers=workers, settings=settings, place=place)
        self.config.write_text(text)
        self.good("apply")

    def fleet(self) -> list[dict[str, Any]]:
        """All hosts, as this one shows them."""
        done = self.ctl("--fleet", "status", "--json")
        assert done.returncode in (0, 3), done.stderr
        hosts: list[dict[str, Any]] = json.loads(done.stdout)["hosts"]
        return hosts

    def states(self) -> dict[str, str]:
        """The state of each host, by its host name."""
        return {each["name"].rpartition("-")[0]: each["state"] for each in self.fleet()}


@contextlib.contextmanager
def make_hosts(names: Sequence[str]) -> Iterator[list[Lab]]:
    """The private systemds of these hosts."""
    with ExitStack() as stack:
        labs = []
        for name in names:
            lab = Lab(name=name)
            try:
                lab.begin()
            except LabUnavailable as error:
                pytest.skip(f"{error} ({error.hint})")
            stack.callback(lab.end)
            labs.append(lab)
        yield labs


@contextlib.contextmanager
def run_servers() -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="nomarr-fleet-") as directory:
        os.chmod(directory, 0o755)
        servers = Servers(Path(directory))
        try:
            yield servers
        finally:
            servers.stop()
