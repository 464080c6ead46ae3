"""The records that have left the rings of their accounts: in the ledger, MOVED in a document
(docs/contract.md#documents).

A document is written in the commit that takes its records out of the ring, and never changed. The
last KEPT documents of a worker are kept, also after its account was removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nomarr_systemd.core.account import MOVED, RING
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.ledger.documents import is_row
from nomarr_systemd.store.protocol import PAST_RECORDS, Doc, Store, hosted

KEPT: Final = 200  # documents of a worker: 5,000 records, and its ring
_DIGITS: Final = 9


def keep(store: Store, component_id: str, host: str, rows: Sequence[str]) -> None:
    """Add records of a worker, in a batch, unless they are there: a store without transactions may
    have them from a process that was killed before it wrote the account. KeyExists if another
    process adds some at the same moment."""
    newest = find_newest(store, component_id, host, RING // MOVED + 1)
    known = {identify(row) for doc in newest for row in read_rows(doc)}
    fresh = [row for row in rows if identify(row) not in known]
    number = max([0, *(split_key(doc["_key"])[1] for doc in newest)])
    for start in range(0, len(fresh), MOVED):
        number += 1
        document = {"host": host, "component_id": component_id, "rows": fresh[start:][:MOVED]}
        store.insert(PAST_RECORDS, {"_key": make_key(component_id, number, host), **document})
        if number > KEPT:
            store.delete(PAST_RECORDS, make_key(component_id, number - KEPT, host))


def find_newest(store: Store, component_id: str, host: str, limit: int = 1) -> list[Doc]:
    """Return the newest documents of a worker, newest first."""
    where = {"host": host, "component_id": component_id}
    return store.find(PAST_RECORDS, where, descending=True, limit=limit)


def make_key(component_id: str, number: int, host: str) -> str:
    return hosted(f"{component_id}:{number:0{_DIGITS}d}", host)


def split_key(key: str) -> tuple[Component | None, int, str]:
    """Return the worker, the number and the host in a key; no worker and 0 if it is another key."""
    name, _, host = key.partition("@")
    component_id, _, number = name.rpartition(":")
    try:
        return parse_component(component_id), int(number) if number.isdecimal() else 0, host
    except BadName:
        return None, 0, host


def read_rows(doc: Doc) -> list[str]:
    """Return the records of a document; those that are none are left out."""
    rows = doc.get("rows")
    return [row for row in rows if is_row(row)] if isinstance(rows, list) else []


def identify(row: str) -> tuple[str, ...]:
    """Return the number and the wall time of a record: numbers begin again in a new account."""
    return tuple(row.split("|", 7)[0:7:6])
