"""Incidents on all backends: opened once, closed once, whoever is faster; and kept for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger import incidents
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.public import INCIDENTS, MAX_BYTES, read_incidents
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.protocol import PAST_INCIDENTS, Store
from tests.support.broken_store import Broken
from tests.support.incidents import LATER, NOW, make


def test_there_is_none_at_first(store: Store) -> None:
    breaker = IncidentStore(store)
    assert breaker.get("tag") is None
    assert breaker.incidents() == []
    assert breaker.add("tag", "worker:tag:7") is None
    assert breaker.elect("tag", "worker:tag:1") is None
    assert not breaker.close("tag", "no reason", NOW, 3)


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
    assert breaker.close("tag", "it is healthy", LATER, 5)
    assert not breaker.close("tag", "again", LATER, 6)
    closed = breaker.get("tag")
    assert closed is not None
    assert (closed.closed, closed.closed_wall_ms) == ("it is healthy", LATER.wall_ms)
    assert (closed.tried, closed.deaths) == ((make().canary,), 5)
    assert breaker.add("tag", "worker:tag:8") is None
    assert breaker.open(make(opened=LATER)) == make(opened=LATER)


def have(breaker: IncidentStore, number: int, pool: str = "tag", wall_ms: int = 0) -> Incident:
    """One incident from its beginning to its end."""
    opened = Moment(wall_ms or NOW.wall_ms + number, NOW.boot_id, NOW.boottime_ms + number)
    assert breaker.open(make(pool, opened=opened)).opened == opened
    breaker.elect(pool, f"worker:{pool}:1")
    assert breaker.close(pool, f"end of {number}", LATER, number)
    closed = breaker.get(pool)
    assert closed is not None
    return closed


def kept(incident: Incident) -> Incident:
    return incident._replace(refunds=())


def test_all_are_kept_and_told_in_order(store: Store) -> None:
    breaker = IncidentStore(store)
    assert breaker.history(10) == []
    happened = [have(breaker, number) for number in range(1, 6)]
    happened.append(have(breaker, 6, "scan"))
    assert breaker.history(10) == [*map(kept, happened[:4]), *happened[4:]]
    assert [each.deaths for each in breaker.history(3)] == [4, 5, 6], "the newest"
    assert breaker.incidents() == [happened[5], happened[4]], "the controller sees the last ones"


def test_hosts_keep_their_own(store: Store) -> None:
    here, there = IncidentStore(store, "one"), IncidentStore(store, "two")
    for number in (1, 2):
        have(here, number)
        have(there, number + 10)
    assert [each.deaths for each in here.history(10)] == [1, 2]
    assert [each.deaths for each in there.history(10)] == [11, 12]


def test_a_clock_that_is_set_back_hides_none(store: Store) -> None:
    breaker = IncidentStore(store)
    for number in range(1, 6):
        have(breaker, number, wall_ms=NOW.wall_ms)  # the same moment at each boot
    assert sorted(each.deaths or 0 for each in breaker.history(10)) == [1, 2, 3, 4, 5]
    numbers = [doc["number"] for doc in store.find(PAST_INCIDENTS)]
    assert sorted(numbers) == [1, 2, 3, 4]


def test_the_oldest_goes_when_there_are_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "MAX_PAST", 3)
    breaker = IncidentStore(store)
    for number in range(1, 8):
        have(breaker, number)
    assert [each.deaths for each in breaker.history(10)] == [4, 5, 6, 7]
    assert len(store.find(PAST_INCIDENTS)) == 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_in_the_middle_loses_and_doubles_none(store: Store, at: int, after: bool) -> None:
    """Opening one moves the one before it: two writes."""
    breaker = IncidentStore(store)
    first = have(breaker, 1)
    second = make(opened=LATER)
    with pytest.raises(StoreUnavailable, match="killed"):
        IncidentStore(Broken(store, at, after=after)).open(second)
    told = [each.key for each in breaker.history(10)]
    assert told in ([first.key], [first.key, second.key]), told
    assert breaker.open(second) == second, "it is done again"
    assert breaker.history(10) == [kept(first), second]


def test_an_incident_of_an_older_version_is_kept(store: Store) -> None:
    old = {**make().to_doc(), "closed": "it is healthy", "closed_wall_ms": LATER.wall_ms}
    del old["tried"], old["deaths"]
    store.insert("meta", {"_key": "incident_tag", "what": "incident", "host": "", **old})
    breaker = IncidentStore(store)
    breaker.open(make(opened=LATER))
    first, second = breaker.history(10)
    assert (first.closed, first.deaths, first.members) == ("it is healthy", None, make().members)
    assert second == make(opened=LATER)


def test_a_damaged_one_does_not_hide_the_others(store: Store) -> None:
    breaker = IncidentStore(store)
    for number in (1, 2, 3):
        have(breaker, number)
    doc = store.find(PAST_INCIDENTS)[0]
    store.replace(PAST_INCIDENTS, {**doc, "members": "0-99999999", "number": "x"})
    assert [each.deaths for each in breaker.history(10)] == [2, 3]
    have(breaker, 4)
    assert [each.deaths for each in breaker.history(10)] == [2, 3, 4]


def test_they_are_published_for_readers(tmp_path: Path, store: Store) -> None:
    breaker, publisher = IncidentStore(store), Publisher(str(tmp_path))
    happened = [kept(have(breaker, number)) for number in range(1, 4)]
    publisher.publish_incidents(breaker.history(10))
    assert read_incidents(str(tmp_path)) == (happened, "")
    assert (tmp_path / INCIDENTS).stat().st_mode & 0o777 == 0o640
    publisher.publish_all(store.find)
    assert (tmp_path / INCIDENTS).exists(), "it is no account that is left over"
    # Too many for the file: the newest are told.
    reason = "x" * 300
    many = [happened[0]._replace(closed=f"{n}{reason}"[:300]) for n in range(1500)]
    publisher.publish_incidents(many)
    assert (tmp_path / INCIDENTS).stat().st_size <= MAX_BYTES
    found, problem = read_incidents(str(tmp_path))
    assert 500 < len(found) < 1500
    assert (found, problem) == (many[-len(found) :], "")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"incidents": [{}, 5, null]}', '{"incidents": "x"}', "\0" * 99]
)
def test_a_damaged_file_is_no_error(tmp_path: Path, content: str) -> None:
    assert read_incidents(str(tmp_path)) == ([], "")
    (tmp_path / INCIDENTS).write_text(content)
    found, _problem = read_incidents(str(tmp_path))
    assert found == []
