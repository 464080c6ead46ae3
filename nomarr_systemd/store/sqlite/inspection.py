"""Look at a SQLite file without changing it: ``SqliteFile`` would set a corrupt one aside and make
a missing one.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import time
from contextlib import closing
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from nomarr_systemd.core.text import clean, one_line
from nomarr_systemd.store.protocol import POLICY_LEDGER
from nomarr_systemd.store.sqlite import persistence
from nomarr_systemd.store.sqlite.file import measure_room

_PATIENCE_S: Final = 2.0  # as long as the programs retry
_CORRUPT: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_MAX_WHY: Final = 300
# The byte of the -shm file that a writer locks (walformat.html), and those of the database that a
# process locks to use it alone.
_WRITER: Final = (120, 1)
_EXCLUSIVE: Final = (0x40000002, 510)
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of Linux with 64 bits


class Inspection(NamedTuple):
    """What was found; ``why`` explains a problem, ``holder`` is the process that has the lock."""

    problem: Literal["", "missing", "corrupt", "locked", "unreadable"] = ""
    why: str = ""
    holder: int = 0
    rows: int = 0
    room: int = 0  # bytes that commits can use while the disk is full


def inspect(path: str, table: str = POLICY_LEDGER) -> Inspection:
    """Read the whole file, and see whether a process keeps others from writing it."""
    if not os.path.exists(path):
        return Inspection("missing")
    try:
        rows, room = _read(path, table)
    except sqlite3.Error as error:
        name = str(getattr(error, "sqlite_errorname", ""))
        problem: Literal["corrupt", "unreadable"] = "unreadable"
        if name.startswith(_CORRUPT):
            problem = "corrupt"
        elif holder := _find_holder(path):
            return Inspection("locked", _name_process(holder), holder)
        return Inspection(problem, clean(str(error), _MAX_WHY))
    if holder := _find_holder(path):
        return Inspection("locked", _name_process(holder), holder)
    return Inspection(rows=rows, room=room)


def _read(path: str, table: str) -> tuple[int, int]:
    """Check the file; return the rows of a table and the room that is kept. sqlite3.Error if that
    is not possible."""
    # Without a log it is read as an immutable file: else SQLite would make one. If a
    # program has begun to write meanwhile, it is read again.
    for attempt in range(3):
        has_log = os.path.exists(f"{path}-wal")
        how = "mode=ro" if has_log else "mode=ro&immutable=1"
        try:
            with (
                persistence.index_kept(path),
                closing(
                    sqlite3.connect(f"file:{quote(path)}?{how}", uri=True, timeout=_PATIENCE_S)
                ) as db,
            ):
                checked = db.execute("PRAGMA quick_check(1)").fetchone()
                if checked[0] != "ok":
                    raise _corrupt(str(checked[0]))
                known = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,))
                if known.fetchone() is None:
                    return 0, 0
                rows = db.execute(f'SELECT count(*) FROM "{table}"')  # noqa: S608 (ours)
                return int(rows.fetchone()[0]), measure_room(path, db)
        except sqlite3.Error:
            if has_log or attempt == 2 or not os.path.exists(f"{path}-wal"):
                raise
    raise AssertionError  # the last attempt returns or raises


def _corrupt(why: str) -> sqlite3.Error:
    error = sqlite3.DatabaseError(why)
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error


def _find_holder(path: str) -> int:
    """The process that keeps others from writing for longer than programs retry; 0: none."""
    ends = time.monotonic() + _PATIENCE_S
    while True:
        holder = _ask_lock(f"{path}-shm", *_WRITER) or _ask_lock(path, *_EXCLUSIVE)
        if not holder or time.monotonic() >= ends:
            return holder
        time.sleep(0.05)


def _ask_lock(path: str, start: int, length: int) -> int:
    """The process with a lock on these bytes that keeps others from reading them; 0: none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        question = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, length, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, question))
        return 0 if kind == fcntl.F_UNLCK else max(pid, 0)
    except OSError:
        return 0
    finally:
        os.close(fd)


def _name_process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = one_line(file.read(64).strip())
    except OSError:
        name = "a process"
    return f"{name} (pid {pid})"
