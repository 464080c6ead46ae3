"""Turns to write SQLite's file of jobs: one after the other, nobody is forgotten or held up for
good.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.store.sqlite import turn as turn_module
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.store.sqlite.turn import Turn
from tests.support.waiting import PATIENCE_S, wait_for

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
EPOLL_WAIT = {"232", "281", "22", "441"}  # x86-64 has two calls, aarch64 one, newer kernels another
HOLDER = """
import sys, time
from nomarr_systemd.store.sqlite.turn import Turn

turn = Turn(sys.argv[1])
print(turn.take(time.monotonic() + 60.0), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(str(tmp_path), "work")) as store:
        yield store


@pytest.fixture
def turn(store: SqliteStore) -> Iterator[Turn]:
    with closing(Turn(f"{store.path}.queue")) as turn:
        yield turn


def is_free(turn: Turn) -> bool:
    if not turn.take(0.0):
        return False
    turn.leave()
    return True


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def is_waiting(thread: threading.Thread) -> bool:
    """Whether it sleeps until a byte is in the FIFO."""
    call = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text()
    return call.split()[0] in EPOLL_WAIT


def begin_to_wait(turn: Turn, then: Callable[[], object]) -> threading.Thread:
    """A thread that waits for its turn already, and calls ``then`` when it has it."""

    def wait() -> None:
        assert turn.take(soon())
        then()
        turn.leave()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: is_waiting(thread), PATIENCE_S, "a thread that waits")
    return thread


def test_a_turn_is_as_long_as_the_transaction(store: SqliteStore, turn: Turn) -> None:
    with store.batch():
        store.insert("stats", {"_key": "a"})
        assert not is_free(turn)
    assert is_free(turn)
    with suppress(ZeroDivisionError), store.batch():
        store.insert("stats", {"_key": "b"})
        assert 1 / 0
    assert is_free(turn)


def test_a_transaction_begins_with_its_first_statement(
    store: SqliteStore, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.batch():
        assert is_free(turn)
        assert store.get("stats", "a") is None
        assert not is_free(turn)
    monkeypatch.delattr(os, "fdatasync")  # nothing was read or written: nothing to wait for
    with store.batch():
        pass


def test_what_could_not_begin_does_nothing(tmp_path: Path, store: SqliteStore) -> None:
    """Also what is done in it after the error is not done outside a transaction."""

    def write(other: SqliteStore) -> None:
        with other.batch():
            with pytest.raises(StoreUnavailable, match="stayed locked"):
                other.insert("stats", {"_key": "b"})
            holder.rollback()
            with pytest.raises(StoreUnavailable, match="was lost"):
                other.insert("stats", {"_key": "c"})

    with (
        closing(SqliteStore(str(tmp_path), "work", patience_s=0.0)) as other,
        closing(sqlite3.connect(store.path, isolation_level=None)) as holder,
    ):
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="was lost"):
            write(other)
        assert store.find("stats") == []
        with other.batch():
            other.insert("stats", {"_key": "d"})
    assert [doc["_key"] for doc in store.find("stats")] == ["d"]


def test_those_that_wait_have_it_in_the_order_in_which_they_came(
    store: SqliteStore, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "_LONGEST_S", PATIENCE_S)  # only a wakeup counts
    others = [Turn(f"{store.path}.queue") for _ in range(4)]
    order = list[Turn]()
    assert turn.take(0.0)
    threads = [begin_to_wait(each, lambda each=each: order.append(each)) for each in others]  # type: ignore[misc]  # it has one type
    turn.leave()
    for thread in threads:
        thread.join()
    assert order == others
    for each in others:
        each.close()


def test_no_wakeup_is_lost(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "_LONGEST_S", PATIENCE_S)
    taken = list[bool]()
    take = Turn.take

    def spy(turn: Turn, deadline: float) -> bool:
        taken.append(take(turn, deadline))
        return taken[-1]

    monkeypatch.setattr(Turn, "take", spy)

    def write(name: str) -> None:
        with closing(SqliteStore(str(tmp_path), "work", patience_s=PATIENCE_S)) as other:
            for number in range(40):
                with other.batch():
                    other.insert("stats", {"_key": f"{name}{number}", "what": "a"})

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [True] * 320
    assert store.count("stats", {"what": "a"}) == 320


def test_a_process_that_is_killed_in_its_turn_holds_up_nobody(
    store: SqliteStore, turn: Turn
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"{store.path}.queue"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        had = threading.Event()
        thread = begin_to_wait(turn, had.set)
        assert not had.is_set()
        holder.kill()
        thread.join()
    assert had.is_set()


def test_a_fifo_that_was_full_wakes_as_well(
    store: SqliteStore, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many transactions while nobody waited."""
    assert turn.take(0.0)
    while True:
        try:
            os.write(turn._fd, bytes(4096))
        except BlockingIOError:
            break
    monkeypatch.setattr(turn_module, "_LONGEST_S", PATIENCE_S)
    had = threading.Event()
    with closing(Turn(f"{store.path}.queue")) as other:
        thread = begin_to_wait(other, had.set)
        turn.leave()
        thread.join()
    assert had.is_set()


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """A worker may hold that file as long as it likes."""
    with (
        closing(SqliteStore(str(tmp_path), "work", patience_s=0.1)) as store,
        closing(Turn(f"{store.path}.queue")) as turn,
    ):
        assert turn.take(0.0)
        with store.batch():
            store.insert("stats", {"_key": "a"})
        assert store.get("stats", "a")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: os.symlink("/dev/null", path),
        lambda path: Path(path).write_text("precious"),
        os.mkdir,
    ],
)
def test_a_file_that_cannot_be_used_is_done_without(
    store: SqliteStore, make: Callable[[str], object]
) -> None:
    path = Path(f"{store.path}.queue")
    make(str(path))
    with store.batch():
        store.insert("stats", {"_key": "a"})
    assert store.get("stats", "a")
    assert not path.is_file() or path.is_symlink() or path.read_text() == "precious"


def test_it_is_shared_as_its_directory_is(store: SqliteStore, turn: Turn) -> None:
    assert is_free(turn)
    assert os.stat(f"{store.path}.queue").st_mode & 0o777 == 0o600
    turn.close()
    os.unlink(f"{store.path}.queue")
    os.chmod(os.path.dirname(store.path), 0o2770)
    assert is_free(turn)
    assert os.stat(f"{store.path}.queue").st_mode & 0o777 == 0o660


def test_the_ledger_has_none(tmp_path: Path) -> None:
    with closing(SqliteStore(str(tmp_path), "policy")) as ledger:
        with ledger.batch():
            ledger.insert("meta", {"_key": "a"})
        assert not os.path.exists(f"{ledger.path}.queue")


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
    # SQLite's thousand, and what is added while a process that reads has no processor. Without
    # turns it is 16,000: all that was written.
    assert frames < 4000, frames
