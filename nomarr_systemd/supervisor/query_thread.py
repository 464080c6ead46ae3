"""The thread of the store's helper that answers questions of the live socket: history of health,
lists of jobs, what is known of other hosts.

It has its own connection to the store. Every user that may connect may ask, so every answer is
bounded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import check_pool, parse_component
from nomarr_systemd.core.job import STATUSES
from nomarr_systemd.fleet import view
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs import queue
from nomarr_systemd.ledger import health_series
from nomarr_systemd.ledger.public import read_whole
from nomarr_systemd.ledger.shared_archive import get_host, read_records
from nomarr_systemd.live import protocol
from nomarr_systemd.store.protocol import HOSTS, Store
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.live_connection import encode
from nomarr_systemd.supervisor.store_queries import JOB_OF_RUN
from nomarr_systemd.supervisor.work_store import Inbox, open_bounded

MAX_WORKERS: Final = 100  # in one question about history
MAX_JOBS: Final = 200
MAX_RECORDS: Final = 4 << 20  # characters of all records in one answer
MAX_INCIDENTS: Final = 500
MAX_ARCHIVES: Final = 10  # hosts in one question
_MAX_PATH: Final = 8192
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FOREVER_MS: Final = 1 << 50

Answer = dict[str, Any]
Query = Callable[[Store, str], Answer]  # called with this host's name


class QueryThread:
    """All of it belongs to the thread alone. ``report`` sends a message to the loop."""

    def __init__(self, inbox: Inbox, public: str, report: Callable[[Message, bytes], None]) -> None:
        self._inbox = inbox
        self._report = report
        self._store: Store | None = None
        self._opened: StoreSettings | None = None
        self._queries: Mapping[str, Callable[[Mapping[str, Any]], Query]] = {
            protocol.HISTORY: partial(read_history, public),
            protocol.JOBS_OF: list_jobs,
            protocol.FLEET: read_fleet,
            protocol.ARCHIVE: read_archive,
            JOB_OF_RUN: find_job_of_run,
        }

    def run(self) -> None:
        while (message := self._inbox.get()) is not None:
            _, number, settings, operation, request = message
            try:
                query = self._queries[operation](request)
            except NomarrError as error:
                hint = f" ({error.hint})" if error.hint else ""
                answer: Answer = {"ok": False, "error": f"{error}{hint}"}
            else:
                answer = self._answer(StoreSettings(*settings), query)
            line = encode(answer)
            if len(line) > protocol.MAX_LINE:
                why = f"the answer is longer than {protocol.MAX_LINE} bytes; ask for less"
                line = encode({"ok": False, "error": why})
            self._report(["answer", number], line)
        self._close()

    def _answer(self, settings: StoreSettings, query: Query) -> Answer:
        try:
            if self._store is None or settings != self._opened:
                self._close()
                self._store, self._opened = open_bounded(settings), settings
            return query(self._store, host_of(settings))
        except NomarrError as error:
            self._close()
            return {"ok": False, "error": str(error)}
        except Exception as error:  # a damaged document
            return {"ok": False, "error": f"the store cannot be read: {error!r:.200}"}

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def read_history(public: str, request: Mapping[str, Any]) -> Query:
    """Health of ``components`` between ``since_ms`` and ``until_ms`` in ``points`` buckets; with
    ``records`` also the records of each: those of this host's workers from the directory
    ``public``. BadName if the request is wrong."""
    names = request.get("components")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_WORKERS:
        raise BadName(f'"components" must be a list of 1 to {MAX_WORKERS} workers')
    components = [parse_component(str(name)[:100]) for name in names]
    since_ms = _number(request, "since_ms", 0, _FOREVER_MS)
    until_ms = _number(request, "until_ms", _FOREVER_MS, _FOREVER_MS)
    points = _number(request, "points", 300, health_series.MAX_POINTS)
    with_records = request.get("records") is True
    other = _host(request["host"]) if request.get("host") is not None else ""

    def query(store: Store, mine: str) -> Answer:
        host = other if other and mine else mine
        now_ms = time.time_ns() // 1_000_000
        span = (since_ms, min(until_ms, now_ms + 1))
        found: dict[str, dict[str, Any]] = {}
        series = health_series.SeriesReader(store, now_ms + 1, host, many=len(components) > 1)
        for each in components:
            health = [list(bucket) for bucket in series.read(each.component_id, *span, points)]
            found[each.component_id] = {"health": health}
            if with_records:
                if host != mine:
                    records = read_records(store, each, *span, host)
                else:
                    whole = read_whole(public, each).account.records
                    records = [one for one in whole if span[0] <= one.wall_ms < span[1]]
                rows = [record.write() for record in records]
                share = MAX_RECORDS // len(components)
                found[each.component_id]["records"] = _take_newest(rows, share)
        return {"ok": True, "now_ms": now_ms, "workers": found}

    return query


def _take_newest(rows: list[str], share: int) -> list[str]:
    """The last rows that have no more characters than ``share`` together."""
    for place in range(len(rows) - 1, -1, -1):
        share -= len(rows[place])
        if share < 0:
            return rows[place + 1 :]
    return rows


def read_fleet(_request: Mapping[str, Any]) -> Query:
    """All hosts that share the store, MAX_HOSTS at most; none if it is for one host."""

    def query(store: Store, host: str) -> Answer:
        docs = store.find(HOSTS, limit=view.MAX_HOSTS + 1) if host else []
        hosts = [view.trim(doc) for doc in docs[: view.MAX_HOSTS]]
        is_cut = len(docs) > view.MAX_HOSTS
        return {"ok": True, "now_ms": store.now_ms(), "host": host, "hosts": hosts, "cut": is_cut}

    return query


def read_archive(request: Mapping[str, Any]) -> Query:
    """Workers and the newest ``limit`` incidents of each of ``hosts``."""
    names = request.get("hosts")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_ARCHIVES:
        raise BadName(f'"hosts" must be a list of 1 to {MAX_ARCHIVES} hosts')
    hosts = [_host(name) for name in names]
    limit = _number(request, "limit", 50, MAX_INCIDENTS) or 1

    def query(store: Store, mine: str) -> Answer:
        return {"ok": True, "hosts": {each: get_host(store, each, limit) for each in hosts if mine}}

    return query


def list_jobs(request: Mapping[str, Any]) -> Query:
    """Jobs of ``pool`` in ``status``, at most ``limit`` of them after the key ``after``; with
    ``job``, the one with this key or path, or none."""
    pool = str(request.get("pool"))[:100]
    if request.get("job") is not None:
        return _find_job(pool, str(request["job"])[:_MAX_PATH])
    check_pool(pool)
    status = request.get("status")
    if status not in STATUSES:
        raise BadName(f'"status" must be one of {", ".join(STATUSES)}')
    limit = _number(request, "limit", 50, MAX_JOBS)
    after = str(request.get("after") or "")[:254]

    def query(store: Store, _host: str) -> Answer:
        where = {"pool": pool, "status": status}
        page = store.find(queue.JOBS, where, after=after, limit=limit)
        jobs = [_show_job(doc) for doc in page]
        return {"ok": True, "jobs": jobs, "counts": queue.count(store, pool)}

    return query


def find_job_of_run(request: Mapping[str, Any]) -> Query:
    """The ``job`` that a run had when it died, by the store; null if it does not know."""

    def query(store: Store, _host: str) -> Answer:
        found = queue.find_of_run(store, request["pool"], request["invocation"])
        return {"ok": True, "job": found["path"] if found else None}

    return query


def _find_job(pool: str, job: str) -> Query:
    if pool:
        check_pool(pool)

    def query(store: Store, _host: str) -> Answer:
        try:
            return {"ok": True, "jobs": [_show_job(queue.find(store, pool, job))]}
        except queue.NoSuchJob:
            return {"ok": True, "jobs": []}

    return query


def _show_job(doc: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": doc["_key"], **{name: doc[name] for name in doc if name[0] != "_"}}


def _host(name: object) -> str:
    if not isinstance(name, str) or not _HOST.fullmatch(name):
        raise BadName("a host is named by its id")
    return name


def _number(request: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = request.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise BadName(f'"{name}" must be a whole number up to {most}')
    return value
