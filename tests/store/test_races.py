"""Eight real processes at one store: nothing is lost, nothing is won twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nomarr_systemd.store.protocol import Store
from tests.support.places import Place
from tests.support.racers import RACERS, ROUNDS, begin, claim, increment, run_race

pytestmark = pytest.mark.usefixtures("forks")


def test_no_increment_is_lost(place: Place, store: Store) -> None:
    store.insert("meta", {"_key": "counter", "count": 0, "by": {}})
    lost = run_race(increment, place)
    assert len(lost) == RACERS
    counter = store.get("meta", "counter")
    assert counter is not None
    assert counter["count"] == RACERS * ROUNDS
    assert counter["by"] == dict.fromkeys(lost, ROUNDS)


def test_each_key_is_won_once(place: Place, store: Store) -> None:
    won = run_race(claim, place)
    assert sorted(key for keys in won.values() for key in keys) == sorted(
        f"claim_{number}" for number in range(ROUNDS)
    )
    for name, keys in won.items():
        assert {doc["_key"] for doc in store.find("meta", {"owner": name})} == set(keys)


def test_the_store_is_made_once(place: Place, open_store: Callable[[], Store]) -> None:
    names = run_race(begin, place)
    assert [doc["_key"] for doc in open_store().find("meta")] == sorted(names)
