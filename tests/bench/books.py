"""A failure recorded durably, beside one bare durable commit of the same SQLite."""

from __future__ import annotations

import itertools
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator

from nomarr_systemd.core.account import MOVED, RING
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.bench.timing import compare, report

ROUNDS = 300
BATCH = 100
RULES = Rules(max_restarts=100, max_lifetime_restarts=0)

_numbers = itertools.count(1)


def a_death(worker: int) -> Death:
    component = f"worker:tag:{worker}"
    return Death(component, f"{next(_numbers):032x}", "signal", -11, run_ms=1234)


def bare_commit(path: str) -> tuple[sqlite3.Connection, Callable[[], object]]:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE t (key TEXT PRIMARY KEY, body TEXT)")
    db.execute("INSERT INTO t VALUES ('a', '')")
    sql = "UPDATE t SET body = ? WHERE key = 'a'"
    return db, lambda: db.execute(sql, (f"{next(_numbers):0100d}",))


def measure() -> None:
    # In the working directory: /tmp may be memory, where a commit costs nothing.
    with tempfile.TemporaryDirectory(dir=os.curdir, prefix=".bench-") as directory:
        for name, records, more, public in (
            ("record a failure, 5 on record", 5, 1, ""),
            ("record a failure, 20 on record", 20, 1, ""),
            ("record a failure, 100 and more on record", RING, MOVED, ""),
            (f"  one in {MOVED}: as many leave the account", RING, 1, ""),
            ("record and publish, 20 on record", 20, 1, f"{directory}/public"),
        ):
            place = f"{directory}/{next(_numbers)}"
            os.mkdir(place)
            publisher = Publisher(public) if public else None
            store = SqliteStore(place, "policy", publisher=publisher)
            ledger = Ledger(store)
            for n in range(ROUNDS):
                with store.batch():
                    for _ in range(records + n % more):
                        ledger.record_failure(a_death(n), RULES)
            workers = iter(range(ROUNDS))  # each round another one, so that none has more
            # The floor anew for each: file system and disk have moods.
            db, commit = bare_commit(f"{place}/bare.db")

            def record(ledger: Ledger = ledger, workers: Iterator[int] = workers) -> None:
                ledger.record_failure(a_death(next(workers)), RULES)

            floor, ours = compare([commit, record], ROUNDS)
            report(name, f"{ours * 1e3:.2f} ms, {ours / floor:.2f}", "bar 2" if not public else "")
            store.close()
            db.close()
        report("  to one bare durable commit", f"{floor * 1e3:.2f} ms")

        store = SqliteStore(directory, "policy")
        ledger = Ledger(store)

        def record_many() -> None:
            with store.batch():
                for n in range(BATCH):
                    ledger.record_failure(a_death(n), RULES)

        (many,) = compare([record_many], 10)
        report(f"record {BATCH} failures at once, each", f"{many / BATCH * 1e3:.3f} ms")
        store.close()
