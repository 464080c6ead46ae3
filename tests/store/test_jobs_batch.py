"""A worker's source of jobs on SQLite: one durable commit for each job, and batches."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.config.values import Pool, StoreSettings
from nomarr_systemd.core.errors import NotReady
from nomarr_systemd.core.job import CrashPolicy, Owner, RunEnd
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims
from nomarr_systemd.jobs.settlement import settle
from nomarr_systemd.jobs.store_source import StoreJobs
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore

RUN, OTHER = "a" * 32, "b" * 32
PATHS = [f"/{n}" for n in range(9)]
Open = Callable[..., StoreJobs]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        queue.add(store, "tag", PATHS, on_page=lambda *_: None)
        yield store


@pytest.fixture
def open_source(store: SqliteStore, tmp_path: Path) -> Iterator[Open]:
    opened: list[StoreJobs] = []

    def open_one(batch: int, invocation: str = RUN) -> StoreJobs:
        source = StoreJobs(
            StoreSettings(f"sqlite://{tmp_path}"),
            "worker:tag:0",
            invocation,
            gpu_max_age_s=60,
            state_directory=str(tmp_path),
            claim_batch=batch,
        )
        opened.append(source)
        return source

    yield open_one
    for source in opened:
        source.close(lambda _: None)


def take(source: StoreJobs) -> str | None:
    job = source.discover()
    assert job is None or source.claim(job)
    return job


def jobs(store: SqliteStore) -> dict[str, Doc]:
    return {doc["path"]: doc for doc in queue.walk(store, "tag")}


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_each_job_is_one_commit_and_the_order_is_that_of_keys(
    open_source: Open, store: SqliteStore, batch: int
) -> None:
    source, seen = open_source(batch), list[str]()
    done = [take(source)]
    used = source._store
    assert isinstance(used, SqliteStore)
    used._file.run(lambda db: db.set_trace_callback(seen.append))
    while (job := done[-1]) is not None:
        source.complete(job, {"n": len(done)})
        done.append(take(source))
    assert done == [*PATHS, None]
    assert seen.count("COMMIT") == len(PATHS)
    kinds = "".join({"BEGIN IMMEDIATE": "(", "COMMIT": ")"}.get(each, ".") for each in seen)
    assert re.fullmatch(r"(\(\.+\))+", kinds)  # nothing is read or written outside of them
    assert queue.count(store, "tag")["done"] == len(PATHS)
    assert {doc["attempts"] for doc in jobs(store).values()} == {1}
    assert store.find(CLAIMS) == []


def test_two_workers_with_batches_pass_each_other_over(
    open_source: Open, store: SqliteStore
) -> None:
    first, second = open_source(3), open_source(3, OTHER)
    assert (take(first), take(second)) == ("/0", "/3")
    first.complete("/0", None)
    second.fail("/3", ValueError("broken"))
    assert (take(first), take(second)) == ("/1", "/4")
    assert [jobs(store)[path]["status"] for path in PATHS[:7]] == [
        *("done", "running", "running"),
        *("error", "running", "running", "pending"),
    ]


@pytest.mark.parametrize("how", ["stop", "release"])
def test_who_stops_or_waits_puts_the_rest_back(
    open_source: Open, store: SqliteStore, how: str
) -> None:
    source = open_source(4)
    assert take(source) == "/0"
    if how == "stop":
        source.complete("/0", None)
        source.close(lambda _: None)
    else:
        source.release("/0")
    found = jobs(store)
    assert found["/0"]["status"] == ("done" if how == "stop" else "pending")
    assert {found[path]["status"] for path in PATHS[1:]} == {"pending"}
    assert {found[path]["attempts"] for path in PATHS[1:]} == {0}
    assert store.find(CLAIMS) == []
    assert take(open_source(1, OTHER)) == ("/1" if how == "stop" else "/0")


@pytest.mark.parametrize(
    ("policy", "status"),
    [("restart-fail-in-flight", "error"), ("restart-requeue-in-flight", "pending")],
)
@pytest.mark.parametrize("done", [0, 1])
def test_a_death_is_held_against_the_job_in_hand_alone(
    open_source: Open, store: SqliteStore, policy: CrashPolicy, status: str, done: int
) -> None:
    source = open_source(4)
    assert take(source) == "/0"
    if done:
        source.complete("/0", None)
        assert take(source) == "/1"
    end = RunEnd("worker:tag:0", RUN, "killed by signal 9", 5)
    outcome, is_new = settle(store, Pool("tag", crash_policy=policy), end)
    assert [each.path for each in outcome.settled] == [f"/{done}"]
    assert is_new
    found = jobs(store)
    assert found[f"/{done}"]["status"] == status
    assert len(found[f"/{done}"]["crashes"]) == 1
    for path in PATHS[done + 1 :]:
        doc = found[path]
        assert (doc["status"], doc["attempts"], doc.get("crashes")) == ("pending", 0, None)
        assert doc.get("invocation") is None
    assert store.find(CLAIMS) == []
    assert settle(store, Pool("tag", crash_policy=policy), end) == (outcome, False)


def test_a_pool_that_fails_fails_the_whole_batch(open_source: Open, store: SqliteStore) -> None:
    source = open_source(4)
    assert take(source) == "/0"
    end = RunEnd("worker:tag:1", OTHER, "killed by signal 9", 5)
    assert settle(store, Pool("tag", crash_policy="fail-pool"), end)[0].fail_pool
    assert {doc["status"] for doc in jobs(store).values()} == {"error"}
    source.complete("/0", None)
    assert take(source) is None  # none of the batch is begun


def test_where_hosts_share_the_queue_the_rest_is_for_the_others(store: SqliteStore) -> None:
    for number, invocation in enumerate((RUN, OTHER)):
        owner = Owner(f"worker:tag:{number}", invocation, "alpha")
        assert len(Claims(store, "tag", owner).take_batch(3)) == 3
    pool = Pool("tag", crash_policy="fail-pool")
    end = RunEnd("worker:tag:0", RUN, "killed by signal 9", 5)
    assert settle(store, pool, end, "alpha")[0].fail_pool
    found = jobs(store)
    assert [path for path in PATHS if found[path]["status"] == "error"] == ["/0", "/3"]
    assert {found[path]["status"] for path in PATHS} == {"error", "pending"}
    assert {found[path]["attempts"] for path in PATHS if path not in ("/0", "/3")} == {0}
    assert store.find(CLAIMS) == []


def test_a_job_of_the_batch_that_was_taken_away_is_not_begun(
    open_source: Open, store: SqliteStore
) -> None:
    source = open_source(4)
    assert take(source) == "/0"
    claims = Claims(store, "tag", Owner("worker:tag:0", RUN))
    claims.put_back([jobs(store)[path]["_key"] for path in ("/1", "/2")])
    other = Claims(store, "tag", Owner("worker:tag:1", OTHER))
    assert (other.take_next() or {})["path"] == "/1"
    source.complete("/0", None)
    assert take(source) == "/3"


@pytest.mark.parametrize("batch", [1, 4])
def test_an_end_that_cannot_be_recorded_is_kept_and_recorded_once(
    open_source: Open, store: SqliteStore, tmp_path: Path, batch: int
) -> None:
    source = open_source(batch)
    assert take(source) == "/0"
    source.complete("/0", {"kept": True})
    os.rename(tmp_path / "work", tmp_path / "aside")
    (tmp_path / "work").write_text("in the way")
    with pytest.raises(NotReady):
        source.discover()
    assert len(list(tmp_path.glob("owed-*.json"))) == 1
    (tmp_path / "work").unlink()
    os.rename(tmp_path / "aside", tmp_path / "work")
    assert take(source) == "/1"
    assert jobs(store)["/0"]["result"] == {"kept": True}
    assert list(tmp_path.glob("owed-*.json")) == []
    assert [claim["job"] for claim in store.find(CLAIMS)] == [
        jobs(store)[path]["_key"] for path in PATHS[1 : batch + (batch == 1)]
    ]
