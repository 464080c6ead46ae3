"""Ends of jobs that could not be recorded because the store was away: files in the state directory
of the worker. They outlive it: the next worker of the pool there records them, once.

A file is written when recording fails and removed when it succeeds. If the job was begun again
meanwhile, its end is no longer wanted, and the file is removed.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Final

from nomarr_systemd.core.job import Owner
from nomarr_systemd.core.json import JsonError, decode
from nomarr_systemd.host.files import remove, write_durably
from nomarr_systemd.jobs.claims import Claims, End, deliver
from nomarr_systemd.store.protocol import Store

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 4 << 20
_PREFIX: Final = "owed-"


class OwedResults:
    """The files of one pool; ``directory`` is empty if the worker has none: nothing is kept."""

    def __init__(self, directory: str, pool: str, owner: Owner) -> None:
        self._directory = directory
        self._prefix = f"{_PREFIX}{pool}-"
        self._owner = owner

    def keep(self, key: str, end: End, attempts: int) -> bool:
        """Keep the end of the job in hand; False if that is not possible."""
        if not self._directory:
            return False
        note = {"job": key, "end": end._asdict(), "attempts": attempts}
        content = json.dumps(note | self._owner._asdict()).encode()
        try:
            write_durably(self._path(self._owner.invocation), content)
        except OSError as error:
            log.warning("the end of job %r cannot be kept in a file: %s", key, error)
            return False
        return True

    def forget(self) -> None:
        """Remove the file of this run: the end of its job is recorded."""
        if self._directory:
            remove(self._path(self._owner.invocation))

    def deliver(self, store: Store) -> None:
        """Record what earlier runs could not. May raise StoreUnavailable."""
        try:
            names = sorted(os.listdir(self._directory)) if self._directory else []
        except OSError:
            return
        for name in names:
            path = f"{self._directory}/{name}"
            is_own = path == self._path(self._owner.invocation)
            if name.startswith(self._prefix) and name.endswith(".json") and not is_own:
                self._deliver(store, path)

    def _deliver(self, store: Store, path: str) -> None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as file:
                note = decode(file.read(_MAX_BYTES))
            owner = Owner(*(str(note[name]) for name in Owner._fields))
            key, end, attempts = str(note["job"]), End(**note["end"]), int(note["attempts"])
        except FileNotFoundError:
            return  # another worker was faster
        except (OSError, JsonError, TypeError, ValueError, KeyError) as error:
            log.warning("%s is not the end of a job, and is removed: %s", path, error)
            remove(path)
            return
        pool = key.partition(":")[0]
        if deliver(Claims(store, pool, owner), key, end, attempts):
            log.info("the end of job %r, owed by run %s, is recorded", key, owner.invocation)
        else:
            log.warning(
                "job %r was begun again or changed since run %s ended it", key, owner.invocation
            )
        remove(path)

    def _path(self, invocation: str) -> str:
        return f"{self._directory}/{self._prefix}{invocation}.json"
