"""Jobs for people who may only read: from the store where this user may open it, else from the
supervisor, which answers members of the group of readers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import Config, StoreSettings
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.job import STATUSES, Doc, Status
from nomarr_systemd.core.json import get_objects
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.jobs import queue
from nomarr_systemd.live import client
from nomarr_systemd.live.protocol import JOBS_OF
from nomarr_systemd.operate.job_store import open_as_owner
from nomarr_systemd.store.protocol import Store

_PAGE: Final = 200  # the most that the supervisor sends
_TIMEOUT_S: Final = 10.0  # it reads the store for the answer
_WALK_S: Final = 60.0  # for all jobs of a status; a million take about that long


class JobReader(Protocol):
    def count(self, pool: str) -> dict[Status, int]: ...
    def walk(self, pool: str, status: Status) -> Iterator[Doc]: ...
    def find(self, pool: str, job: str) -> Doc:
        """Return the job with this key, or of this path in ``pool``; or NoSuchJob."""


@contextmanager
def read_jobs(scope: Scope, config: Config) -> Iterator[JobReader]:
    if may_open(config.store):
        with open_as_owner(config.store) as store:
            yield StoreReader(store)
    else:
        client.check_access(scope.paths.live)
        yield LiveReader(scope.paths.live)


def may_open(settings: StoreSettings) -> bool:
    parsed = parse_store_url(settings.url)
    if isinstance(parsed, SqliteUrl):
        place = f"{parsed.directory}/work"
        return not os.path.exists(place) or os.access(place, os.R_OK | os.W_OK | os.X_OK)
    return not settings.work_password_file or os.access(settings.work_password_file, os.R_OK)


class StoreReader:
    """Reads the store itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def count(self, pool: str) -> dict[Status, int]:
        return queue.count(self._store, pool)

    def walk(self, pool: str, status: Status) -> Iterator[Doc]:
        return queue.walk(self._store, pool, status)

    def find(self, pool: str, job: str) -> Doc:
        return queue.find(self._store, pool, job)


class LiveReader:
    """Asks the supervisor."""

    def __init__(self, path: str) -> None:
        self._path = path

    def count(self, pool: str) -> dict[Status, int]:
        counts = self._ask(pool=pool, status=STATUSES[0], limit=1).get("counts")
        found = counts if isinstance(counts, dict) else {}
        return {each: n if type(n := found.get(each)) is int else 0 for each in STATUSES}

    def walk(self, pool: str, status: Status) -> Iterator[Doc]:
        after = ""
        ends = time.monotonic() + _WALK_S
        while page := self._docs(pool=pool, status=status, limit=_PAGE, after=after):
            yield from page
            if page[-1]["_key"] <= after:
                return  # the same page again
            after = page[-1]["_key"]
            if time.monotonic() > ends:  # the supervisor is not trusted to come to an end
                raise NomarrError(
                    f"the supervisor has sent jobs for {_WALK_S:.0f} s; the rest is left out",
                    hint="use --limit; or sudo, which reads the store itself",
                )

    def find(self, pool: str, job: str) -> Doc:
        found = self._docs(pool=pool, job=job)
        if not found:
            raise queue.no_such_job(pool, job)
        return found[0]

    def _docs(self, **request: object) -> list[Doc]:
        jobs = get_objects(self._ask(**request), "jobs")
        return [{**each, "_key": str(each.get("id", ""))} for each in jobs]

    def _ask(self, **request: object) -> dict[str, Any]:
        answer = client.ask(self._path, {"op": JOBS_OF, **request}, timeout_s=_TIMEOUT_S)
        if not answer:
            raise NomarrError(
                "the supervisor does not answer about jobs",
                hint="use sudo, which reads the store itself; or see nomarrctl doctor",
            )
        return answer
