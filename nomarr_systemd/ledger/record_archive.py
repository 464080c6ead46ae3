"""Every record of an account, kept for good: the ledger's own ring has the last hundred.

One document in ``stats`` for each worker and 30 days (docs/contract.md#documents). Best effort, as
the samples of health are: nothing is decided by it.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.errors import BadName, KeyExists, StaleRevision
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.ledger.public import SUFFIX, read_published
from nomarr_systemd.store.protocol import Doc, Store, hosted, put

ARCHIVE: Final = "stats"
_CHUNK_MS: Final = 30 * 86_400_000
_MAX_CHUNKS: Final = 61  # five years in one answer


class Archivist:
    """Copies what is new in ``public/`` into the store; remembers what it has seen."""

    def __init__(self, directory: str, host: str = "") -> None:
        self._directory = directory
        self._host = host
        self._seen: dict[str, int] = {}  # modification times, by file name

    def run(self, store: Store) -> int:
        """Archive the records of every account that has changed; returns how many accounts."""
        try:
            entries = [each for each in os.scandir(self._directory) if each.name.endswith(SUFFIX)]
        except OSError:
            return 0
        changed = 0
        for entry in entries:
            try:
                component = parse_component(entry.name.removesuffix(SUFFIX))
                written_ns = entry.stat().st_mtime_ns
            except (BadName, OSError):
                continue
            if self._seen.get(entry.name) != written_ns:
                _archive(store, self._directory, component, self._host)
                self._seen[entry.name] = written_ns
                changed += 1
        return changed


def read_archive(
    store: Store, component: Component, since_ms: int, until_ms: int, host: str = ""
) -> list[Record]:
    """The archived records of a worker between two moments, oldest first."""
    last = until_ms // _CHUNK_MS
    first = max(since_ms // _CHUNK_MS, last - _MAX_CHUNKS)
    found = []
    for chunk in range(first, last + 1):
        doc = store.get(ARCHIVE, _key(component, chunk, host)) or {}
        found += [Record.read(row) for row in doc.get("rows", {}).values()]
    found.sort(key=lambda record: record.attempt)
    return [record for record in found if since_ms <= record.wall_ms < until_ms]


def _archive(store: Store, directory: str, component: Component, host: str) -> None:
    chunks: dict[int, dict[str, str]] = {}
    for row in read_published(directory, component).account.rows:
        record = Record.read(row)
        # The moment as well: attempts begin again after an account was deleted.
        chunk = chunks.setdefault(record.wall_ms // _CHUNK_MS, {})
        chunk[f"{record.attempt}.{record.wall_ms}"] = row
    for chunk_number, rows in chunks.items():
        key = _key(component, chunk_number, host)
        doc: Doc = store.get(ARCHIVE, key) or {"_key": key, "rows": {}}
        merged = {**doc["rows"], **rows}
        if merged == doc["rows"]:
            continue
        doc["rows"] = merged
        try:
            put(store, ARCHIVE, doc)
        except (StaleRevision, KeyExists):
            continue


def _key(component: Component, chunk: int, host: str) -> str:
    return hosted(f"records:{component.component_id}:{chunk}", host)
