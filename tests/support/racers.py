"""Processes that race for one store. Each opens the store, says so, waits for the word to start,
and sends what it got.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.protocol import Store
from tests.support.forks import CONTEXT
from tests.support.moments import death, run
from tests.support.places import Place

RACERS = 8
ROUNDS = 200
DEATHS = 40


def increment(store: Store, name: str) -> int:
    """Count ``ROUNDS`` times in one document by compare-and-swap; returns how many were lost."""
    lost = 0
    for _ in range(ROUNDS):
        for attempt in itertools.count(1):
            doc = store.get("meta", "counter")
            assert doc is not None
            doc["count"] += 1
            doc["by"][name] = doc["by"].get(name, 0) + 1
            try:
                store.replace("meta", doc)
                break
            except StaleRevision:
                lost += 1
                time.sleep(random.random() * 0.01 * attempt)  # as any polite loop would
    return lost


def claim(store: Store, name: str) -> list[str]:
    """Insert the same keys as everyone else; returns those that were won."""
    won = []
    for number in range(ROUNDS):
        key = f"claim_{number}"
        try:
            store.insert("meta", {"_key": key, "owner": name})
            won.append(key)
        except KeyExists:
            continue
    return won


def begin(store: Store, name: str) -> bool:
    """The first use of a store that nobody has made yet."""
    store.insert("meta", {"_key": name})
    return True


def book(store: Store, name: str) -> int:
    """Book the same failures as everyone else; returns how many were news."""
    ledger = Ledger(store)
    rules = Rules(max_restarts=100, max_lifetime_restarts=0)
    fresh = 0
    for number in range(DEATHS):
        fresh += ledger.record_failure(death(run(number)), rules).fresh
        ledger.increment_restart_count("tag-1")
    return fresh


def run_race(race: Callable[[Store, str], Any], place: Place) -> dict[str, Any]:
    """What each of the racers got, by its name."""
    names = [f"racer{number}" for number in range(RACERS)]
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(_start(race, place, name)) for name in names]
        for link in links:
            assert link.recv() == "ready"
        for link in links:
            link.send("go")
        return {name: link.recv() for name, link in zip(names, links, strict=True)}


@contextlib.contextmanager
def _start(race: Callable[[Store, str], Any], place: Place, name: str) -> Iterator[Connection]:
    ours, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=_run, args=(race, place, name, theirs))
    child.start()
    theirs.close()  # what dies is not waited for
    try:
        with ours:
            yield ours
    finally:
        child.kill()
        child.join()


def _run(race: Callable[[Store, str], Any], place: Place, name: str, link: Connection) -> None:
    with contextlib.closing(place.open()) as store:
        link.send("ready")
        link.recv()
        got = race(store, name)
    link.send(got)
