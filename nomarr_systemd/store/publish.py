"""``public/<instance>.json``: the ledger's documents for everyone who may only read.

A reader without write permission can use no journal mode of SQLite, so each committed document
is renamed into place here. These files are copies: losing one loses nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component


class Publisher:
    """Keeps one directory of published documents, 0640 and of the given group."""

    def __init__(self, directory: str, *, gid: int = -1) -> None:
        self.directory = directory
        self._gid = gid
        self.error: Exception | None = None  # why the last publication failed; the commit stands

    def publish(self, key: str, current: Callable[[], str | None]) -> None:
        """Show what ``current`` reads from the store now; None takes the file away.

        Reading under the lock keeps two writers from overtaking each other: whoever comes last
        has read last. A full disk does not undo a commit, so errors are kept, not raised, and
        ``publish_all`` makes up for them.
        """
        path = self.path(key)
        if path is None:
            return
        try:
            self._publish(path, current)
            self.error = None
        except (OSError, StoreUnavailable) as error:
            self.error = error

    def path(self, key: str) -> str | None:
        """Where the document ``key`` is shown, or None for a key that names no worker."""
        try:
            component = parse_component(key.partition("@")[0])
        except BadName:
            return None
        return os.path.join(self.directory, f"{component.instance}.json")

    def _publish(self, path: str, current: Callable[[], str | None]) -> None:
        os.makedirs(self.directory, 0o750, exist_ok=True)
        lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = current()
            if text is None:
                _remove(path)
                return
            temporary = f"{path}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o640)
            with open(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, 0o640)
                if self._gid != -1:
                    os.fchown(fd, -1, self._gid)
                file.write(text)
            os.rename(temporary, path)
        finally:
            os.close(lock)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
