"""Samples of health condensed into series: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.health import Sample
from nomarr_systemd.ledger import health_series
from nomarr_systemd.ledger.health_history import COLLECTION, append
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.supervisor.query_thread import read_history

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NAME = "worker:tag:0"
NOW_MS = 1_800_000_000_000 // (10 * DAY_MS) * 10 * DAY_MS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        yield store


def sample(at_ms: int, status: str = "healthy", run: str = "a", name: str = NAME) -> Sample:
    return Sample(name, at_ms, status, run * 32, 0, 0, 0, "", b"")


def count(buckets: list[health_series.Bucket], letter: str = "") -> int:
    return sum(n for each in buckets for key, n in each.counts.items() if letter in ("", key))


def read(
    store: SqliteStore, name: str, since_ms: int, until_ms: int, points: int, *, now_ms: int
) -> list[health_series.Bucket]:
    """The same, alone and among others."""
    one, many = (
        health_series.SeriesReader(store, now_ms, many=many).read(name, since_ms, until_ms, points)
        for many in (False, True)
    )
    assert one == many
    return one


def fill(store: SqliteStore, days: int, every_ms: int = 300_000) -> int:
    """One sample for each step, condensed as the supervisor does; how many there are."""
    made = 0
    for start in range(NOW_MS - days * DAY_MS, NOW_MS, 6 * HOUR_MS):
        samples = [sample(at) for at in range(start, start + 6 * HOUR_MS, every_ms)]
        append(store, samples)
        made += len(samples)
        health_series.condense(store, start + 6 * HOUR_MS)
    return made


def test_every_sample_is_counted_once_and_old_layers_are_deleted(store: SqliteStore) -> None:
    made = fill(store, 130, every_ms=1_800_000)
    since_ms = NOW_MS - 130 * DAY_MS
    for points in (1, 7, 400, 2000):
        found = read(store, NAME, since_ms, NOW_MS, points, now_ms=NOW_MS)
        assert count(found) == made
        starts = [each.start_ms for each in found]
        assert starts == sorted(set(starts))
    assert store.find(COLLECTION) == []
    keys = [doc["_key"] for doc in store.find("stats")]
    fine = [key for key in keys if ":30s:" in key]
    middle = [key for key in keys if ":10min:" in key]
    assert len(fine) <= 3 * 8 + 2
    assert len(middle) <= 9 + 2
    assert sum(":6h:" in key for key in keys) in (1, 2)


def test_a_span_that_is_over_is_read_from_what_is_left_of_it(store: SqliteStore) -> None:
    made = fill(store, 30, every_ms=1_800_000)
    until_ms = NOW_MS - 10 * DAY_MS  # the fine layer of then is deleted
    query = read_history(
        "", {"components": [NAME], "since_ms": 0, "until_ms": until_ms, "points": 2000}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: NOW_MS * 1_000_000)
        rows = query(store, "")["workers"][NAME]["health"]
    assert sum(sum(row[1].values()) for row in rows) == made * 20 // 30


def test_a_kill_between_writing_and_pruning_counts_nothing_twice(store: SqliteStore) -> None:
    samples = [sample(at) for at in range(NOW_MS, NOW_MS + 4 * HOUR_MS, 30_000)]
    for _ in range(3):
        append(store, samples)  # as if the prune had not happened
        health_series.condense(store, NOW_MS + 4 * HOUR_MS)
    now_ms = NOW_MS + 5 * HOUR_MS
    found = read(store, NAME, NOW_MS, now_ms, 10, now_ms=now_ms)
    assert count(found) == len(samples)


def test_a_long_absence_leaves_nothing_behind(store: SqliteStore) -> None:
    fill(store, 1)
    append(store, [sample(at) for at in range(NOW_MS, NOW_MS + 4 * HOUR_MS, 300_000)])
    later_ms = NOW_MS + 200 * DAY_MS
    append(store, [sample(later_ms)])
    health_series.condense(store, later_ms + HOUR_MS)
    health_series.condense(store, later_ms + DAY_MS)
    keys = [doc["_key"] for doc in store.find("stats")]
    chunks = [int(key.rpartition(":")[2]) for key in keys if ":30s:" in key]
    assert chunks == [later_ms // health_series.FINE.chunk_ms]


@pytest.mark.parametrize("chunk", [-(10**12), 10**12])
def test_an_index_of_a_workers_own_spins_nobody(store: SqliteStore, chunk: int) -> None:
    """Workers may write the work store; it took a delete for each number between."""
    workers = {NAME: {"chunk": chunk, "run": ""}}
    store.insert("stats", {"_key": "health:index", "workers": workers})
    append(store, [sample(NOW_MS)])
    assert health_series.condense(store, NOW_MS + HOUR_MS) == 1


def test_what_is_not_condensed_yet_is_read_as_well(store: SqliteStore) -> None:
    append(store, [sample(at) for at in range(NOW_MS, NOW_MS + 600_000, 30_000)])
    health_series.condense(store, NOW_MS + 600_000)
    append(store, [sample(NOW_MS + 610_000, "unhealthy"), sample(NOW_MS + 640_000, "crashed")])
    append(store, [sample(NOW_MS + 640_000, name="worker:tag:1")])
    now_ms = NOW_MS + 700_000
    found = read(store, NAME, NOW_MS, now_ms, 1000, now_ms=now_ms)
    assert (count(found, "h"), count(found, "u"), count(found, "c")) == (20, 1, 1)
    assert found[-1].worst == "c"


def test_new_runs_are_counted_across_condensations(store: SqliteStore) -> None:
    for number, run in enumerate("aabbc"):
        append(store, [sample(NOW_MS + number * 600_000, run=run)])
        health_series.condense(store, NOW_MS + (number + 1) * 600_000)
    now_ms = NOW_MS + HOUR_MS
    found = read(store, NAME, NOW_MS, now_ms, 1, now_ms=now_ms)
    assert sum(each.runs for each in found) == 2


def test_a_year_is_small(store: SqliteStore) -> None:
    """By a worker's share of a year at the full rate: 200 of them stay under 1 GB."""
    fill(store, 4, every_ms=30_000)
    sizes = {":30s:": 0, ":10min:": 0, ":6h:": 0}
    for doc in store.find("stats"):
        for step in sizes:
            if step in doc["_key"]:
                sizes[step] += len(json.dumps(doc))
    year = sizes[":30s:"] + sizes[":10min:"] * 90 / 4 + sizes[":6h:"] * 365 / 4
    print(f"a year of 200 workers: {200 * year / 1e6:.0f} MB")
    assert 200 * year < 1e9


def test_a_worker_that_nobody_knows_costs_nothing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    get = store.get

    def count_get(collection: str, key: str) -> Doc | None:
        asked.append(key)
        return get(collection, key)

    monkeypatch.setattr(store, "get", count_get)
    assert read(store, "worker:no:1", 0, NOW_MS, 9, now_ms=NOW_MS) == []
    assert len(asked) < 5


def test_samples_from_before_time_began_are_not_read(store: SqliteStore) -> None:
    """A worker can write any; of many such numbers Python's hashes are the same."""
    for number, wall_ms in enumerate((-6, 7)):
        doc = {"component_id": "worker:tag:0", "status": "healthy", "wall_ms": wall_ms}
        store.insert(COLLECTION, doc | {"_key": f"{number:04d}"})
    assert health_series.condense(store, 10**9) == 1
