"""Copies all documents from one store to another, of any two backends, and compares them.

It may be interrupted and run again: what is there already is compared and, if it differs, replaced.
Documents that belong to a host have the host in their keys on a server, and not in SQLite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final, NamedTuple

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import KeyExists, NomarrError, StaleRevision
from nomarr_systemd.core.text import one_line
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.health_history import COLLECTION as SAMPLES
from nomarr_systemd.operate.job_store import open_as_owner
from nomarr_systemd.store.open import open_store
from nomarr_systemd.store.protocol import (
    DOMAINS,
    HOSTS,
    PAST_INCIDENTS,
    PAST_RECORDS,
    POLICY_LEDGER,
    Doc,
    Domain,
    Store,
    pages,
)
from nomarr_systemd.systemd.running_units import read_invocation

# All documents are a host's own; a field says it.
_HOSTED: Final = (POLICY_LEDGER, "meta", PAST_INCIDENTS, PAST_RECORDS, SAMPLES, "stats")
_WITH_HOST: Final = (
    *(POLICY_LEDGER, "meta", PAST_INCIDENTS, PAST_RECORDS, SAMPLES, "worker_claims"),
)


class Side(NamedTuple):
    """A store, and this host's name in it: empty in SQLite."""

    store: Store
    host: str


class Copied(NamedTuple):
    """One collection: its documents, how many of them were written, and how many are not copied
    because they are another host's."""

    collection: str
    documents: int
    written: int
    skipped: int


Progress = Callable[[str, int], None]


def copy_domain(source: Side, target: Side, domain: Domain, on_page: Progress) -> list[Copied]:
    """Copy and compare a domain; ``on_page(collection, documents so far)`` after each page.
    NomarrError if they differ in the end."""
    return [
        _copy(source, target, each.name, on_page)
        for each in DOMAINS[domain]
        if each.name != HOSTS  # leases are renewed, not copied
    ]


def _copy(source: Side, target: Side, collection: str, on_page: Progress) -> Copied:
    documents = written = skipped = 0
    for page in pages(source.store, collection):
        moved = [_move(collection, doc, source.host, target.host) for doc in page]
        wanted = [doc for doc in moved if doc is not None]
        skipped += len(moved) - len(wanted)
        documents += len(wanted)
        written += _write(target.store, collection, wanted)
        on_page(collection, documents)
    _compare(source, target, collection)
    return Copied(collection, documents, written, skipped)


def _write(store: Store, collection: str, docs: list[Doc]) -> int:
    """Write a page; returns how many documents were new or different."""
    written = store.add(collection, docs) if docs else 0
    if written == len(docs):
        return written
    for doc in docs:
        there = store.get(collection, doc["_key"])
        if there is not None and _own(there) != _own(doc):
            try:
                store.replace(collection, {**doc, "_rev": there["_rev"]})
            except (StaleRevision, KeyExists) as error:
                raise _changed(collection, doc["_key"]) from error
            written += 1
    return written


def _compare(source: Side, target: Side, collection: str) -> None:
    """NomarrError if a document of the source is missing in the target, or differs there."""
    for page in pages(source.store, collection):
        for doc in page:
            moved = _move(collection, doc, source.host, target.host)
            if moved is None:
                continue
            there = target.store.get(collection, moved["_key"])
            if there is None or _own(there) != _own(moved):
                raise _changed(collection, moved["_key"])


def _move(collection: str, doc: Doc, old: str, new: str) -> Doc | None:
    """Return the document as it is kept for the host ``new``; None if it is another host's, which
    SQLite has no place for."""
    moved = {name: value for name, value in doc.items() if name not in ("_rev", "_id")}
    if old == new:
        return moved
    key = str(doc["_key"])
    if collection in _HOSTED:
        name, _, host = key.partition("@")
        if host != old:
            return None
        moved["_key"] = f"{name}@{new}" if new else name
    if collection in _WITH_HOST and str(doc.get("host", "")) == old:
        moved["host"] = new
        if collection == SAMPLES and not new:
            del moved["host"]
    return moved


def _own(doc: Doc) -> Doc:
    return {name: value for name, value in doc.items() if not name.startswith("_")}


def _changed(collection: str, key: str) -> NomarrError:
    return NomarrError(
        f"{collection}/{one_line(key, 254)} differs in the two stores: it was changed meanwhile",
        hint="stop the workers (nomarrctl pause), and run the same command again",
    )


def find_running(scope: Scope) -> list[str]:
    """Return the configured workers that run now."""
    try:
        config = scope.read_in_force()
    except NomarrError:
        return []
    units = f"{scope.paths.runtime}/systemd/units"
    return [each.instance for each in config.components() if read_invocation(units, each.unit)]


@contextmanager
def open_side(settings: StoreSettings, domain: Domain) -> Iterator[Side]:
    """The store of one domain, with the user and the password that are for it."""
    host = host_of(settings)
    if domain == "work":
        with open_as_owner(settings) as work:
            yield Side(work, host)
        return
    policy = open_store(
        settings.url,
        domain,
        password_file=settings.password_file,
        ca_file=settings.ca_file,
        copies=settings.copies,
    )
    with closing(policy):
        yield Side(policy, host)
