"""Precedence to begin a transaction on SQLite's file of jobs: whoever starves is let in, nobody is
held up for good.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.store.sqlite.precedence import FileLock
from nomarr_systemd.store.sqlite.store import SqliteStore

HELD_S = 60.0
WRITER = """
import sys
from nomarr_systemd.store.sqlite.store import SqliteStore

store = SqliteStore(sys.argv[1], "work", patience_s=60.0)
for number in range(150):
    with store.batch():
        key = f"a{sys.argv[2]}-{number}"
        store.insert("stats", {"_key": key, "what": "a", "text": "x" * 60000})
store.close()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        yield store


@pytest.fixture
def lock(store: SqliteStore) -> Iterator[FileLock]:
    with closing(FileLock(f"{store.path}.next")) as lock:
        yield lock


def is_free(lock: FileLock) -> bool:
    if not lock._lock(fcntl.LOCK_EX, 0.0):
        return False
    fcntl.flock(lock._fd, fcntl.LOCK_UN)
    return True


def test_others_wait_while_one_has_it(store: SqliteStore, lock: FileLock, tmp_path: Path) -> None:
    order = list[str]()
    opened = threading.Event()

    def write() -> None:
        with closing(SqliteStore(str(tmp_path), "work", patience_s=HELD_S)) as other:
            opened.set()
            with other.batch():
                order.append("other")

    thread = threading.Thread(target=write)
    with lock.taken(time.monotonic() + HELD_S):
        thread.start()
        opened.wait()
        for number in range(10):  # the file is free in between, and nobody else begins
            store.insert("stats", {"_key": f"a{number}"})
        order.append("starved")
    thread.join()
    assert order == ["starved", "other"]


def test_a_transaction_that_has_waited_for_long_has_it(
    store: SqliteStore, lock: FileLock, tmp_path: Path
) -> None:
    """While another one holds the file: then nobody can begin before it."""
    begun = threading.Event()

    def write() -> None:
        with closing(SqliteStore(str(tmp_path), "work", patience_s=HELD_S)) as other, other.batch():
            begun.set()

    thread = threading.Thread(target=write)
    ends = time.monotonic() + HELD_S
    with store.batch():
        thread.start()
        while is_free(lock):  # until the one that waits has it
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert not begun.is_set()
    thread.join()
    assert begun.is_set()
    assert is_free(lock)  # it has given it up


@pytest.mark.parametrize("name", ["next", "turn"])
def test_nobody_waits_for_ever(tmp_path: Path, name: str) -> None:
    """A worker may hold that file as long as it likes."""
    with (
        closing(SqliteStore(str(tmp_path), "work", patience_s=0.1)) as store,
        closing(FileLock(f"{store.path}.{name}")) as lock,
    ):
        with lock.taken(time.monotonic()), store.batch():
            store.insert("stats", {"_key": "a"})
        assert store.get("stats", "a")


@pytest.mark.parametrize("name", ["next", "turn"])
def test_a_file_that_cannot_be_used_is_done_without(store: SqliteStore, name: str) -> None:
    os.symlink("/dev/null", f"{store.path}.{name}")
    with store.batch():
        store.insert("stats", {"_key": "a"})
    assert store.get("stats", "a")


def test_the_ledger_has_none(tmp_path: Path) -> None:
    with closing(SqliteStore(str(tmp_path), "policy")) as ledger:
        with ledger.batch():
            ledger.insert("meta", {"_key": "a"})
        assert not os.path.exists(f"{ledger.path}.next")
        assert not os.path.exists(f"{ledger.path}.turn")


def test_a_turn_ends_with_its_transaction(store: SqliteStore) -> None:
    with closing(FileLock(f"{store.path}.turn")) as turn:
        with store.batch():
            assert not is_free(turn)
        assert is_free(turn)
        with pytest.raises(ZeroDivisionError), store.batch():
            assert 1 / 0
        assert is_free(turn)


def test_the_log_stays_short_though_many_write(store: SqliteStore, tmp_path: Path) -> None:
    """While those that wait read the file, SQLite cannot begin its log anew: it grew, and each
    commit moved a part of it."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number)])
        for number in range(6)
    ]
    assert [each.wait() for each in writers] == [0] * 6
    assert store.count("stats", {"what": "a"}) == 6 * 150
    frames = os.path.getsize(f"{store.path}-wal") // 4120
    assert frames < 1500, frames  # SQLite's thousand, and what one transaction adds
