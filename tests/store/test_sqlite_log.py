"""Commits to SQLite's file of jobs: durable at their return, and others may begin while a process
waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.store.protocol import HOSTS, Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.store.sqlite.turn import Turn

OLD = [{"_key": "a", "state": "held", "n": 1}, {"_key": "b", "state": "held", "n": 2}]
NEW = {"_key": "c", "state": "held", "n": 3}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        store.add(HOSTS, OLD)
        yield store


def read(store: SqliteStore) -> list[Doc]:
    return store.find(HOSTS)


def synchronous(store: SqliteStore) -> object:
    return store._file.run(lambda db: db.execute("PRAGMA synchronous").fetchone()[0])


def replace(store: SqliteStore) -> None:
    store.replace(HOSTS, {**read(store)[0], "n": 9})


def write_batch(store: SqliteStore) -> None:
    with store.batch():
        store.insert(HOSTS, NEW)
        store.delete(HOSTS, "a")


def write_and_fail(store: SqliteStore) -> None:
    """What is committed after a transaction that was rolled back is durable, too."""
    with contextlib.suppress(ZeroDivisionError), store.batch():
        store.delete(HOSTS, "a")
        assert 1 / 0
    store.insert(HOSTS, NEW)


WRITES: list[Callable[[SqliteStore], object]] = [
    lambda store: store.insert(HOSTS, NEW),
    replace,
    lambda store: store.delete(HOSTS, "a"),
    lambda store: store.add(HOSTS, [NEW]),
    lambda store: store.append(HOSTS, [{"state": "held"}]),
    lambda store: store.prune(HOSTS, "n", 2),
    lambda store: store.update(HOSTS, {"state": "held"}, {"state": "lost"}),
    write_batch,
    write_and_fail,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_durable_when_it_returns(
    store: SqliteStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[SqliteStore], object],
) -> None:
    """A power cut after the return leaves what the files were when the disk was last waited for."""
    (tmp_path / "disk" / "work").mkdir(parents=True)
    before = read(store)

    def sync(_fd: int) -> None:
        # Not by this process: to close the file would release SQLite's locks.
        files = [store.path, f"{store.path}-wal"]
        subprocess.run(["cp", *files, tmp_path / "disk" / "work"], check=True)

    monkeypatch.setattr(os, "fdatasync", sync)
    write(store)
    monkeypatch.undo()
    with closing(SqliteStore(str(tmp_path / "disk"), "work")) as left:
        assert read(left) == read(store) != before


def test_others_commit_while_one_waits_for_the_disk(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[int]()
    real = os.fdatasync
    with (
        closing(SqliteStore(str(tmp_path), "work")) as other,
        closing(Turn(f"{store.path}.queue")) as turn,
    ):

        def sync(fd: int) -> None:
            waited.append(fd)
            assert turn.take(deadline=0.0)
            turn.leave()
            if len(waited) == 1:
                with other.batch():
                    other.insert(HOSTS, NEW)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", sync)
        with store.batch():
            store.delete(HOSTS, "a")
        assert len(waited) == len(set(waited)) == 2  # each for its own commit
    assert [doc["_key"] for doc in read(store)] == ["b", "c"]


@pytest.mark.parametrize("write", [WRITES[0], write_batch])
def test_a_disk_that_fails_is_reported_and_the_file_opened_anew(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, write: Callable[[SqliteStore], object]
) -> None:
    def sync(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(StoreUnavailable, match=r"work\.db-wal to the disk: Input/output error"):
        write(store)
    assert store._file._db is None
    monkeypatch.undo()
    assert "c" in [doc["_key"] for doc in read(store)]  # as after an answer that was lost
    store.delete(HOSTS, "c")


def test_sqlite_waits_for_the_disk_where_there_is_no_log(tmp_path: Path) -> None:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        assert synchronous(store) == 1  # NORMAL
        path = store.path
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        assert synchronous(store) == 2  # FULL
        store.insert(HOSTS, NEW)


def test_the_ledger_leaves_it_to_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync")
    with closing(SqliteStore(str(tmp_path), "policy")) as ledger:
        ledger.insert("meta", {"_key": "a"})
