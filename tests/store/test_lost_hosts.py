"""Hosts that share a store: leases, and the jobs of a host that is lost, on every backend."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest

from nomarr_systemd.config.values import Config, Pool, StoreSettings
from nomarr_systemd.core.job import HOST_LOST, CrashPolicy, Owner, RunEnd
from nomarr_systemd.core.lease import RENEWALS, Lease, PoolRules, write_rules
from nomarr_systemd.fleet.leases import FORGET_MS, HostLease, Renewal, find_late
from nomarr_systemd.jobs import queue, stats
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.lost_hosts import REST_S, Found, LostHosts
from nomarr_systemd.jobs.queue import JOBS
from nomarr_systemd.jobs.settlement import clear_pool, failure_of, settle
from nomarr_systemd.jobs.stats import GpuHealth
from nomarr_systemd.store.protocol import HOSTS, Doc, Store
from nomarr_systemd.supervisor.job_settler import Sweep
from nomarr_systemd.supervisor.settle_thread import SettleThread
from tests.support.places import Place
from tests.support.postgres import Postgres

Opener = Callable[..., Store]
POLICIES: tuple[CrashPolicy, ...] = (
    "restart-fail-in-flight",
    "restart-requeue-in-flight",
    "fail-pool",
)
LEASE_S = 30.0
LONG_S = 1000.0  # by our clock; the store's moves with age()


def run_of(host: str) -> str:
    return {"a": "a" * 32, "b": "b" * 32, "c": "c" * 32}[host]


def begin(store: Store, host: str, policy: CrashPolicy = "restart-fail-in-flight") -> Claims:
    """A host that holds a lease, and its worker."""
    about = {"rules": write_rules([PoolRules("tag", policy, None, 2)])}
    HostLease(host, f"host-{host}", f"boot-{host}").renew(store, LEASE_S, about)
    return Claims(store, "tag", Owner("worker:tag:0", run_of(host), host, f"boot-{host}"))


def age(store: Store, host: str, by_ms: int = 60_000) -> None:
    """As if the host had not renewed its lease for this long."""
    doc = store.get(HOSTS, host)
    assert doc is not None
    store.replace(HOSTS, doc | {"renewed_ms": doc["renewed_ms"] - by_ms})


def find_lost(lost: LostHosts, store: Store, at_s: float = 0.0) -> list[Found]:
    """Two looks, as far apart as it takes to be sure."""
    return [*lost.look(store, at_s, 1), *lost.look(store, at_s + LEASE_S / 2, 1)]


@pytest.fixture
def work(open_store: Opener) -> Store:
    return open_store("work")


def job_of(store: Store, path: str) -> Doc:
    return queue.find(store, "tag", path)


def add(store: Store, *paths: str) -> None:
    queue.add(store, "tag", paths, on_page=lambda _seen, _new: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_jobs_of_a_lost_host_are_settled_by_its_own_policy(
    work: Store, policy: CrashPolicy
) -> None:
    a = begin(work, "a", policy)
    begin(work, "b")
    add(work, "/one", "/two")
    taken = a.take_next()
    assert taken is not None
    names: list[str] = []
    lost = LostHosts("b", lambda lease: names.append(lease.name))
    assert find_lost(lost, work) == []
    age(work, "a")
    (found,) = find_lost(lost, work, LONG_S)
    assert names == ["host-a"]
    wanted = "pending" if policy == "restart-requeue-in-flight" else "error"
    assert [each.status for each in found.outcome.settled] == [wanted]
    assert not found.outcome.counted
    assert not found.outcome.fail_pool
    assert work.find(CLAIMS) == []
    assert job_of(work, taken["path"])["status"] == wanted
    assert job_of(work, taken["path"])["error"]["cause"] == HOST_LOST
    other = {"/one": "/two", "/two": "/one"}[taken["path"]]
    assert job_of(work, other)["status"] == "pending"
    assert failure_of(work, "tag", "a") == failure_of(work, "tag", "b") == ""
    assert find_lost(lost, work, 2 * LONG_S) == []  # once


def test_of_many_hosts_one_settles(place: Place, work: Store) -> None:
    a = begin(work, "a", "restart-requeue-in-flight")
    add(work, *(f"/{n}" for n in range(5)))
    for _ in range(5):
        assert a.take_next() is not None
    age(work, "a")
    told: list[Lease] = []
    found: list[Found] = []

    def take_part(number: int) -> None:
        with closing(place.open("work")) as store:
            begin(store, "c")
            found.extend(find_lost(LostHosts(f"x{number}", told.append), store))

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lease.host for lease in told] == ["a"]
    assert len(found) == 1
    # It had the first one in hand; the others are the rest of a batch.
    assert len(found[0].outcome.settled) == 1
    assert queue.count(work, "tag")["pending"] == 5
    assert [len(doc.get("crashes", ())) for doc in work.find(JOBS)] == [1, 0, 0, 0, 0]


def test_a_host_that_comes_back_finds_out_and_doubles_nothing(work: Store) -> None:
    lease = HostLease("a", "host-a", "boot-a")
    assert lease.renew(work, LEASE_S, {}) == Renewal(was_lost=False, is_contested=False)
    a, b = begin(work, "a", "restart-requeue-in-flight"), begin(work, "b")
    add(work, "/one")
    taken = a.take_next()
    assert taken is not None
    age(work, "a")
    assert len(find_lost(LostHosts("b", lambda _lease: None), work)) == 1
    # Another host begins the job that was put back; the worker of the first ends it now.
    again = b.take_next()
    assert again is not None
    assert again["_key"] == taken["_key"]
    assert not a.end(taken["_key"], End("done", 1))
    assert b.end(taken["_key"], End("done", 2))
    assert not a.end(taken["_key"], End("done", 1))
    doc = job_of(work, "/one")
    assert (doc["status"], doc["result"], doc["attempts"], doc["host"]) == ("done", 2, 2, "b")
    assert lease.renew(work, LEASE_S, {}) == Renewal(was_lost=True, is_contested=False)
    assert lease.renew(work, LEASE_S, {}) == Renewal(was_lost=False, is_contested=False)
    assert find_late(work, work.now_ms()) == []
    # Its controller reports the death of the run that was settled: it is counted, nothing more.
    end = RunEnd("worker:tag:0", run_of("a"), "exit status 1", 5)
    outcome, _ = settle(work, Pool("tag"), end, "a")
    assert [each.status for each in outcome.settled] == ["pending"]
    assert job_of(work, "/one")["status"] == "done"


def test_a_lease_that_was_renewed_in_time_is_kept(work: Store) -> None:
    lease = HostLease("a", "host-a", "boot-a")
    lease.renew(work, LEASE_S, {})
    lost = LostHosts("b", lambda _lease: pytest.fail("it is there"))
    age(work, "a")
    assert list(lost.look(work, 0.0, 1)) == []
    lease.renew(work, LEASE_S, {})
    assert list(lost.look(work, LONG_S, 1)) == []


def test_two_machines_with_one_name_are_told_apart(work: Store) -> None:
    first, second = (HostLease("a", "host-a", holder) for holder in ("boot-1", "boot-2"))
    assert not first.renew(work, LEASE_S, {}).is_contested
    assert not second.renew(work, LEASE_S, {}).is_contested  # as after a reboot
    assert first.renew(work, LEASE_S, {}).is_contested
    assert second.renew(work, LEASE_S, {}).is_contested
    assert not second.renew(work, LEASE_S, {}).is_contested


def test_a_machine_with_the_name_of_another_settles_no_job_of_it(
    work: Store, tmp_path: Path
) -> None:
    """Its boot id differs, so the claims of the other look like those from before a boot."""
    a = begin(work, "a")
    add(work, "/one")
    assert a.take_next() is not None
    config = Config(
        store=StoreSettings("postgresql://u@localhost/x", host="a"), pools=(Pool("tag"),)
    )
    settling = SettleThread(SimpleQueue(), str(tmp_path), lambda _report: None, Event())
    settling._store = work

    def look(*, is_renewed: bool = True) -> str:
        settling._renewal = {} if is_renewed else None
        settling._sweep = Sweep({})
        settling._work(config, 1.0)
        return str(job_of(work, "/one")["status"])

    first = HostLease("a", "host-a", "boot-a")
    assert look(is_renewed=False) == "running"  # nothing is known yet
    assert look() == "running"
    first.renew(work, LEASE_S, {})
    assert look() == "running"
    # From here on nobody else renews it: it was this machine, before a boot.
    found = [look() for _ in range(RENEWALS)]
    assert found == [*["running"] * (RENEWALS - 1), "error"]


def test_a_host_looks_for_jobs_without_a_claim_of_pools_that_the_first_does_not_have(
    work: Store, tmp_path: Path
) -> None:
    begin(work, "a")  # it has the pool tag
    for pool in ("mix", "tag"):
        queue.add(work, pool, ["/one"], on_page=lambda _seen, _new: None)
        owner = Owner(f"worker:{pool}:0", run_of("b"), "b", "boot-b")
        assert Claims(work, pool, owner).take_next() is not None
    for claim in work.find(CLAIMS):
        work.delete(CLAIMS, claim["_key"])
    pools = (Pool("mix"), Pool("tag"))
    config = Config(store=StoreSettings("postgresql://u@localhost/x", host="b"), pools=pools)
    settling = SettleThread(SimpleQueue(), str(tmp_path), lambda _report: None, Event())
    settling._store, settling._sweep = work, Sweep({})
    settling._work(config, 1.0)
    assert [claim["pool"] for claim in work.find(CLAIMS)] == ["mix"]


def test_a_lease_that_was_over_is_taken_at_once(work: Store) -> None:
    begin(work, "a")
    age(work, "a")
    assert not HostLease("a", "host-a", "boot-2").renew(work, LEASE_S, {}).is_unsure


def test_a_job_that_takes_hosts_down_is_quarantined(work: Store) -> None:
    add(work, "/killer")
    for number, host in enumerate(("a", "c")):
        claims = begin(work, host, "restart-requeue-in-flight")
        assert claims.take_next() is not None
        age(work, host)
        (found,) = find_lost(LostHosts("b", lambda _lease: None), work, number * LONG_S)
        assert found.outcome.refund == ()
    assert job_of(work, "/killer")["status"] == "quarantined"


def test_what_a_killed_host_left_half_done_is_finished_by_the_first(work: Store) -> None:
    """Killed between the note that a host is lost and the settlement of its jobs."""
    a = begin(work, "a")
    begin(work, "b")
    begin(work, "c")
    add(work, "/one")
    assert a.take_next() is not None
    age(work, "a")
    doomed = LostHosts("c", lambda _lease: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        find_lost(doomed, work)
    assert work.find(CLAIMS) != []
    second, first = (LostHosts(host, lambda _lease: None) for host in ("c", "b"))
    for at_s in (0.0, REST_S):
        assert list(second.look(work, at_s, 1)) == []
    assert list(first.look(work, 0.0, 1)) == []
    assert len(list(first.look(work, REST_S, 1))) == 1
    assert work.find(CLAIMS) == []
    assert job_of(work, "/one")["status"] == "error"


def test_a_host_that_is_back_keeps_the_claims_that_it_makes(work: Store) -> None:
    a = begin(work, "a")
    begin(work, "b")
    add(work, "/one")
    age(work, "a")
    lost = LostHosts("b", lambda _lease: None)
    assert find_lost(lost, work) == []
    assert a.take_next() is not None  # its worker was faster than its supervisor
    assert list(lost.look(work, LONG_S, 1)) == []
    begin(work, "a")
    assert list(lost.look(work, LONG_S + 2 * REST_S, 1)) == []
    assert job_of(work, "/one")["status"] == "running"


def test_a_damaged_lease_hides_no_other(work: Store) -> None:
    a = begin(work, "a")
    add(work, "/one")
    assert a.take_next() is not None
    work.insert(HOSTS, {"_key": "0", "state": "held", "renewed_ms": 1, "name": {}})
    work.insert(HOSTS, {"_key": "1", "state": "held"})
    age(work, "a")
    assert len(find_lost(LostHosts("b", lambda _lease: None), work)) == 1


NO_CLAIMS: tuple[Doc, ...] = (
    {},
    {"component_id": "nonsense", "invocation": "x"},
    {"component_id": ["worker:tag:0"], "invocation": {}},
    {"component_id": "worker:tag:1", "invocation": "d" * 32, "pool": "tag", "job": "no key /"},
    {"component_id": "worker:tag:2", "invocation": "e" * 32, "pool": "tag", "job": {}},
    {"component_id": "worker:tag:3", "invocation": "f" * 32, "pool": "tag", "job": "tag:bad:0"},
)


def test_damaged_claims_and_jobs_keep_no_other_from_being_settled(work: Store) -> None:
    """Workers may write anything into this store."""
    a = begin(work, "a")
    begin(work, "b")
    add(work, "/one")
    assert a.take_next() is not None
    work.insert(JOBS, {"_key": "tag:bad:0", "status": "running", "invocation": "f" * 32})
    for number, claim in enumerate(NO_CLAIMS):
        work.insert(CLAIMS, {"_key": f"{number}", "host": "a", **claim})
    age(work, "a")
    found = find_lost(LostHosts("b", lambda _lease: None), work)
    assert [each.job for _, outcome in found for each in outcome.settled] == [
        job_of(work, "/one")["_key"]
    ]
    assert job_of(work, "/one")["status"] == "error"


def test_hosts_that_were_lost_long_ago_are_forgotten(work: Store) -> None:
    for host in ("a", "b", "c"):
        begin(work, host)
    age(work, "a", FORGET_MS + 60_000)
    age(work, "c")
    lost = LostHosts("b", lambda _lease: None)
    find_lost(lost, work)
    assert list(lost.look(work, LONG_S, 1)) == []
    assert [(doc["_key"], doc["state"]) for doc in work.find(HOSTS)] == [
        ("b", "held"),
        ("c", "lost"),
    ]


def test_each_host_has_figures_a_gpu_and_books_of_its_own(work: Store) -> None:
    for host, average in (("a", 1.5), ("b", 2.5)):
        stats.publish(work, "worker:tag:0", {"avg_time_s": average}, host)
        stats.report_gpu(work, GpuHealth(host == "a"), host)
    assert stats.read_average(work, "worker:tag:0", "a") == 1.5
    assert stats.read_average(work, "worker:tag:0", "b") == 2.5
    health = {host: stats.read_gpu(work, 60, host) for host in ("a", "b", "c")}
    assert {host: each and each.available for host, each in health.items()} == {
        "a": True,
        "b": False,
        "c": None,
    }


def test_a_pool_that_fails_on_one_host_leaves_the_queue_to_the_others(work: Store) -> None:
    a, b = begin(work, "a"), begin(work, "b")
    add(work, "/1", "/2", "/3")
    mine, other = a.take_next(), b.take_next()
    assert mine is not None
    assert other is not None
    end = RunEnd("worker:tag:0", run_of("a"), "killed by signal 9", 1)
    outcome, _ = settle(work, Pool("tag", crash_policy="fail-pool"), end, "a")
    assert outcome.fail_pool == failure_of(work, "tag", "a") != ""
    assert failure_of(work, "tag", "b") == ""
    assert job_of(work, mine["path"])["status"] == "error"
    assert job_of(work, other["path"])["status"] == "running"
    assert queue.count(work, "tag")["pending"] == 1
    clear_pool(work, "tag", "a")
    assert failure_of(work, "tag", "a") == ""


def test_a_store_of_an_older_version_gets_the_table(place: Place) -> None:
    with closing(place.open("work")) as store:
        begin(store, "a")
    if place.server is None:
        with closing(sqlite3.connect(f"{place.directory}/work/work.db")) as db:
            db.execute("DROP TABLE hosts")
    elif isinstance(place.server, Postgres):
        place.server.sql("DROP TABLE nomarr_work.hosts", database=place.database)
    with closing(place.open("work")) as store:
        add(store, "/one")
        begin(store, "a")
        assert [doc["_key"] for doc in store.find(HOSTS)] == ["a"]
