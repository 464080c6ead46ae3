"""What the words of a worker, or of a supervisor that is not ours any more, take of the ledger's
disk: a stated size, however long they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nomarr_systemd.controller import job_outcomes
from nomarr_systemd.core.account import RING
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.intents import BlameJobs
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.public import MAX_BYTES, read_published
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.protocol import POLICY_LEDGER
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY

WORKER = parse_component("tag-0")
LONG = "\U0001f480" * 100_000  # four bytes each
ACCOUNT_BYTES = 460_000
BOOK = """
import sys
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.sqlite.store import SqliteStore

ledger = Ledger(SqliteStore(sys.argv[1], "policy"))
for number in range(100):
    ledger.record_failure(Death("worker:tag:0", f"{number:032x}", "exit", 1), Rules())
print(len(ledger.account("worker:tag:0").records))
"""
NOTE_BYTES = 18_000


def size(doc: Any) -> int:
    return len(json.dumps(doc, ensure_ascii=False).encode())


def test_an_account(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path / "public"))
    store = SqliteStore(str(tmp_path), "policy", publisher=publisher)
    ledger = Ledger(store, clock=lambda: Moment(10**12, "b" * 32, 10**9))
    rules = Rules()._replace(max_restarts=100, max_lifetime_restarts=0)
    for number in range(120):
        ledger.record_failure(Death(WORKER.component_id, f"{number:032x}", LONG, 1), rules)
        ledger.refund(WORKER.component_id, f"{number:032x}", LONG)
        ledger.note([WORKER.component_id], "pause", LONG, LONG)
    while len(ledger.account(WORKER.component_id).rows) < RING - 1:
        ledger.note([WORKER.component_id], "pause", LONG, LONG)
    ledger.mark_failed(WORKER.component_id, LONG, "f" * 32)
    doc = store.get(POLICY_LEDGER, WORKER.component_id)
    assert doc is not None
    assert size(doc) < ACCOUNT_BYTES < MAX_BYTES
    published = read_published(publisher.directory, WORKER)
    assert not published.problem
    assert len(published.account.records) == RING
    store.close()


def test_notes_of_quarantines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_outcomes, "_KEPT", 10)
    store = SqliteStore(str(tmp_path), "policy")
    site: Any = SimpleNamespace(store=store, host="")
    for number in range(15):
        names = (LONG[:200],) * 100  # as much as is taken of the supervisor's answer
        job_outcomes.note_blame(site, BlameJobs(WORKER, f"{number:032x}", names))
    kept = store.find(job_outcomes.BLAMED)
    assert len(kept) == 10
    assert max(map(size, kept)) < NOTE_BYTES
    assert store.get(job_outcomes.BLAMED, f"{14:032x}")
    store.close()


def test_a_hold(tmp_path: Path) -> None:
    holds = Holds(str(tmp_path))
    holds.hold(WORKER, f"its pool failed:\n\x1b[2J{LONG}")
    text = (tmp_path / "tag-0").read_text()
    assert len(text.encode()) < 2100
    assert text.removesuffix("\n").isprintable()


@needs_root
def test_what_ext4_keeps_for_root(tmp_path: Path) -> None:
    """Workers fill the disk of the ledger: their own writes fail, those of the controller, which is
    root without capabilities, do not."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(160 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "5", image], check=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        work, policy = disk / "work", disk / "policy"
        for directory in (work, policy):
            directory.mkdir(mode=0o700)
        os.chown(work, NOBODY, NOBODY)
        worker = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        fill = ("dd", "if=/dev/zero", "of=all", "bs=1M")
        done = subprocess.run(
            [*worker, *fill], cwd=work, capture_output=True, text=True, check=False
        )
        assert "No space left on device" in done.stderr
        powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
        book = [*powerless, sys.executable, "-c", BOOK, str(policy)]
        done = subprocess.run(book, capture_output=True, text=True, check=False)
        assert done.stdout == "100\n", done.stderr
    finally:
        subprocess.run(["umount", disk], check=True)
