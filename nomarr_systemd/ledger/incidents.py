"""Incidents, one document per pool, changed only by compare-and-swap (docs/policy.md#incidents)."""

from __future__ import annotations

from collections.abc import Callable

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.json import JsonError
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.ledger import documents
from nomarr_systemd.store.protocol import Doc, Store, hosted

_META = "meta"
_KIND = "incident"
_TRIES = 1000  # as for the accounts
_PATIENCE_MS = 10_000


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
        return _if_open(
            self._change(
                pool,
                lambda there: there._replace(canary=canary) if _if_open(there) else there,  # type: ignore[union-attr]
            )
        )

    def close(self, pool: str, why: str, now: Moment) -> bool:
        """Close the pool's open incident; False if there was none."""
        closed = False

        def change(there: Incident | None) -> Incident | None:
            nonlocal closed
            closed = there is not None and not there.closed
            if there is None or not closed:
                return there
            return there._replace(closed=why, closed_wall_ms=now.wall_ms)

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
                if doc:
                    self._store.replace(_META, new)
                else:
                    self._store.insert(_META, new)
            except (KeyExists, StaleRevision):
                if clock.now().boottime_ms > ends_ms:
                    break
                continue
            return after
        raise StoreUnavailable(f"{_META}/{self._key(pool)} changed again and again")


def _read(doc: Doc) -> Incident:
    try:
        return documents.read_incident(doc)
    except JsonError as error:
        raise documents.refuse(_META, doc["_key"], error) from error


def _if_open(incident: Incident | None) -> Incident | None:
    return incident if incident is not None and not incident.closed else None


def _newer(there: Incident | None, incident: Incident) -> Incident:
    return incident if there is None or there.closed else there
