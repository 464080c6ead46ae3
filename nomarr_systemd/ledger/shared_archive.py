"""Records and incidents of a host for readers on other hosts, in the store that they share.

They are copies of what the controller publishes on its host, in ``stats``
(docs/contract.md#documents): readers of that store may not read the ledger. Best effort, as the
samples of health are: nothing is decided by them, and workers can write them.
"""

from __future__ import annotations

import os
from typing import Any, Final

from nomarr_systemd.core.errors import BadName, KeyExists, StaleRevision
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.json import JsonError, get_objects
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import clean_all, one_line
from nomarr_systemd.ledger.documents import MAX_ROW, read_past_incident
from nomarr_systemd.ledger.past_records import KEPT, identify, read_rows
from nomarr_systemd.ledger.public import (
    INCIDENTS,
    SUFFIX,
    list_past,
    read_incidents,
    read_past,
    read_published,
)
from nomarr_systemd.store.protocol import Doc, Store, hosted

ARCHIVE: Final = "stats"
_MAX_WORKERS: Final = 10_000


class Archivist:
    """Copies what is new in ``public/`` into the store; remembers what it has seen."""

    def __init__(self, directory: str, host: str) -> None:
        self._directory = directory
        self._host = host
        self._seen: dict[str, int] = {}  # modification times, by file name

    def run(self, store: Store) -> int:
        """Copy what has changed; returns how many files that were."""
        changed: dict[str, int] = {}
        try:
            for entry in os.scandir(self._directory):
                if entry.name.endswith(SUFFIX):
                    written_ns = entry.stat().st_mtime_ns
                    if self._seen.get(entry.name) != written_ns:
                        changed[entry.name] = written_ns
        except OSError:
            return 0
        for name in sorted(changed):
            if name != INCIDENTS and (component := _parse(name)) is not None:
                self._copy_records(store, component)
        workers = {name for name in {*self._seen, *changed} if _parse(name) is not None}
        if INCIDENTS in changed or not workers <= self._seen.keys():
            self._copy_incidents(store, sorted(name.removesuffix(SUFFIX) for name in workers))
        self._seen |= changed
        return len(changed)

    def _copy_records(self, store: Store, component: Component) -> None:
        account, problem = read_published(self._directory, component)
        if problem:
            return
        key = _records_key(component, self._host)
        doc = store.get(ARCHIVE, key) or {"_key": key}
        copied = _number(doc)
        for number in list_past(self._directory, component):
            if number > copied:
                rows = read_past(self._directory, component, number)
                past_key = _records_key(component, self._host, number)
                store.add(ARCHIVE, [{"_key": past_key, "rows": rows}])
                if number > KEPT:
                    store.delete(ARCHIVE, _records_key(component, self._host, number - KEPT))
                copied = number
        _put(store, doc, {"past": copied, "rows": list(account.rows)})

    def _copy_incidents(self, store: Store, workers: list[str]) -> None:
        incidents, _problem = read_incidents(self._directory)
        key = _host_key(self._host)
        doc = store.get(ARCHIVE, key) or {"_key": key}
        old = doc.get("workers")  # also of workers that are gone, whose records are kept
        known = {str(each) for each in old} if isinstance(old, list) else set[str]()
        names = sorted(known.union(workers))[:_MAX_WORKERS]
        rows = [each.to_past_doc() for each in incidents]
        _put(store, doc, {"workers": names, "incidents": rows})


class HostArchive(NamedTuple):
    """What is kept of a host: all its workers that have records, and its newest incidents."""

    workers: list[Component]
    incidents: list[Incident]  # oldest first


def read_records(
    store: Store, component: Component, since_ms: int, until_ms: int, host: str
) -> list[Record]:
    """Return the records of a worker of any host between two moments, oldest first."""
    doc = store.get(ARCHIVE, _records_key(component, host)) or {}
    rows = {identify(row): row for row in reversed(read_rows(doc))}
    for number in range(_number(doc), max(0, _number(doc) - KEPT), -1):
        past = read_rows(store.get(ARCHIVE, _records_key(component, host, number)) or {})
        for row in reversed(past):
            rows.setdefault(identify(row), row)
        if not past or Record.read(past[-1]).wall_ms < since_ms:
            break
    found = (Record.read(one_line(row, MAX_ROW)) for row in reversed(rows.values()))
    return [record for record in found if since_ms <= record.wall_ms < until_ms]


def get_host(store: Store, host: str, limit: int) -> dict[str, Any]:
    """Return what is kept of a host, with its newest incidents, for ``parse_host``."""
    doc = store.get(ARCHIVE, _host_key(host)) or {}
    workers = doc.get("workers")
    names = [each for each in workers if isinstance(each, str)] if isinstance(workers, list) else []
    return {
        "workers": names[:_MAX_WORKERS],
        "incidents": get_objects(doc, "incidents")[-limit:],
    }


def parse_host(content: object) -> HostArchive:
    """Read what ``get_host`` has returned, which is not trusted; another shape is left out."""
    content = content if isinstance(content, dict) else {}
    found, incidents = content.get("workers"), []
    names = [_parse(f"{each}{SUFFIX}") for each in found] if isinstance(found, list) else []
    for each in get_objects(content, "incidents"):
        try:
            incidents.append(read_past_incident(clean_all(each)))
        except JsonError:
            continue
    return HostArchive([each for each in names if each is not None], incidents)


def _put(store: Store, doc: Doc, fields: Doc) -> None:
    """Write a document, if it changes; another process may be faster."""
    if {**doc, **fields} == doc:
        return
    try:
        if "_rev" in doc:
            store.replace(ARCHIVE, {**doc, **fields})
        else:
            store.insert(ARCHIVE, {**doc, **fields})
    except (StaleRevision, KeyExists):
        return


def _parse(name: str) -> Component | None:
    try:
        return parse_component(name.removesuffix(SUFFIX))
    except BadName:
        return None


def _number(doc: Doc) -> int:
    number = doc.get("past")
    return number if type(number) is int and 0 < number < 10**9 else 0


def _host_key(host: str) -> str:
    return hosted("archive", host)


def _records_key(component: Component, host: str, number: int | None = None) -> str:
    part = "" if number is None else f":{number}"
    return hosted(f"archive:{component.component_id}{part}", host)
