"""The jobs' database is the workers': whatever one of them makes of its tables and indexes, neither
nomarrctl, which root runs, nor the supervisor computes for hours."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreRefused, StoreUnavailable
from nomarr_systemd.store.sqlite.store import SqliteStore

# Compares two texts of megabytes at each of millions of places, in one step that nothing ends.
BOMB = "instr(zeroblob(8000000), zeroblob(4000000) || x'01') = 0"
ADD = "UPDATE sqlite_master SET sql = replace(sql, 'body TEXT', 'body TEXT ' || ?)"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    SqliteStore(str(tmp_path), "work").close()
    return tmp_path / "work/work.db"


def open_at(jobs: Path) -> SqliteStore:
    return SqliteStore(str(jobs.parent.parent), "work", patience_s=0.2)


@pytest.mark.parametrize("words", [f"CHECK ({BOMB})", f", more AS ({BOMB}) STORED, last TEXT"])
def test_a_condition_of_a_table(jobs: Path, words: str) -> None:
    with closing(sqlite3.connect(jobs)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute(f"{ADD} WHERE name = 'jobs'", (words,))
        db.commit()
    with pytest.raises(StoreRefused, match="has tables with conditions"):
        open_at(jobs)


def test_an_index(jobs: Path) -> None:
    with closing(sqlite3.connect(jobs)) as db:
        db.execute(f"CREATE INDEX slow ON jobs({BOMB})")
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="stayed locked"):
            open_at(jobs)
    store = open_at(jobs)
    store.insert("jobs", {"_key": "a"})
    assert store.get("jobs", "a")
    store.close()


def test_a_table_of_another_version_is_left_alone(jobs: Path) -> None:
    with closing(sqlite3.connect(jobs)) as db:
        db.execute("CREATE TABLE later (key TEXT PRIMARY KEY, note TEXT)")
    store = open_at(jobs)
    store.insert("jobs", {"_key": "a"})
    store.close()
