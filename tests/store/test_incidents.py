"""Incidents on both backends: opened once, closed once, whoever is faster."""

from __future__ import annotations

from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.store.protocol import Store

NOW = Moment(1_000_000, "a" * 32, 500_000)
LATER = Moment(2_000_000, "a" * 32, 1_500_000)


def make(pool: str = "tag", canary: int = 0, opened: Moment = NOW) -> Incident:
    members = tuple(f"worker:{pool}:{number}" for number in range(3))
    return Incident(pool, "exit", 1, opened, members[canary], members, ((members[1], "b" * 32),))


def test_there_is_none_at_first(store: Store) -> None:
    breaker = IncidentStore(store)
    assert breaker.get("tag") is None
    assert breaker.incidents() == []
    assert breaker.add("tag", "worker:tag:7") is None
    assert breaker.elect("tag", "worker:tag:1") is None
    assert not breaker.close("tag", "no reason", NOW)


def test_the_first_to_open_it_wins(store: Store) -> None:
    breaker = IncidentStore(store)
    assert breaker.open(make()) == make()
    assert breaker.open(make(canary=2)) == make()
    assert breaker.get("tag") == make()
    assert breaker.open(make("scan")) == make("scan")
    assert sorted(each.pool for each in breaker.incidents()) == ["scan", "tag"]


def test_it_grows_changes_its_canary_and_ends(store: Store) -> None:
    breaker = IncidentStore(store)
    breaker.open(make())
    for _ in range(2):
        grown = breaker.add("tag", "worker:tag:7")
        assert grown is not None
        assert grown.members == (*make().members, "worker:tag:7")
    changed = breaker.elect("tag", "worker:tag:1")
    assert changed is not None
    assert changed.canary == "worker:tag:1"
    assert breaker.close("tag", "it is healthy", LATER)
    assert not breaker.close("tag", "again", LATER)
    closed = breaker.get("tag")
    assert closed is not None
    assert (closed.closed, closed.closed_wall_ms) == ("it is healthy", LATER.wall_ms)
    assert breaker.add("tag", "worker:tag:8") is None
    assert breaker.open(make(opened=LATER)) == make(opened=LATER)
