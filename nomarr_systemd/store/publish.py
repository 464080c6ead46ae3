"""``public/<instance>.json``: the ledger's documents for everyone who may only read.

A reader without write permission can use no journal mode of SQLite, so each committed document
is renamed into place here. These files are copies: losing one loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator

from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component

SUFFIX = ".json"
PATIENCE_S = 2.0


class Publisher:
    """Keeps one directory of published documents, 0640 and of the given group.

    ``host`` is ours where several share a store: the others' workers are not shown here.
    """

    def __init__(self, directory: str, *, gid: int = -1, host: str = "") -> None:
        self.directory = directory
        self._gid = gid
        self._host = host
        self.error: Exception | None = None  # why the last publication failed; the commit stands

    def publish(self, key: str, current: Callable[[], str | None]) -> None:
        """Show what ``current`` reads from the store now; None takes the file away.

        Reading under the lock keeps two writers from overtaking each other: whoever comes last
        has read last. A full disk does not undo a commit, so errors are kept and logged, not
        raised, and ``publish_all`` makes up for them.
        """
        name = self.name(key)
        if name is None:
            return
        try:
            with self._lock():
                self._show(name, current())
            self.error = None
        except (OSError, StoreUnavailable) as error:
            import logging  # a rare path; the usual start-up should not pay for the import

            self.error = error
            logging.getLogger("nomarr.store").error("cannot publish %s: %s", name, error)

    def remove_others(self, keys: Iterable[str]) -> None:
        """Take away what none of these documents is shown in: the rest of a kill or a removal."""
        kept = {self.name(key) for key in keys}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                if name not in kept and (name.endswith((SUFFIX, f"{SUFFIX}.new"))):
                    _remove(os.path.join(self.directory, name))

    def name(self, key: str) -> str | None:
        """The file that shows the document ``key``, or None for one that is not shown here."""
        component_id, _, host = key.partition("@")
        try:
            component = parse_component(component_id)
        except BadName:
            return None
        return component.instance + SUFFIX if host == self._host else None

    def _show(self, name: str, text: str | None) -> None:
        path = os.path.join(self.directory, name)
        if text is None:
            _remove(path)
            return
        temporary = f"{path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o640)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, 0o640)
                if self._gid != -1:
                    os.fchown(fd, -1, self._gid)
                file.write(text)
            os.rename(temporary, path)
        except OSError:
            _remove(temporary)
            raise

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Beside the directory and for its owner alone: a reader must not be able to hold it."""
        if not os.path.isdir(self.directory):
            os.makedirs(self.directory, 0o750, exist_ok=True)
            if self._gid != -1:
                os.chown(self.directory, -1, self._gid)
        fd = os.open(f"{self.directory}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.001)
            yield
        finally:
            os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
