"""A disk that workers have filled, on file systems that keep nothing for root: the ledger goes on
with the room that it has kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.ledger.ledger import Ledger, room_for
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
import itertools, os, select
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
    for number in range(begin, begin + per_open):
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
        subprocess.run([*make, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", "size=160m,nr_inodes=2000", "tmpfs", disk]
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


@pytest.fixture
def full(kept: Path) -> Iterator[Path]:
    """Nothing is free, and what would be is taken."""
    filler = subprocess.Popen(
        [*WORKER, sys.executable, "-c", FILL], cwd=kept / "work", stdout=subprocess.PIPE, text=True
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
    with pytest.raises(OSError, match="No space left"):
        (full / "policy/other").write_bytes(bytes(MIB))
    for first in range(0, 100, 25):
        assert book(full, first, 25, per_open=5) == "booked"
    longest = "\U0001f480" * 1000  # four bytes each; cut
    assert book(full, 100, 900, per_open=90, kind=longest) == "booked"
    found = inspect(str(full / "policy/ledger.db"))
    assert (found.problem, found.rows) == ("", 10)
    assert book(full, 1000, 1) == "booked", "it was only looked at"
    store = SqliteStore(str(full / "policy"), "policy")
    accounts = Ledger(store).accounts()
    store.close()
    booked = {record.invocation for account in accounts for record in account.records}
    assert len(booked) == 1000  # each account keeps the last hundred
