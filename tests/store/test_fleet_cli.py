"""nomarrctl --fleet, as a program, on a real PostgreSQL, without a supervisor on this host; and
what a hostile document of a host can do to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.store_url import PostgresUrl
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.job import Owner
from nomarr_systemd.core.lease import read_lease
from nomarr_systemd.fleet.leases import HostLease, declare_lost
from nomarr_systemd.fleet.view import view_hosts
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import Claims
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.ledger.shared_archive import Archivist
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import HOSTS, Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.incidents import make
from tests.support.moments import PLAIN, at, death, run
from tests.support.places import DATABASE
from tests.support.postgres import Postgres

WORKER, SECRET = "fleet_worker", "secret"
CONFIG = """\
[store]
url = "postgresql://ledger@127.0.0.1:{port}/{database}"
password_file = "{place}/none"
work_user = "{user}"
work_password_file = "{place}/secret"
[fleet]
host = "alpha"
[pool.tag]
entrypoint = "a.b:C"
"""
CRASH = {
    "worker": "tag-0",
    "wall_ms": 1_700_000_000_000,
    "invocation": "f" * 32,
    "cause": "killed by SIGSEGV",
    "decision": "restart: 1 of 5",
}


class Program:
    def __init__(self, place: Path, port: int) -> None:
        self.place = place
        text = CONFIG.format(port=port, database=DATABASE, place=place, user=WORKER)
        self.config = place / "nomarr.toml"
        self.config.write_text(text)
        (place / "secret").touch(0o600)
        (place / "secret").write_text(SECRET)
        applied = place / ".local/state/nomarr/config.json"
        applied.parent.mkdir(parents=True)
        applied.write_text(json.dumps(parse(text).to_dict()))

    def run(self, *arguments: str, status: int = 0) -> str:
        code = [sys.executable, "-m", "nomarr_systemd.cli.main"]
        done = subprocess.run(
            [*code, "--user", "--config", str(self.config), "--fleet", *arguments],
            env=os.environ | {"HOME": str(self.place), "XDG_RUNTIME_DIR": str(self.place)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done
        return done.stderr if status not in (0, 3) else done.stdout

    def ask(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", status=status))


@pytest.fixture
def program(tmp_path: Path, postgres: Postgres) -> Program:
    postgres.sql(
        f"DROP SCHEMA IF EXISTS nomarr_work CASCADE; DROP ROLE IF EXISTS {WORKER};"
        f"CREATE ROLE {WORKER} LOGIN PASSWORD '{SECRET}';"
        f"CREATE SCHEMA nomarr_work AUTHORIZATION {WORKER}",
        database=DATABASE,
    )
    return Program(tmp_path, postgres.port)


@pytest.fixture
def store(program: Program, postgres: Postgres) -> Iterator[Store]:
    url = PostgresUrl(WORKER, (("127.0.0.1", postgres.port),), DATABASE, tls=False)
    assert program
    with closing(PostgresStore(url, "work", password=SECRET, timeout_s=20)) as store:
        yield store


def add_host(store: Store, host: str, states: dict[str, int], **about: Any) -> None:
    system = "healthy" if set(states) == {"healthy"} else "degraded"
    given = {"version": "1", "system": system, "pools": {"tag": states}}
    HostLease(host, host, "boot/0").renew(store, 30, given | about)


def test_all_hosts_the_worst_first(program: Program, store: Store) -> None:
    add_host(store, "alpha", {"healthy": 2})
    assert program.run("status").splitlines()[2].startswith("alpha (this host)  healthy")
    trouble = [{"worker": "tag-0", "status": "failed"}]
    add_host(store, "beta", {"healthy": 1, "failed": 1}, trouble=trouble, crashes=[CRASH])
    add_host(store, "gamma", {"healthy": 2})
    add_host(store, "delta", {"healthy": 2})
    stale, lost = store.get(HOSTS, "gamma"), store.get(HOSTS, "delta")
    assert stale is not None
    assert lost is not None
    store.replace(HOSTS, stale | {"renewed_ms": stale["renewed_ms"] - 60_000})
    assert declare_lost(store, read_lease(lost))
    shown = program.run("status", status=3).splitlines()
    assert shown[0] == "4 hosts: 1 lost, 1 stale, 1 degraded, 1 healthy"
    assert [line.split()[0] for line in shown[2:]] == ["delta", "gamma", "beta", "alpha"]
    assert "tag-0 failed" in shown[4]
    told = program.ask("status", status=3)
    assert [(each["name"], each["state"]) for each in told["hosts"]] == [
        *(("delta", "lost"), ("gamma", "stale"), ("beta", "up"), ("alpha", "up"))
    ]
    assert told["hosts"][1]["age_ms"] >= 60_000
    assert told["hosts"][2]["crashes"] == [CRASH]
    in_full = program.run("status", "beta", status=3)
    assert "Trouble: tag-0 failed" in in_full
    assert "killed by SIGSEGV; restart: 1 of 5" in in_full
    assert "there is no host 'betta'; did you mean beta?" in program.run(
        "status", "betta", status=4
    ).replace("\nhint: ", "; ").replace('"', "'")


def test_a_worker_that_is_unhealthy_is_told_apart_from_one_that_is_down(
    program: Program, store: Store
) -> None:
    add_host(store, "alpha", {"healthy": 1, "starting": 1})
    program.run("status")
    add_host(store, "alpha", {"healthy": 1, "unhealthy": 1})
    program.run("status", status=1)
    add_host(store, "alpha", {"healthy": 1, "unhealthy": 1, "stopped": 1})
    program.run("status", status=3)


def test_why_and_history_of_a_worker_of_another_host(program: Program, store: Store) -> None:
    add_host(store, "beta", {"failed": 1}, crashes=[CRASH])
    assert "killed by SIGSEGV" in program.run("history")
    assert program.ask("history")["records"] == [{"host": "beta", "name": "beta", **CRASH}]
    book_elsewhere(program, store, "beta", {"tag-0": 7})
    records = program.ask("history", "tag-0@beta")["records"]
    assert [each["code"] for each in records] == [1, 2, 3, 4, 5, 6, 7]
    assert {(each["component"], each["name"]) for each in records} == {("worker:tag:0", "beta")}
    assert "tag-0@beta" in program.run("history", "nomarr-worker@tag-0.service@beta")
    told = program.run("why", "worker:tag:0@beta")
    assert "worker:tag:0 on beta" in told
    assert "run nomarrctl why tag-0 there" in told
    deaths = program.ask("why", "tag-0@beta")["deaths"]
    assert [each["code"] for each in deaths] == [3, 4, 5, 6, 7]
    assert "tag-0@HOST" in program.run("why", "tag-0", status=2)


def book_elsewhere(
    program: Program,
    store: Store,
    host: str,
    deaths: dict[str, int],
    incidents: Sequence[Incident] = (),
) -> None:
    """What the controller and the supervisor of another host do: deaths of workers, of which each
    has another exit status, and incidents."""
    place = program.place / f"state-{host}"
    publisher = Publisher(str(place / "public"), host=host)
    with closing(SqliteStore(str(place), "policy", publisher=publisher)) as books:
        ledger = Ledger(books, host=host)
        for instance, number in deaths.items():
            name = parse_component(instance).component_id
            for n in range(1, number + 1):
                died = death(run(n), "exit", n, 12_000, component=name, held="paused")
                ledger.record_failure(died, PLAIN, at=at(n))
    publisher.publish_incidents(incidents)
    Archivist(str(place / "public"), host).run(store)


def test_all_that_is_on_record_of_a_host(program: Program, store: Store) -> None:
    """More deaths than a ring holds, and none of them seen by a supervisor."""
    add_host(store, "beta", {"failed": 1}, crashes=[CRASH])
    add_host(store, "gamma", {"healthy": 1})
    book_elsewhere(program, store, "beta", {"tag-0": 230, "tag-11": 3, "scan-0": 1})
    found = program.ask("history", "beta", "--limit", "1000")["records"]
    counts = Counter(each["component"] for each in found)
    assert counts == {"worker:tag:0": 230, "worker:tag:11": 3, "worker:scan:0": 1}
    mine = [each["code"] for each in found if each["component"] == "worker:tag:0"]
    assert mine == list(range(1, 231))
    assert len(program.ask("history", "tag-0@beta", "--limit", "1000")["records"]) == 230
    newest = program.ask("history", "beta", "--limit", "2")["records"]
    assert [each["code"] for each in newest] == [229, 230]
    assert "tag-0@beta" in program.run("history", "beta")
    assert program.run("history", "gamma") == "Nothing is on record.\n"
    assert "no host" in program.run("history", "omega", status=4)


def test_incidents_of_all_hosts(program: Program, store: Store) -> None:
    add_host(store, "beta", {"failed": 1}, crashes=[CRASH])
    add_host(store, "gamma", {"healthy": 1})
    closed = make(opened=at(10))._replace(
        refunds=(), closed="worker:tag:0 is healthy", closed_wall_ms=at(75).wall_ms, deaths=4
    )
    book_elsewhere(program, store, "beta", {"tag-0": 1, "tag-5": 1}, [closed])
    book_elsewhere(program, store, "gamma", {}, [make("scan", opened=at(20))])
    shown = program.run("history").splitlines()
    assert [line[21:].split(": ")[0] for line in shown[1:]] == [
        "incident", "incident", "the incident of tag@beta is over after 1 min 5 s and 4 deaths"
    ]  # fmt: skip
    assert "3 workers of tag@beta died alike" in shown[1]
    assert "3 workers of scan@gamma died alike" in shown[2]
    told = program.ask("history")["incidents"]
    assert [(each["name"], each["pool"], each["closed"]) for each in told] == [
        ("beta", "tag", "worker:tag:0 is healthy"), ("gamma", "scan", None)
    ]  # fmt: skip
    assert [each["name"] for each in program.ask("history", "beta")["incidents"]] == ["beta"]
    assert len(program.ask("history", "tag-0@beta")["incidents"]) == 1
    assert program.ask("history", "tag-5@beta")["incidents"] == [], "it was not in it"
    assert "tag@beta is over" in program.run("history", "tag-0@beta")
    assert len(program.ask("history", "--limit", "1")["incidents"]) == 1


def test_events_and_jobs_of_all_hosts(program: Program, store: Store) -> None:
    add_host(store, "beta", {"failed": 1}, crashes=[CRASH])
    assert json.loads(program.run("events", "--json"))["worker"] == "tag-0"
    assert program.run("events", "-n", "0") == ""
    queue.add(store, "tag", ["/one"], on_page=lambda _seen, _new: None)
    Claims(store, "tag", Owner("worker:tag:3", "e" * 32, "beta", "")).take_next()
    assert "worker:tag:3@beta" in program.run("jobs", "list")


def test_a_hostile_document_is_shown_in_one_clean_line(program: Program, store: Store) -> None:
    evil = "\x1b[2J\n<script>"
    store.insert(
        HOSTS,
        {
            "_key": "evil",
            "name": evil,
            "state": [],
            "renewed_ms": 1e300,
            "lease_ms": -5,
            "system": evil,
            "pools": {evil: {evil: "many"}, "x": 5},
            "trouble": [{"worker": evil, "status": evil}, 5],
            "crashes": [{"worker": evil, "wall_ms": evil, "cause": evil * 1000}],
        },
    )
    for command in (("status",), ("status", "evil"), ("history",), ("events",)):
        shown = program.run(*command, status=3 if command[0] == "status" else 0)
        assert "\x1b" not in shown
        assert len(shown.splitlines()) < 10
    assert program.ask("status", status=3)["hosts"][0]["state"] == "stale"


def test_a_store_of_one_host_has_no_fleet(program: Program, tmp_path: Path) -> None:
    text = f'[store]\nurl = "sqlite://{tmp_path}"\n[pool.tag]\nentrypoint = "a.b:C"\n'
    applied = tmp_path / ".local/state/nomarr/config.json"
    applied.write_text(json.dumps(parse(text).to_dict()))
    for command in (("status",), ("why", "tag-0@a"), ("history",), ("events",)):
        assert "SQLite, which is for one host" in program.run(*command, status=1)


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [[]], {"a": {"b": {}}}])
def test_a_view_of_any_value_does_not_raise(value: object) -> None:
    names = ("name", "state", "renewed_ms", "lease_ms", "version", "system", "pools", "trouble")
    doc = {"_key": "a"} | dict.fromkeys((*names, "crashes"), value)
    (host,) = view_hosts([doc], 5)
    assert json.dumps(host.to_json())
