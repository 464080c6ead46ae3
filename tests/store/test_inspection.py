"""A SQLite file is looked at without a change: whole, missing, corrupt, locked."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from nomarr_systemd.store.sqlite import inspection
from nomarr_systemd.store.sqlite.inspection import inspect
from nomarr_systemd.store.sqlite.store import SqliteStore

HOLD = """\
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    store = SqliteStore(str(tmp_path), "policy")
    store.insert("worker_restart_policy", {"_key": "worker:tag:0", "note": "x" * 20_000})
    store.close()
    return tmp_path / "ledger.db"


def facts(ledger: Path) -> dict[str, tuple[int, bytes]]:
    """All but the index, which whoever opens the file first makes anew."""
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in ledger.parent.iterdir()
        if not path.name.endswith("-shm")
    }


def test_nothing_is_changed(ledger: Path) -> None:
    before = facts(ledger)
    assert inspect(str(ledger)).rows == 1
    assert facts(ledger) == before
    content = ledger.read_bytes()
    ledger.write_bytes(content[:200] + b"\xff" * 8000 + content[8200:])
    before = facts(ledger)
    assert inspect(str(ledger)).problem == "corrupt"
    ledger.write_bytes(b"no database at all, and longer than a header of one" * 10)
    assert inspect(str(ledger)).problem == "corrupt"
    assert facts(ledger).keys() == before.keys()
    assert inspect(str(ledger) + ".none").problem == "missing"
    assert not os.path.exists(str(ledger) + ".none")


def test_a_log_that_was_left_is_read_and_stays(ledger: Path) -> None:
    writer = sqlite3.connect(ledger)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO worker_restart_policy VALUES ('worker:tag:1', 'r', '{}')")
    writer.commit()
    found = inspect(str(ledger))
    assert (found.problem, found.rows) == ("", 2)
    assert os.path.getsize(f"{ledger}-wal") > 0
    writer.close()


def test_the_holder_of_a_lock_is_named(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_PATIENCE_S", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(ledger)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        found = inspect(str(ledger))
        holder.communicate()
    assert (found.problem, found.holder) == ("locked", holder.pid)
    assert f"(pid {holder.pid})" in found.why
    assert inspect(str(ledger)).problem == ""
