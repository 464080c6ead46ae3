"""History of health while its store is away: nothing is lost that there is room for; the
oldest goes first, and it is said how much."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.health import Sample
from nomarr_systemd.ledger.health_history import COLLECTION, append
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.supervisor import snapshots
from nomarr_systemd.supervisor.helper import close_helpers
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.snapshots import Batch, Snapshots, Waiting
from nomarr_systemd.supervisor.store_child import serve
from nomarr_systemd.supervisor.store_process import StoreProcess

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12
NONE = StoreSettings()
NOT_YET_MS = time.time_ns() // 1_000_000 + 3_600_000  # to be condensed


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
    assert waiting.first() is None


def test_what_waited_is_written_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(snapshots, "log", lambda _, text, **fields: lines.append((text, fields)))
    store = tmp_path / "store"
    store.write_text("no directory")
    settings = StoreSettings(f"sqlite://{store}")
    loop = Loop()
    process = StoreProcess(loop, lambda channel: serve(channel, "", str(tmp_path / "public")))
    history = Snapshots(process)
    history._waiting = Waiting(3)

    def offer(moment: int) -> None:
        history.offer(settings, batch(NOT_YET_MS + moment)[1])
        while history.is_busy():
            loop.turn()

    offer(1)
    assert not process.is_up  # it waits for another
    for moment in range(2, 5):
        offer(moment)
        assert history.is_failing
    store.unlink()
    offer(5)
    assert not history.is_failing
    close_helpers()
    loop.close()
    (back,) = [fields for text, fields in lines if text == "the history store is back"]
    assert back == {"dropped_samples": 2}
    with closing(SqliteStore(str(store), "work")) as there:
        assert [doc["wall_ms"] - NOT_YET_MS for doc in there.find(COLLECTION)] == [3, 4, 5]


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    loop = Loop()
    history = Snapshots(StoreProcess(loop, lambda channel: serve(channel, "", "")))
    history.offer(StoreSettings(f"sqlite://{tmp_path}"), batch(NOT_YET_MS)[1])
    assert not history.is_busy()
    history.flush()
    close_helpers()
    loop.close()
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        assert [doc["wall_ms"] for doc in store.find(COLLECTION)] == [NOT_YET_MS]


def test_a_sample_that_is_written_again_is_the_same_document(tmp_path: Path) -> None:
    """An answer may be lost, and the write is tried again."""
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        for _ in range(2):
            append(store, batch(7)[1], "host")
        [doc] = store.find(COLLECTION)
        assert doc["_key"] == "000000000000007:worker:tag:0@host"
