"""Claims on every store: one that was lost is restored, a late request deletes no other's, and a
pool that fails has its pending jobs failed by one statement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.errors import StaleRevision
from nomarr_systemd.core.job import Owner, RunEnd, key_of
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.settlement import restore_claims, settle
from nomarr_systemd.store.protocol import Store
from tests.support.places import Place

RUN, OTHER = "a" * 32, "b" * 32
POOL = Pool("tag", crash_policy="restart-requeue-in-flight")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with closing(place.open("work")) as store:
        queue.add(store, "tag", ["/a", "/b"], on_page=lambda *_: None)
        yield store


def claims_of(store: Store, invocation: str = RUN) -> Claims:
    return Claims(store, "tag", Owner("worker:tag:0", invocation, "alpha"))


def lose_claims(store: Store) -> None:
    for claim in store.find(CLAIMS):
        store.delete(CLAIMS, claim["_key"], claim["_rev"])


def test_a_running_job_gets_its_claim_back_and_is_settled(store: Store) -> None:
    taken = claims_of(store).take_next()
    assert taken is not None
    (before,) = store.find(CLAIMS)
    lose_claims(store)
    assert restore_claims(store, "tag", 5) == 1
    (after,) = store.find(CLAIMS)
    names = ("_key", "job", "pool", "component_id", "invocation", "host")
    assert [after[name] for name in names] == [before[name] for name in names]
    assert restore_claims(store, "tag", 6) == 0
    outcome, _ = settle(store, POOL, RunEnd("worker:tag:0", RUN, "killed", 7))
    assert [each.job for each in outcome.settled] == [taken["_key"]]
    assert queue.find(store, "tag", "/a")["status"] == "pending"
    assert store.find(CLAIMS) == []


def test_a_living_run_ends_its_job_with_a_restored_claim(store: Store) -> None:
    claims = claims_of(store)
    taken = claims.take_next()
    assert taken is not None
    lose_claims(store)
    restore_claims(store, "tag", 5)
    assert claims.end(taken["_key"], End("done"))
    assert store.find(CLAIMS) == []


def test_a_job_that_ends_while_its_claim_is_looked_for_keeps_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as running, ended with its claim, and the claims are read only then."""
    claims = claims_of(store)
    taken = claims.take_next()
    assert taken is not None
    find = store.find

    def find_late(collection: str, *args: Any, **options: Any) -> Any:
        if collection == CLAIMS:
            monkeypatch.undo()
            assert claims.end(taken["_key"], End("done"))
        return find(collection, *args, **options)

    monkeypatch.setattr(store, "find", find_late)
    assert restore_claims(store, "tag", 5) == 0
    assert store.find(CLAIMS) == []
    assert queue.find(store, "tag", "/a")["status"] == "done"


def test_a_job_without_an_owner_is_left_alone(store: Store) -> None:
    for fields in ({"component_id": 5}, {"component_id": "worker:tag:0", "invocation": "x"}):
        doc = queue.find(store, "tag", "/a")
        store.replace(queue.JOBS, doc | {"status": "running", **fields})
        assert restore_claims(store, "tag", 5) == 0
    assert store.find(CLAIMS) == []


ENDS: dict[str, Callable[[Store, Claims, str], object]] = {
    "end": lambda _, claims, key: claims.end(key, End("pending")),
    "settle": lambda store, *_: settle(store, POOL, RunEnd("worker:tag:0", RUN, "killed", 1)),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_late_delete_leaves_the_next_workers_claim(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its answer was lost, and a proxy delivers the request once more."""
    key = key_of("tag", "/a")
    claims = claims_of(store)
    assert claims.take(key)
    sent: list[Any] = []
    delete = store.delete

    def spy(*request: Any) -> bool:
        sent.append(request)
        return delete(*request)

    monkeypatch.setattr(store, "delete", spy)
    ENDS[how](store, claims, key)
    monkeypatch.undo()
    assert claims_of(store, OTHER).take(key)
    for request in sent:
        with pytest.raises(StaleRevision):
            store.delete(*request)
    assert [claim["invocation"] for claim in store.find(CLAIMS)] == [OTHER]
    assert sent


def test_a_pool_that_fails_has_its_pending_jobs_failed_by_one_statement(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add(store, "tag", [f"/{n:04d}" for n in range(1500)], on_page=lambda *_: None)
    queue.add(store, "rip", ["/a"], on_page=lambda *_: None)
    written: list[str] = []
    replace = store.replace

    def spy(name: str, doc: dict[str, Any]) -> str:
        written.append(name)
        return replace(name, doc)

    monkeypatch.setattr(store, "replace", spy)
    pool = POOL._replace(crash_policy="fail-pool")
    outcome, _ = settle(store, pool, RunEnd("worker:tag:0", RUN, "killed by signal 9", 7))
    assert outcome.fail_pool
    assert queue.count(store, "tag") | {"error": 1502} == queue.count(store, "tag")
    assert queue.count(store, "rip")["pending"] == 1
    assert queue.JOBS not in written
    error = queue.find(store, "tag", "/0007")["error"]
    assert (error["type"], error["cause"]) == ("WorkerCrashedError", "killed by signal 9")


def test_a_pool_fails_while_its_workers_take_jobs(place: Place, store: Store) -> None:
    """Each job has one end: done before, or failed with the pool; none is left, none has both."""
    queue.add(store, "tag", [f"/{n:03d}" for n in range(120)], on_page=lambda *_: None)
    done: list[list[str]] = [[], [], []]
    begun = threading.Barrier(len(done) + 1)

    def work(number: int) -> None:
        with closing(place.open("work")) as own:
            claims = claims_of(own, f"{number:032x}")
            docs = claims.take_batch(2)
            begun.wait()
            while docs:
                key = docs.pop(0)["_key"]
                ours, docs = claims.end_and_take(key, End("done"), 2, docs)
                done[number] += [key] if ours else []

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(done))]
    for each in threads:
        each.start()
    begun.wait()
    pool = POOL._replace(crash_policy="fail-pool")
    assert settle(store, pool, RunEnd("worker:tag:9", OTHER, "killed", 7))[0].fail_pool
    for each in threads:
        each.join()
    counts = queue.count(store, "tag")
    ended = [key for each in done for key in each]
    assert len(ended) == len(set(ended)) == counts["done"]
    assert counts["done"] + counts["error"] == 122
    assert store.find(CLAIMS) == []


class TestJobOfRun:
    """What ``why`` shows of a run that died, when the supervisor no longer knows it."""

    def test_it_is_the_one_in_hand_and_no_other(self, store: Store) -> None:
        queue.add(store, "tag", ["/c"], on_page=lambda *_: None)
        claims = claims_of(store)
        assert queue.find_of_run(store, "tag", RUN) is None
        (first, *_) = claims.take_batch(1)
        claims.end_and_take(first["_key"], End("done"), 2)
        found = queue.find_of_run(store, "tag", RUN)
        assert (found or {})["path"] == "/b"
        settle(store, POOL, RunEnd("worker:tag:0", RUN, "killed", 7))
        found = queue.find_of_run(store, "tag", RUN)
        assert (found or {})["path"] == "/b"  # also when it is settled, and pending again

    def test_a_run_that_had_none_has_none(self, store: Store) -> None:
        claims = claims_of(store)
        while doc := claims.take_next():
            claims.end(doc["_key"], End("done"))
        assert queue.find_of_run(store, "tag", RUN) is None
