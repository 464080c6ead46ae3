"""Leases of hosts in the store: this host's is renewed, those of others are looked at.

When a lease has lapsed is decided in ``core.lease``; what becomes of a lost host's jobs, in
``jobs.lost_hosts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.json import JsonError
from nomarr_systemd.core.lease import RENEWALS, Lease, read_lease
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.store.protocol import HOSTS, Doc, Store

FORGET_MS: Final = 30 * 86_400_000  # after this a lost host's document is deleted
_SOME: Final = 20  # leases that one question returns
_TRIES: Final = 10


class Renewal(NamedTuple):
    """What was found when a lease was renewed."""

    was_lost: bool  # other hosts had declared this one lost, and have settled its jobs
    is_contested: bool  # another machine, or another user's supervisor, renews it as well
    is_unsure: bool = False  # another one held it: this machine before a boot, or another machine


class HostLease:
    """The lease of this host. ``holder`` tells a machine apart from another with the same name."""

    def __init__(self, host: str, name: str, holder: str) -> None:
        self._host = host
        self._name = name
        self._holder = holder
        self._rev = ""
        self._has_held = False
        self._unsure = 0  # renewals until the lease of another holder would be over

    def renew(self, store: Store, lease_s: float, about: Mapping[str, Any]) -> Renewal:
        """Renew it by the store's clock, which is read first, so it never lasts too long. ``about``
        is what else the document says. May raise StoreUnavailable; then call it again."""
        was_lost = is_contested = False
        for _ in range(_TRIES):
            now_ms = store.now_ms()
            fields = {
                **about,
                "_key": self._host,
                "name": self._name,
                "holder": self._holder,
                "state": "held",
                "renewed_ms": now_ms,
                "lease_ms": round(lease_s * 1000),
            }
            try:
                if self._rev:
                    self._rev = store.replace(HOSTS, fields | {"_rev": self._rev})
                else:
                    self._rev = store.insert(HOSTS, fields)
            except (StaleRevision, KeyExists):
                there = store.get(HOSTS, self._host) or {}
                self._rev = str(there.get("_rev", ""))
                was_lost |= there.get("state") == "lost"
                # After a reboot the holder is another one, too; but then we have not held it.
                is_other = there.get("holder") not in (None, self._holder)
                is_contested |= self._has_held and is_other
                if is_other and any(not each.is_over(now_ms) for each in _read_all([there])):
                    self._unsure = RENEWALS
                continue
            self._has_held = True
            is_unsure, self._unsure = self._unsure > 0, max(0, self._unsure - 1)
            return Renewal(was_lost, is_contested, is_unsure)
        raise StoreUnavailable(f"{HOSTS}/{self._host} changes again and again")


def find_late(store: Store, now_ms: int) -> list[Lease]:
    """Return a few leases that were not renewed for half of their time, the oldest first."""
    where = {"state": "held"}
    first = _read_all(store.find(HOSTS, where, order="renewed_ms", limit=1))
    if first and first[0].age_ms(now_ms) * 2 <= first[0].lease_ms:
        return []
    found = _read_all(store.find(HOSTS, where, order="renewed_ms", limit=_SOME))
    return [each for each in found if each.age_ms(now_ms) * 2 > each.lease_ms]


def declare_lost(store: Store, lease: Lease) -> bool:
    """Note that a host is lost; False if it has renewed its lease, or another host was faster."""
    doc = store.get(HOSTS, lease.host)
    if doc is None or doc["_rev"] != lease.rev:
        return False
    try:
        store.replace(HOSTS, doc | {"state": "lost"})
    except StaleRevision:
        return False
    return True


def find_lost(store: Store) -> list[Lease]:
    """Return the leases of hosts that were declared lost."""
    return _read_all(store.find(HOSTS, {"state": "lost"}, order="renewed_ms"))


def is_first(store: Store, host: str, pool: str = "") -> bool:
    """Return True if this host has the first id of all hosts that hold a lease: it does what one
    host has to do for all. With ``pool``, also if that first host does not have this pool."""
    found = store.find(HOSTS, {"state": "held"}, limit=1)
    if not found or found[0]["_key"] == host:
        return bool(found)
    return bool(pool) and not any(pool in each.rules for each in _read_all(found))


def forget_old(store: Store, now_ms: int) -> None:
    """Delete hosts that were lost long ago."""
    store.prune(HOSTS, "renewed_ms", now_ms - FORGET_MS, {"state": "lost"})


def _read_all(docs: list[Doc]) -> list[Lease]:
    found = []
    for doc in docs:
        try:
            found.append(read_lease(doc))
        except JsonError:
            continue  # a host that is there writes it again soon
    return found
