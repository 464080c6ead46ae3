"""Processes that race for one store: ``python -m tests.support.racers RACE PLACE NAME``.

Each opens the store, says so, waits for the word to start, and prints what it got as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.store.protocol import Store
from tests.support.places import Place, dump_place, load_place

RACERS = 8
ROUNDS = 200


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


RACES: dict[str, Callable[[Store, str], Any]] = {
    "increment": increment,
    "claim": claim,
    "begin": begin,
}


def run_race(race: str, place: Place) -> dict[str, Any]:
    """What each of the racers got, by its name."""
    root = Path(__file__).parents[2]
    names = [f"racer{number}" for number in range(RACERS)]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.racers", race, dump_place(place), name],
                    cwd=root,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in names
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        outcomes = [child.communicate()[0] for child in children]
    return {name: json.loads(outcome) for name, outcome in zip(names, outcomes, strict=True)}


def main() -> int:
    race, place, name = sys.argv[1:]
    with contextlib.closing(load_place(place).open()) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(RACES[race](store, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
