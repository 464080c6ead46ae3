"""The write-ahead log of a SQLite file that many processes write.

SQLite would wait for the disk inside the transaction, while no other process can begin one. Here
it is told not to (synchronous=NORMAL), and the process waits after its commit and its turn: others
commit in this time. What comes later in the log is never durable without what comes before it. So a
process that has read the commit of another, and waits for its own transaction, has both.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Final

from nomarr_systemd.core.errors import StoreUnavailable

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Log:
    """The log of the database at ``path``, as one connection uses it."""

    def __init__(self, path: str) -> None:
        self._path = f"{path}-wal"
        self._fd = -1

    def open(self, db: sqlite3.Connection) -> None:
        """Leave it to ``sync`` to wait for the disk; to SQLite, if there is no log to be opened."""
        if db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            with contextlib.suppress(OSError):  # SQLite has its locks on other files
                self._fd = os.open(self._path, _FLAGS)
        db.execute(f"PRAGMA synchronous = {'FULL' if self._fd == -1 else 'NORMAL'}")

    def sync(self) -> None:
        """Wait until all commits so far are durable; if that fails, nobody knows whether they
        are."""
        if self._fd == -1:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot write {self._path} to the disk: {error.strerror}",
                hint="see what the kernel says about the disk: journalctl -k",
            ) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)
