"""Two incidents of one pool, one after the other."""

from __future__ import annotations

import os

from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.sqlite.store import SqliteStore

NOW = Moment(1_000_000, "a" * 32, 500_000)
LATER = Moment(2_000_000, "a" * 32, 1_500_000)


def make(pool: str = "tag", canary: int = 0, opened: Moment = NOW) -> Incident:
    members = tuple(f"worker:{pool}:{number}" for number in range(3))
    return Incident(pool, "exit", 1, opened, members[canary], members, ((members[1], "b" * 32),))


def close_first(directory: str) -> Incident:
    """The first one, which is over."""
    store = SqliteStore(directory, "policy")
    breaker = IncidentStore(store)
    breaker.open(make())
    breaker.close("tag", "worker:tag:0 is healthy", LATER, 5)
    (closed,) = breaker.incidents()
    store.close()
    return closed


def open_second(directory: str) -> Incident:
    """The second one, published as the controller does it."""
    store = SqliteStore(directory, "policy")
    breaker = IncidentStore(store)
    opened = breaker.open(make(opened=LATER))
    Publisher(os.path.join(directory, "public")).publish_incidents(breaker.history(10))
    store.close()
    return opened
