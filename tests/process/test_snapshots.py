"""History of health while its store is away: nothing is lost that there is room for; the
oldest goes first, and it is said how much."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.ledger.health_history import COLLECTION, Sample, append
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.supervisor import snapshots
from nomarr_systemd.supervisor.snapshots import Batch, Snapshots, Waiting

NONE = StoreSettings()


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "it does not happen"
        time.sleep(0.01)


def batch(moment: int, size: int = 1) -> Batch:
    names = (f"worker:tag:{number}" for number in range(size))
    samples = [Sample(name, moment, "healthy", "f" * 32, 0, 0, 0, "", b"") for name in names]
    return NONE, samples


def test_the_oldest_goes_first_and_is_counted() -> None:
    waiting = Waiting(5)
    for moment in range(4):
        waiting.put(batch(moment, 2))
    oldest = waiting.first()
    assert oldest is not None
    assert oldest[1][0].wall_ms == 2
    assert waiting.take_dropped() == 4
    assert waiting.take_dropped() == 0
    waiting.put(batch(4, 99))  # one that is too large stays: there is none newer
    waiting.done(oldest)  # it was dropped while it was written
    assert waiting.take_dropped() == 2
    waiting.give_up(oldest)  # it is counted already
    newest = waiting.first()
    assert newest is not None
    assert len(newest[1]) == 99
    waiting.give_up(newest)
    assert waiting.take_dropped() == 99
    waiting.close()
    assert waiting.first() is None


def test_what_waited_is_written_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(snapshots, "log", lambda _, text, **fields: lines.append((text, fields)))
    tries = 0

    def open_counted(settings: StoreSettings) -> Store:
        nonlocal tries
        try:
            return open_work_store(settings)
        finally:
            tries += 1

    monkeypatch.setattr(snapshots, "open_bounded", open_counted)
    store = tmp_path / "store"
    store.write_text("no directory")
    settings = StoreSettings(f"sqlite://{store}")
    history = Snapshots(str(tmp_path / "public"))
    history._waiting = Waiting(3)
    now_ms = time.time_ns() // 1_000_000 + 3_600_000  # not yet to be condensed
    for moment in range(1, 5):
        history.offer(settings, batch(now_ms + moment)[1])
        wait_for(lambda: tries == moment)  # noqa: B023
    assert history.is_failing
    store.unlink()
    history.offer(settings, batch(now_ms + 5)[1])
    wait_for(lambda: not history.is_failing)
    history.close()
    (back,) = [fields for text, fields in lines if text == "the history store is back"]
    assert back == {"dropped_samples": 2}
    with closing(SqliteStore(str(store), "work")) as there:
        assert [doc["wall_ms"] - now_ms for doc in there.find(COLLECTION)] == [3, 4, 5]


def test_a_sample_that_is_written_again_is_the_same_document(tmp_path: Path) -> None:
    """An answer may be lost, and the write is tried again."""
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        for _ in range(2):
            append(store, batch(7)[1], "host")
        [doc] = store.find(COLLECTION)
        assert doc["_key"] == "000000000000007:worker:tag:0@host"
