"""Three hosts, each a private systemd, on a real PostgreSQL with a streaming standby: they share a
queue, one of them is killed whole, and the primary is killed in the middle of everything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.job import HOST_LOST
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.protocol import HOSTS, Doc
from tests.support.fleet_site import Host, Servers, make_hosts, run_servers
from tests.support.lab import Lab

NAMES = ("alpha", "beta", "gamma")
JOBS = 2000
POLICY = """
[policy]
backoff_base_s = 1
backoff_max_s = 1
backoff_jitter = 0
max_restarts = 100
max_lifetime_restarts = 0
"""
# It dies as long as ``broken`` is there, and notes every run.
MORTAL = """\
#!/bin/sh
echo "$INVOCATION_ID" >> {lab}/runs
systemd-notify --ready
while [ ! -e {place}/broken ]; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 0.2
done 3>"$NOMARR_HEALTH_PIPE"
exit 1
"""


@pytest.fixture
def servers() -> Iterator[Servers]:
    with run_servers() as running:
        yield running


@pytest.fixture
def labs() -> Iterator[list[Lab]]:
    with make_hosts(NAMES) as labs:
        yield labs


def by_name(docs: list[Doc]) -> dict[str, Doc]:
    return {Path(doc["path"]).name: doc for doc in docs}


def test_a_host_is_killed_whole(servers: Servers, labs: list[Lab], tmp_path: Path) -> None:
    """Its jobs are settled by the others: failed or begun again, by the policy of their pool; and
    it takes jobs again when it is back."""
    pools = {
        "once": (1, 'crash_policy = "restart-fail-in-flight"'),
        "again": (1, 'crash_policy = "restart-requeue-in-flight"'),
    }
    hosts = [Host(lab, servers, tmp_path, pools, POLICY) for lab in labs]
    alpha, _, gamma = hosts
    for pool in pools:
        paths = [str(tmp_path / f"wait-{number}-{pool}") for number in range(3)]
        alpha.good("jobs", "add", "--pool", pool, *paths)

    def all_running() -> bool:
        return Counter(doc["status"] for doc in servers.jobs()) == {"running": 6}

    alpha.lab.wait_for(all_running, what="each worker has a job")
    running = servers.jobs()
    ids = {each["name"].rpartition("-")[0]: each["host"] for each in alpha.fleet()}
    assert len(set(ids.values())) == 3  # made from their machine-ids: none was configured
    for pool in pools:
        of_pool = [doc for doc in running if doc["pool"] == pool]
        assert {doc["host"] for doc in of_pool} == set(ids.values())
    shown = alpha.good("--fleet", "jobs", "list")
    assert all(f"worker:once:0@{name}-" in shown for name in NAMES)
    lost = {doc["pool"]: Path(doc["path"]).name for doc in running if doc["host"] == ids["gamma"]}

    gamma.lab.end()
    alpha.lab.wait_for(lambda: alpha.states().get("gamma") == "lost", what="gamma is lost")
    assert alpha.ctl("--fleet", "status").returncode == 3
    assert alpha.fleet()[0]["host"] == ids["gamma"]  # the worst is first
    alpha.lab.wait_for(lambda: len(servers.claims()) == 4, what="its jobs are settled")
    jobs = by_name(servers.jobs())
    assert jobs[lost["once"]]["status"] == "error"
    assert jobs[lost["once"]]["error"]["cause"] == HOST_LOST
    assert jobs[lost["again"]]["status"] == "pending"
    for name in jobs:
        (tmp_path / f"{name}.go").touch()

    def all_ended() -> bool:
        return Counter(doc["status"] for doc in servers.jobs()) == {"done": 5, "error": 1}

    alpha.lab.wait_for(all_ended, what="all jobs have their end")
    jobs = by_name(servers.jobs())
    assert servers.claims() == []
    assert jobs[lost["again"]]["host"] != ids["gamma"]
    begun = Counter(
        line.split()[0]
        for pool in pools
        for line in (tmp_path / f"begun-{pool}").read_text().splitlines()
    )
    assert begun == {name: 2 if name == lost["again"] else 1 for name in jobs}
    assert {name: doc["attempts"] for name, doc in jobs.items()} == dict(begun)

    # It is started again, and has its place in the fleet and a share of the jobs.
    with make_hosts(["gamma"]) as (again,):
        host = Host(again, servers, tmp_path, {"once": pools["once"]}, POLICY)
        again.wait_for(lambda: host.states() == dict.fromkeys(NAMES, "up"), what="up")
        for other in hosts[:2]:
            other.lab.systemctl("stop", "nomarr-worker@once-0.service")
        host.good("jobs", "add", "--pool", "once", str(tmp_path / "more"))
        again.wait_for(
            lambda: by_name(servers.jobs())["more"]["status"] == "done",
            what="it does a job",
        )
        assert by_name(servers.jobs())["more"]["host"] == ids["gamma"]


def test_the_primary_is_killed_in_the_middle_of_everything(
    servers: Servers, labs: list[Lab], tmp_path: Path
) -> None:
    """Of a crash loop on each host and of 2,000 jobs: every failure is booked once, every job is
    done once, and no host is taken for lost, nor the long job that each has in hand."""
    hosts = []
    for lab in labs:
        mortal = MORTAL.replace("{lab}", lab.directory).replace("{place}", str(tmp_path))
        program = lab.write_program("mortal", mortal)
        loop = f'{POLICY}[pool.loop]\ncommand = ["{program}"]\nwatchdog_s = 3600\n'
        hosts.append(Host(lab, servers, tmp_path, {"tag": (2, ""), "long": (1, "")}, loop))
    alpha = hosts[0]
    longs = [str(tmp_path / f"wait-{number}") for number in range(3)]
    alpha.good("jobs", "add", "--pool", "long", *longs)
    names = [f"job-{number:04d}" for number in range(JOBS)]
    held = [
        f"wait-job-{number}" for number in range(6)
    ]  # for each worker, so that not all are done
    names[-JOBS // 4 : -JOBS // 4 + len(held)] = held
    listed = tmp_path / "jobs"
    listed.write_text("".join(f"{tmp_path}/{name}\n" for name in names))
    (tmp_path / "broken").touch()

    def jobs_of(pool: str) -> list[Doc]:
        return [doc for doc in servers.jobs() if doc["pool"] == pool]

    def count_done(pool: str = "tag") -> int:
        return sum(doc["status"] == "done" for doc in jobs_of(pool))

    def all_long_run() -> bool:
        return len({doc["host"] for doc in jobs_of("long") if doc["status"] == "running"}) == 3

    def runs_of(host: Host) -> list[str]:
        return Path(host.lab.directory, "runs").read_text().split()

    def has_died(host: Host, times: int) -> bool:
        return len(runs_of(host)) > times

    for host in hosts:
        host.lab.wait_for(lambda: has_died(host, 2), what="the loop")  # noqa: B023
    alpha.lab.wait_for(all_long_run, what="each host has a long job")
    alpha.good("jobs", "add", "--pool", "tag", "--from-file", str(listed))
    alpha.lab.wait_for(lambda: count_done() >= JOBS // 10, what="some jobs")
    at_failover = {host.lab.name: len(runs_of(host)) for host in hosts}
    assert count_done() < JOBS
    servers.kill_primary()
    for name in held:
        (tmp_path / f"{name}.go").touch()
    # For so long that no host could have renewed its lease.
    alpha.lab.wait_for(servers.are_leases_over, what="all leases are over")
    servers.promote()
    for host in hosts:
        before = at_failover[host.lab.name]
        host.lab.wait_for(
            lambda: has_died(host, before + 2),  # noqa: B023
            what="the loop goes on",
        )
    (tmp_path / "broken").unlink()
    alpha.lab.wait_for(lambda: count_done() == JOBS, what="all jobs")
    assert all_long_run()
    for path in longs:
        Path(f"{path}.go").touch()
    alpha.lab.wait_for(lambda: count_done("long") == 3, what="the long jobs")
    assert servers.claims() == []
    begun = [line.split()[0] for line in (tmp_path / "begun-tag").read_text().splitlines()]
    assert Counter(begun) == Counter(names)
    assert {doc["attempts"] for doc in servers.jobs()} == {1}
    assert len({doc["host"] for doc in servers.jobs()}) == 3

    ids = {each["name"].rpartition("-")[0]: each["host"] for each in alpha.fleet()}
    for host in hosts:
        host.wait_until_healthy("loop-0")
        host.lab.systemctl("start", "nomarr-reconcile.service")
        *dead, _ = runs_of(host)
        with closing(servers.open("policy")) as store:
            records = Ledger(store, host=ids[host.lab.name]).account("worker:loop:0").records
        booked = [each.invocation for each in records if each.action == "restart"]
        assert sorted(booked) == sorted(dead)
        assert list(Path(host.state, "spool").iterdir()) == []
    with closing(servers.open()) as store:
        assert {doc["state"] for doc in store.find(HOSTS)} == {"held"}
        outcomes = [
            record
            for doc in store.find("stats")
            if doc["_key"].startswith(("pool:tag", "pool:long"))
            for record in doc["records"]
        ]
    assert outcomes == [], json.dumps(outcomes)
