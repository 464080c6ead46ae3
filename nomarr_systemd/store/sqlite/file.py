"""One SQLite file that stays usable after locks, a full disk, corruption or removal.

A busy file is retried, two seconds at most; a file that was moved is opened again; a corrupt one
is set aside with its companions and a new one begun. The caller says which tables it holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from nomarr_systemd.core.errors import (
    KeyExists,
    SchemaTooNew,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.core.text import clean
from nomarr_systemd.host.files import locked
from nomarr_systemd.host.machine import free_bytes
from nomarr_systemd.store.sqlite import persistence, setting_aside
from nomarr_systemd.store.sqlite.beside import check_private, create
from nomarr_systemd.store.sqlite.log import Log
from nomarr_systemd.store.sqlite.turn import Turn

APPLICATION_ID: Final = 0x6E6F6D72  # "nomr", so that no other program's file is taken for ours

_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")
_CORRUPT = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
# Nothing is computed for it. A condition, or an index, may take hours, and nothing interrupts that.
_PLAIN_TABLE: Final = re.compile(r"CREATE TABLE [^()]+\([^()]*\)")
# What an index of any version is on: fields of the documents.
_FIELD: Final = r"key|(CASE WHEN json_valid\(body\) THEN )?json_extract\(body, '\$\.\w+'\)( END)?"
_CACHE_KIB: Final = 256  # SQLite would take 2 MiB, and the kernel has the file in memory anyway
_OURS: Final = re.compile(rf'"?\w+"? ?\(({_FIELD})(, ({_FIELD}))*\)')
_PIECE: Final = 1 << 20
_LEAVE_FREE: Final = 8  # times as much as is to be kept: a small disk is for others
_MAX_WHY: Final = 300  # characters of SQLite's message, which may quote the file
T = TypeVar("T")
Statement = Callable[[sqlite3.Connection], T]


class _Moved(Exception):
    """The file under our connection is no longer the one at its path."""


class SqliteFile:
    """Runs statements on the database at ``path``; ``schema`` are the statements that make it.

    ``indexes`` are no part of its version: an existing file gains and loses them when it is
    opened, and a program of another version works with whatever indexes there are. No text in it
    may be longer than ``most`` bytes. A ``private`` file is refused if other users may change it or
    its directory.
    """

    def __init__(
        self,
        path: str,
        *,
        version: int,
        schema: tuple[str, ...],
        indexes: tuple[str, ...],
        patience_s: float,
        most: int,
        private: bool = False,
    ) -> None:
        self.path = path
        self._private = private
        self._most = most
        self._version = version
        self._schema = schema
        self._indexes = indexes
        self._patience_s = patience_s
        self._db: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._is_due = False  # a transaction, with its first statement
        self._transacting = False
        self._turn = None if private else Turn(f"{path}.queue")
        self._log = None if private else Log(path)

    @property
    def in_transaction(self) -> bool:
        return self._db is not None and self._db.in_transaction

    def run(self, statement: Statement[T], patience_s: float | None = None) -> T:
        """Run a statement and return its result; outside a transaction it is durable then.

        Raises StoreError; inside a transaction, StoreUnavailable if the file was lost: then the
        whole transaction is lost.
        """
        if self._is_due:
            self._is_due, self._transacting = False, True
            self._begin()
        patience_s = self._patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        pause_s = 0.0001
        while True:
            within = self.in_transaction
            if self._transacting and not within and statement is not _begin_immediately:
                raise StoreUnavailable(f"the transaction on {self.path} was lost")
            try:
                return self._run_once(statement)
            except _Moved:
                self.close()
                if within:
                    raise StoreUnavailable(f"{self.path} was set aside meanwhile") from None
            except sqlite3.Error as error:
                name = _name(error)
                late = time.monotonic() >= deadline
                if name.startswith("SQLITE_CONSTRAINT"):
                    raise KeyExists("a document with this key exists already") from error
                if name.startswith(_CORRUPT) and not late:
                    why = clean(str(error), _MAX_WHY)
                    self.set_aside(why)
                    if within:
                        raise StoreUnavailable(f"{self.path} was corrupt: {why}") from error
                elif not name.startswith(_BUSY):
                    self.close()
                    raise _unavailable(self.path, name, error) from error
                elif late:
                    raise StoreUnavailable(
                        f"{self.path} stayed locked for {self._patience_s:g} s",
                        hint=f"see which process holds it: fuser -v {self.path}",
                    ) from error
            # SQLite's own busy handler soon waits 100 ms at a time, and starves under 8 writers.
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.01)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is run inside becomes durable at its end, or, on an exception, nothing. It
        begins with the first statement: what is computed before that keeps no other waiting."""
        if self._is_due or self._transacting:
            raise RuntimeError("a transaction inside another")
        self._is_due = True
        try:
            yield
            if self._is_due:
                return
            self.run(lambda db: db.execute("COMMIT"))
        except BaseException:
            if self._db is not None and self._db.in_transaction:
                try:
                    self._db.execute("ROLLBACK")
                except sqlite3.Error:
                    self.close()
            raise
        finally:
            self._is_due = self._transacting = False
            if self._turn is not None:
                self._turn.leave()
        self._sync()  # while others have their turn

    def _begin(self) -> None:
        deadline = time.monotonic() + self._patience_s
        if self._turn is not None:
            self._turn.take(deadline)
        self.run(_begin_immediately, max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        """Close it in good order: nothing is left in the log that is not in the file, too."""
        if self._db is not None and self._private:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint").fetchone()
        self.close()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
            if self._private:
                persistence.end(self._identity)
        for each in (self._turn, self._log):
            if each is not None:
                each.close()

    def keep_room(self, wanted: int) -> None:
        """Have ``wanted`` bytes in the file and in its log that commits can use while the disk is
        full. Nothing is done if half of them are left, or the disk has little room.

        A table of that size is written and dropped: its pages are free, and the file and the log do
        not shrink. The table that a kill leaves is dropped by the next call.
        """
        with self.transaction():
            self.run(lambda db: db.execute("DROP TABLE IF EXISTS room"))
            if self.run(lambda db: measure_room(self.path, db)) >= wanted // 2:
                return
            if free_bytes(os.path.dirname(self.path)) < _LEAVE_FREE * wanted:
                return
            pieces = [(_PIECE,)] * -(-wanted // _PIECE)
            self.run(lambda db: db.execute("CREATE TABLE room (piece)"))
            self.run(lambda db: db.executemany("INSERT INTO room VALUES (zeroblob(?))", pieces))
        self.run(_checkpoint)
        self.run(lambda db: db.execute("DROP TABLE room"))
        self.run(_checkpoint)

    def set_aside(self, why: str) -> None:
        """Rename the corrupt file and its companions; the next statement begins a new one."""
        with self._lock():
            if _identify(self.path) == self._identity:
                setting_aside.begin(self.path, why)
            # Not before: when SQLite closes a file that is still at its path, it deletes the log.
            self.close()

    def _run_once(self, statement: Statement[T]) -> T:
        db = self._db or self._open()
        changes = db.total_changes
        result = statement(db)
        if not db.in_transaction and db.total_changes != changes:
            self._sync()
        # What was read from or written to a file that is no longer in its place does not count.
        if not db.in_transaction and _identify(self.path) != self._identity:
            raise _Moved
        return result

    def _sync(self) -> None:
        """Wait until what was committed is durable, if SQLite has not."""
        if self._log is None:
            return
        try:
            self._log.sync()
        except StoreUnavailable:
            self.close()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            if self._private:
                check_private(self.path)
            directory = os.path.dirname(self.path)
            if not os.path.isdir(directory):
                os.makedirs(directory, 0o750, exist_ok=True)
                if self._private:
                    check_private(self.path)  # another user may have made it first
            if setting_aside.is_begun(self.path):
                with self._lock():
                    setting_aside.finish(self.path)
            create(self.path)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot open {self.path}: {error.strerror}",
                hint="does the directory exist, and may this user write there?",
            ) from error
        self._identity = _identify(self.path)
        if self._private:
            persistence.begin(self.path, self._identity)
        try:
            self._db = db = sqlite3.connect(self.path, isolation_level=None, timeout=0)
        except sqlite3.Error:
            if self._private:
                persistence.end(self._identity)
            raise
        db.text_factory = _read_text
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._most)
        try:
            if self._version_of(db) != self._version:
                with self._lock():
                    self._make_schema(db)
            self._make_indexes(db)
            if self._log is not None:
                self._log.open(db)
                db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            else:
                db.execute("PRAGMA synchronous = FULL")
                self._need_no_room(db)
        except sqlite3.Error as error:
            # A corrupt file is closed after it was set aside, not before.
            if not _name(error).startswith(_CORRUPT):
                self.close()
            raise
        except StoreError:
            self.close()
            raise
        return db

    def _need_no_room(self, db: sqlite3.Connection) -> None:
        """Have commits reuse what the file and its log have of the disk."""
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("PRAGMA secure_delete = OFF")  # it would write free pages, too
        if db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            persistence.hold(self.path, self._identity)

    def _version_of(self, db: sqlite3.Connection) -> int:
        """The file's schema version, 0 for a new file; refuses what is not ours or too new."""
        db.execute("BEGIN")  # one snapshot: another process may be making the file
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        application = int(db.execute("PRAGMA application_id").fetchone()[0])
        tables = db.execute("SELECT 1 FROM sqlite_master").fetchone()
        strange = db.execute(
            "SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index') LIMIT 1"
        ).fetchone()
        made = db.execute("SELECT sql FROM sqlite_master WHERE type = 'table'").fetchall()
        db.execute("COMMIT")
        if strange:
            raise StoreRefused(
                f"{self.path} has views or triggers, which nomarr-systemd never makes",
                hint="it was tampered with: move it away",
            )
        if not all(_PLAIN_TABLE.fullmatch(str(sql)) for (sql,) in made):
            raise StoreRefused(
                f"{self.path} has tables with conditions, which nomarr-systemd never makes",
                hint="it was tampered with: move it away",
            )
        if application == APPLICATION_ID and version > self._version:
            raise SchemaTooNew(
                f"{self.path} has schema {version}; this version knows up to {self._version}",
                hint="upgrade nomarr-systemd again, or restore a backup from before its upgrade",
            )
        if application != APPLICATION_ID and tables:
            raise StoreRefused(
                f"{self.path} is a database of another program",
                hint="point [store] url at a directory of its own",
            )
        return version

    def _make_schema(self, db: sqlite3.Connection) -> None:
        if self._version_of(db) == self._version:
            return  # made by another process while we waited for the lock
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        for statement in (*self._schema, *self._indexes):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {self._version}")
        db.execute("COMMIT")

    def _make_indexes(self, db: sqlite3.Connection) -> None:
        """Create the indexes that are missing, with their tables, which an older version did not
        make, and drop those that are not wanted.

        They are compared by what they index, not by name: a large one is not built again. A full
        disk or a lock leaves the file as it was; it works without them. But a file that others may
        write is not used with an index that no version made: it may take hours to compute.
        """
        there = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        wanted = {_indexed(sql): sql for sql in self._indexes}
        found = {_indexed(sql): name for name, sql in db.execute(there)}
        if wanted.keys() == found.keys():
            return
        try:
            db.execute("BEGIN IMMEDIATE")
            found = {_indexed(sql): name for name, sql in db.execute(there)}
            for indexed in found.keys() - wanted.keys():
                db.execute(f'DROP INDEX "{found[indexed]}"')
            if missing := wanted.keys() - found.keys():
                for statement in (*self._schema, *(wanted[indexed] for indexed in missing)):
                    db.execute(statement)
            db.execute("COMMIT")
        except sqlite3.OperationalError:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if not self._private and not all(map(_OURS.fullmatch, found)):
                raise

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(f"{self.path}.lock", self._patience_s))
            except OSError as error:
                raise StoreUnavailable(f"cannot lock {self.path}.lock: {error.strerror}") from error
            yield


def _begin_immediately(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")


def measure_room(path: str, db: sqlite3.Connection) -> int:
    """The bytes that commits can use without any room on the disk: the file's free pages, or the
    log, if that is smaller."""
    pages, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("freelist_count", "page_size")
    )
    return min(pages * size, _size(f"{path}-wal"))


def _checkpoint(db: sqlite3.Connection) -> None:
    """Copy the log to the file; the next commit begins the log anew, if no process reads it."""
    db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()


def _indexed(sql: str) -> str:
    """The table and the columns of a CREATE INDEX statement."""
    return sql.partition(" ON ")[2]


def _read_text(raw: bytes) -> str:
    """A column's text; empty if it is not UTF-8, so that one bad row does not affect the rest."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def _name(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", ""))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _identify(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)  # it was removed, or cannot be reached
    return (status.st_dev, status.st_ino)


def _unavailable(path: str, name: str, error: sqlite3.Error) -> StoreError:
    why = clean(str(error), _MAX_WHY)
    if name.startswith("SQLITE_FULL"):
        return StoreUnavailable(f"no space left for {path}", hint="free some disk space")
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreUnavailable(f"cannot use {path}: {why}", hint="check its owner and mode")
    return StoreUnavailable(f"{path}: {why} ({name or type(error).__name__})")
