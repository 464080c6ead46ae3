"""Incidents (docs/policy.md#incidents): the last one of each pool, in a document that is changed
only by compare-and-swap; and all before it, which are kept.

A closed incident is moved when the next one of its pool is opened: in one commit or, where the
store has none, copied first. Until then its own document has it. So a kill neither loses nor
doubles one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.json import JsonError
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.ledger import documents
from nomarr_systemd.store.protocol import PAST_INCIDENTS, Doc, Store, hosted

_META = "meta"
_KIND = "incident"
_TRIES = 1000  # as for the accounts
_PATIENCE_MS = 10_000
MAX_PAST = 10_000  # of one host; the oldest goes then


class IncidentStore:
    """Reads and writes the incidents of one host; ``host`` is its name in a shared store."""

    def __init__(self, store: Store, host: str = "") -> None:
        self._store = store
        self._host = host

    def get(self, pool: str) -> Incident | None:
        """Return the pool's last incident, open or closed."""
        doc = self._store.get(_META, self._key(pool))
        return _read(doc) if doc else None

    def incidents(self) -> list[Incident]:
        """Return the last incident of every pool."""
        where = {"what": _KIND, "host": self._host}
        return [_read(doc) for doc in self._store.find(_META, where)]

    def history(self, limit: int) -> list[Incident]:
        """Return the newest incidents of this host, open and closed, oldest first."""
        found = {}
        for doc in self._find_past(limit, newest=True):
            with contextlib.suppress(JsonError):  # a damaged one does not hide the others
                past = documents.read_past_incident(doc)
                found[past.key] = past
        found |= {each.key: each for each in self.incidents()}
        return sorted(found.values(), key=lambda each: each.opened.wall_ms)[-limit:]

    def open(self, incident: Incident) -> Incident:
        """Open an incident; if another process has just opened one, return that."""
        return self._change(incident.pool, lambda there: _newer(there, incident)) or incident

    def add(self, pool: str, member: str) -> Incident | None:
        """Add a member; None if the incident is no longer open."""

        def change(there: Incident | None) -> Incident | None:
            if there is None or there.closed or member in there.members:
                return there
            return there._replace(members=(*there.members, member))

        return _if_open(self._change(pool, change))

    def elect(self, pool: str, canary: str) -> Incident | None:
        """Set another canary; None if the incident is no longer open."""

        def change(there: Incident | None) -> Incident | None:
            if there is None or there.closed or there.canary == canary:
                return there
            return there._replace(canary=canary, tried=(*there.tried, there.canary))

        return _if_open(self._change(pool, change))

    def close(self, pool: str, why: str, now: Moment, deaths: int) -> bool:
        """Close the pool's open incident; False if there was none."""
        closed = False

        def change(there: Incident | None) -> Incident | None:
            nonlocal closed
            closed = there is not None and not there.closed
            if there is None or not closed:
                return there
            return there._replace(closed=why, closed_wall_ms=now.wall_ms, deaths=deaths)

        self._change(pool, change)
        return closed

    def _key(self, pool: str) -> str:
        return hosted(f"incident_{pool}", self._host)

    def _change(
        self, pool: str, change: Callable[[Incident | None], Incident | None]
    ) -> Incident | None:
        ends_ms = clock.now().boottime_ms + _PATIENCE_MS
        for _ in range(_TRIES):
            doc = self._store.get(_META, self._key(pool))
            before = _read(doc) if doc else None
            after = change(before)
            if after is None or after == before:
                return after
            new: Doc = {**(doc or {"_key": self._key(pool)}), **after.to_doc()}
            new |= {"what": _KIND, "host": self._host}
            try:
                if before is not None and before.key != after.key:
                    with self._store.batch():
                        self._keep(before)
                        self._store.replace(_META, new)
                elif doc:
                    self._store.replace(_META, new)
                else:
                    self._store.insert(_META, new)
            except (KeyExists, StaleRevision):
                if clock.now().boottime_ms > ends_ms:
                    break
                continue
            return after
        raise StoreUnavailable(f"{_META}/{self._key(pool)} changed again and again")

    def _keep(self, incident: Incident) -> None:
        """Add an incident to the past ones, unless it is there."""
        key = hosted(incident.key, self._host)
        if self._store.get(PAST_INCIDENTS, key):
            return
        newest = self._find_past(1, newest=True)
        number = _number(newest[0]) + 1 if newest else 1
        kept = {**incident.to_past_doc(), "host": self._host, "number": number}
        self._store.add(PAST_INCIDENTS, [{"_key": key, **kept}])
        for oldest in self._find_past(1, newest=False):
            if _number(oldest) <= number - MAX_PAST:
                self._store.delete(PAST_INCIDENTS, oldest["_key"])

    def _find_past(self, limit: int, *, newest: bool) -> list[Doc]:
        """The newest or the oldest past incidents, by number: a clock may be set back."""
        where = {"host": self._host}
        return self._store.find(
            PAST_INCIDENTS, where, order="number", descending=newest, limit=limit
        )


def _number(doc: Doc) -> int:
    number = doc.get("number")
    return number if type(number) is int else 0


def _read(doc: Doc) -> Incident:
    try:
        return documents.read_incident(doc)
    except JsonError as error:
        raise documents.refuse(_META, doc["_key"], error) from error


def _if_open(incident: Incident | None) -> Incident | None:
    return incident if incident is not None and not incident.closed else None


def _newer(there: Incident | None, incident: Incident) -> Incident:
    return incident if there is None or there.closed else there
