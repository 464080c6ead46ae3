"""A disk that workers have filled, on file systems that keep nothing for root: the ledger goes on
with the room that it has kept."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.host import machine
from nomarr_systemd.ledger import past_records
from nomarr_systemd.ledger.ledger import Ledger, room_for
from nomarr_systemd.store.protocol import PAST_RECORDS, POLICY_LEDGER
from nomarr_systemd.store.sqlite.inspection import inspect
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY

MIB = 1 << 20
DISKS = {
    # Nothing for root, and few inodes, which a worker takes as well.
    "ext4": ["mkfs.ext4", "-q", "-m", "0", "-N", "2000"],
    "xfs": ["mkfs.xfs", "-q"],
    "btrfs": ["mkfs.btrfs", "-q"],
    "tmpfs": [],
}
# Takes every block and every inode that there are, and each one that is freed, at once.
FILL = """
import itertools, os, select, sys
full = False
with open("blocks", "ab", buffering=0) as blocks:
    for number in itertools.count():
        size = 1 << 20
        while size:
            try:
                blocks.write(bytes(size))
            except OSError:
                size //= 2
        try:
            while True:
                os.close(os.open(f"file-{number}-{os.urandom(8).hex()}", os.O_CREAT | os.O_WRONLY))
        except OSError:
            pass
        if not full:
            full = True
            print("full", flush=True)
            if sys.argv[1] == "once":
                break
        select.select([], [], [], 0.001)  # leave the disk's lock to others
"""
# As the controller does it: root without capabilities, opened and closed each time.
BOOK = """
import sys
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.sqlite.store import SqliteStore

directory, first, count, per_open, kind = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
rules = Rules()._replace(max_restarts=100, max_lifetime_restarts=0)
for begin in range(first, first + count, per_open):
    store = SqliteStore(directory, "policy")
    ledger = Ledger(store)
    for number in range(begin, min(begin + per_open, first + count)):
        death = Death(f"worker:tag:{number % 10}", f"{number:032x}", kind, 1)
        ledger.record_failure(death, rules)
    store.close()
print("booked")
"""
POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
WORKER = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@pytest.fixture(params=sorted(DISKS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small disk with a directory of the ledger's and one of a worker's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if make := DISKS[request.param]:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(320 * MIB)
        subprocess.run([*make, str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", "size=160m,nr_inodes=2000", "tmpfs", str(disk)]
        subprocess.run(mount, check=True)
    try:
        for name in ("work", "policy"):
            (disk / name).mkdir(mode=0o700)
        if request.param == "btrfs":  # as packaging/nomarr.tmpfiles does
            subprocess.run(["chattr", "+C", disk / "policy"], check=True)
        os.chown(disk / "work", NOBODY, NOBODY)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def book(disk: Path, first: int, count: int, *, per_open: int = 1, kind: str = "exit") -> str:
    arguments = [str(disk / "policy"), str(first), str(count), str(per_open), kind]
    command = [*POWERLESS, sys.executable, "-c", BOOK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


@pytest.fixture
def kept(disk: Path) -> Path:
    store = SqliteStore(str(disk / "policy"), "policy")
    store.keep_room(room_for(10))
    store.close()
    return disk


def is_btrfs(disk: Path) -> bool:
    """On a full btrfs each write takes long, and much longer while others write, too."""
    return machine.filesystem_of(str(disk)) == "btrfs"


@pytest.fixture
def full(kept: Path) -> Iterator[Path]:
    """Nothing is free, and what would be is taken."""
    filler = subprocess.Popen(
        [*WORKER, sys.executable, "-c", FILL, "once" if is_btrfs(kept) else "for ever"],
        cwd=kept / "work",
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert filler.stdout is not None
        assert filler.stdout.readline() == "full\n"
        yield kept
    finally:
        filler.kill()
        filler.communicate()


@needs_root
def test_a_thousand_failures_are_booked(full: Path) -> None:
    number = 60 if is_btrfs(full) else 1000
    with pytest.raises(OSError, match="No space left"):
        (full / "policy/other").write_bytes(bytes(MIB))
    assert book(full, 0, 20, per_open=2) == "booked"
    longest = "\U0001f480" * 1000  # four bytes each; cut
    assert book(full, 20, number - 20, per_open=70, kind=longest) == "booked"
    found = inspect(str(full / "policy/ledger.db"))
    assert (found.problem, found.rows) == ("", 10)
    assert book(full, number, 1) == "booked", "it was only looked at"
    store = SqliteStore(str(full / "policy"), "policy")
    accounts = Ledger(store).accounts()
    rows = [row for doc in store.find(PAST_RECORDS, {}) for row in past_records.read_rows(doc)]
    store.close()
    rows += [row for account in accounts for row in account.rows]
    booked = {Record.read(row).invocation for row in rows}
    assert len(booked) == number + 1


# What is kept, on any disk


KILLED = """
import os, signal, sys
from nomarr_systemd.store.sqlite.store import SqliteStore
store = SqliteStore(sys.argv[1], "policy")
if sys.argv[2] == "room":
    import nomarr_systemd.store.sqlite.file as file
    file._checkpoint = lambda db: os.kill(os.getpid(), signal.SIGKILL)
    store.keep_room(1 << 20)
store.insert("worker_restart_policy", {"_key": "worker:tag:1"})
os.kill(os.getpid(), signal.SIGKILL)
"""


def open_at(directory: Path) -> SqliteStore:
    return SqliteStore(str(directory), "policy")


def die_at(directory: Path, where: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(directory), where], check=False)
    assert done.returncode == -9


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_blocks for path in directory.iterdir()}


def test_nothing_grows_or_shrinks_by_a_close_and_a_booking(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    store.keep_room(MIB)
    store.close()
    before = sizes(tmp_path)
    assert before["ledger.db-wal"] * 512 >= MIB
    assert before["ledger.db"] * 512 >= MIB
    for number in range(20):
        store = open_at(tmp_path)
        store.insert(POLICY_LEDGER, {"_key": f"worker:tag:{number}", "text": "x" * 20_000})
        store.keep_room(MIB)
        store.close()
        assert sizes(tmp_path) == before
    assert inspect(str(tmp_path / "ledger.db")).rows == 20
    assert sizes(tmp_path) == before


def test_room_that_was_used_is_made_again(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    store.keep_room(MIB)
    store.insert(POLICY_LEDGER, {"_key": "a", "text": "x" * MIB})
    store.keep_room(MIB)
    store.close()
    assert inspect(str(tmp_path / "ledger.db")).room >= MIB


def test_a_kill_while_room_is_made(tmp_path: Path) -> None:
    die_at(tmp_path, "room")
    store = open_at(tmp_path)
    store.keep_room(MIB)
    store.close()
    found = inspect(str(tmp_path / "ledger.db"))
    assert MIB <= found.room < 2 * MIB
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        assert db.execute("SELECT 1 FROM sqlite_master WHERE name = 'room'").fetchone() is None


def test_a_copy_that_is_put_back_gets_nothing_of_the_log(tmp_path: Path) -> None:
    """The log stays beside the ledger; what it has is not for another file."""
    store = open_at(tmp_path)
    store.insert(POLICY_LEDGER, {"_key": "worker:tag:0", "text": "old"})
    store.close()
    backup = (tmp_path / "ledger.db").read_bytes()
    store = open_at(tmp_path)
    for number in range(1, 50):
        store.insert(POLICY_LEDGER, {"_key": f"worker:tag:{number}", "text": "new" * 1000})
    store.close()
    (tmp_path / "ledger.db").write_bytes(backup)
    assert inspect(str(tmp_path / "ledger.db")).rows == 1
    store = open_at(tmp_path)
    assert [doc["text"] for doc in store.find(POLICY_LEDGER)] == ["old"]
    store.close()


def test_a_commit_before_a_kill_is_in_the_log_that_stays(tmp_path: Path) -> None:
    """Nobody empties a log that is not in the file yet; another program reads it as well."""
    store = open_at(tmp_path)
    store.insert(POLICY_LEDGER, {"_key": "worker:tag:0"})
    store.close()
    die_at(tmp_path, "commit")
    assert inspect(str(tmp_path / "ledger.db")).rows == 2
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        assert db.execute(f"SELECT count(*) FROM {POLICY_LEDGER}").fetchone() == (2,)
    store = open_at(tmp_path)
    assert len(store.find(POLICY_LEDGER)) == 2
    store.close()


def test_two_stores_of_one_process(tmp_path: Path) -> None:
    """The first that is closed takes no lock from the other: a third process must not think that it
    is alone, and empty the log."""
    first, second = open_at(tmp_path), open_at(tmp_path)
    first.insert(POLICY_LEDGER, {"_key": "worker:tag:0"})
    assert second.get(POLICY_LEDGER, "worker:tag:0")
    first.close()
    second.insert(POLICY_LEDGER, {"_key": "worker:tag:2"})
    die_at(tmp_path, "commit")
    assert len(second.find(POLICY_LEDGER)) == 3
    assert inspect(str(tmp_path / "ledger.db")).rows == 3
    second.close()
    assert inspect(str(tmp_path / "ledger.db")).rows == 3
