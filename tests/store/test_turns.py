"""Turns of restarts, on every backend: never more than so many, given back, or over in time."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.world import Turns
from nomarr_systemd.fleet.turns import TurnStore
from nomarr_systemd.store.protocol import Store
from tests.support.places import Place

LONG_MS = 3_600_000
ZERO, ONE = Component("tag", 0), Component("tag", 1)


def test_turns_are_taken_kept_and_given_back(store: Store) -> None:
    a, b = TurnStore(store, "a", 2), TurnStore(store, "b", 2)
    assert a.read(["tag", "other"]) == {"tag": Turns(2), "other": Turns(2)}
    assert a.take(ZERO, LONG_MS)
    assert b.take(ZERO, LONG_MS)
    assert a.take(ZERO, LONG_MS)  # again: it has one
    assert not b.take(ONE, LONG_MS)
    assert a.read(["tag"]) == {"tag": Turns(0, frozenset(["worker:tag:0"]))}
    assert b.take(Component("other", 0), LONG_MS)
    a.give(ZERO)
    a.give(ZERO)
    assert a.read(["tag"]) == {"tag": Turns(1)}
    assert b.take(ONE, LONG_MS)
    assert b.read(["tag"])["tag"].mine == {"worker:tag:0", "worker:tag:1"}


def test_a_turn_is_over_by_itself(store: Store) -> None:
    TurnStore(store, "a", 1).take(ZERO, -1)
    assert TurnStore(store, "b", 1).take(ZERO, LONG_MS)
    assert TurnStore(store, "a", 1).read(["tag"]) == {"tag": Turns(0)}


def test_without_a_limit_there_are_no_turns(store: Store) -> None:
    assert TurnStore(store, "a", 0).read(["tag"]) == {}


@pytest.mark.parametrize("holders", [None, 5, [], {"x": "y"}, {"x@a": None}])
def test_a_damaged_document_lets_restarts_pass(store: Store, holders: object) -> None:
    store.insert("meta", {"_key": "turns_tag", "holders": holders})
    assert TurnStore(store, "a", 1).take(ZERO, LONG_MS)


def test_never_more_than_allowed_whoever_asks(place: Place, store: Store) -> None:
    """Eight hosts at once, which give their turns back."""
    under_way = most = taken = 0
    lock = threading.Lock()
    TurnStore(store, "first", 3).give(ZERO)

    def take_part(number: int) -> None:
        nonlocal under_way, most, taken
        with closing(place.open()) as mine:
            turns = TurnStore(mine, f"host{number}", 3)
            for _ in range(10):
                if turns.take(ZERO, LONG_MS):
                    with lock:
                        under_way, taken = under_way + 1, taken + 1
                        most = max(most, under_way)
                    turns.read(["tag"])
                    with lock:
                        under_way -= 1
                    turns.give(ZERO)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < most <= 3
    assert taken > 0
    assert TurnStore(store, "first", 3).read(["tag"]) == {"tag": Turns(3)}
