"""Eight processes take jobs and are killed at random: every job has one end, no claim is left."""

from __future__ import annotations

import collections
import itertools
import os
import random
import select
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import pytest

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.job import CrashPolicy, Outcome, RunEnd
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.settlement import settle
from nomarr_systemd.store.protocol import Store
from tests.support.forks import CONTEXT
from tests.support.jobbers import BROKEN, POISON, start
from tests.support.places import Place

WORKERS = 8
_invocations = itertools.count(1)


class Pit:
    """The workers, and what they said."""

    def __init__(self, place: Place, store: Store, pool: Pool, marks: str) -> None:
        self.place, self.store, self.pool, self.marks = place, store, pool, marks
        self.put_back = 0  # jobs of a batch that their dead worker had not begun
        self.begun: collections.Counter[str] = collections.Counter()
        self.ended: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, Outcome] = {}  # by invocation
        self.twice: collections.Counter[str] = collections.Counter()
        self._read, self._write = CONTEXT.Pipe(duplex=False)
        self.children: dict[int, tuple[str, Process]] = {}
        for number in range(WORKERS):
            self.start(number)

    def start(self, number: int) -> None:
        invocation = f"{next(_invocations):032x}"
        component, batch = f"worker:tag:{number}", self.pool.claim_batch
        child = start(self.place, component, invocation, self.marks, batch, self._write)
        self.children[number] = (invocation, child)

    def bury(self, number: int, *, again: bool = True) -> None:
        """Kill one, if it is not dead yet, settle what it left, and start another."""
        invocation, child = self.children.pop(number)
        child.kill()
        child.join()
        end = RunEnd(f"worker:tag:{number}", invocation, "killed by signal 9", 1)
        self.put_back += max(0, len(self.store.find(CLAIMS, {"invocation": invocation})) - 1)
        outcome, _ = settle(self.store, self.pool, end)
        if self.place.server is None:  # else there may be more: see ``sweep``
            assert settle(self.store, self.pool, end._replace(wall_ms=2)) == (outcome, False)
        self.outcomes[invocation] = outcome
        if again:
            self.start(number)

    def sweep(self) -> None:
        """Settle dead runs that have claims, as the supervisor does again and again: what a process
        has sent before it was killed may reach a server after its run was settled."""
        alive = {invocation for invocation, _ in self.children.values()}
        for claim in self.store.find(CLAIMS) if self.place.server is not None else ():
            if claim["invocation"] not in alive:
                end = RunEnd(claim["component_id"], claim["invocation"], "killed by signal 9", 1)
                self.outcomes[end.invocation], _ = settle(self.store, self.pool, end)

    def read(self) -> int:
        """All that they have said, waited for briefly; how many lines."""
        if not select.select([self._read], [], [], 0.1)[0]:
            return 0
        lines = (
            os.read(self._read.fileno(), 65536).decode().splitlines()
        )  # each written in one piece
        for line in lines:
            word, key = line.split()
            {"begin": self.begun, "end": self.ended, "TWICE": self.twice}[word][key] += 1
        return len(lines)

    def bury_the_dead(self) -> None:
        for number, (_, child) in list(self.children.items()):
            if not child.is_alive():
                self.bury(number)

    def close(self) -> None:
        for number in list(self.children):
            self.bury(number, again=False)
        while self.read():
            pass
        self._write.close()
        self._read.close()


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("policy", ["restart-fail-in-flight", "restart-requeue-in-flight"])
def test_every_job_ends_once(place: Place, tmp_path: Path, policy: CrashPolicy, batch: int) -> None:
    number = 200 if place.server is not None else 2000 if batch == 1 else 600
    paths = [f"/music/{n:05d}.flac" for n in range(number)]
    paths += [f"/music/{n:05d}.{BROKEN}" for n in range(20)]
    paths += [f"/music/{n:05d}.{POISON}" for n in range(3)]
    store = place.open("work")
    pool = Pool("tag", workers=WORKERS, crash_policy=policy, claim_batch=batch)
    queue.add(store, "tag", paths, on_page=lambda *_: None)
    marks = tmp_path / "marks"
    marks.mkdir()
    pit = Pit(place, store, pool, str(marks))
    try:
        lines, due = 0, number // 10
        while (left := queue.count(store, "tag"))["pending"] + left["running"]:
            pit.bury_the_dead()
            pit.sweep()
            lines += pit.read()
            if lines >= due and left["pending"] > WORKERS * batch:
                due = lines + number // 10
                pit.bury(random.randrange(WORKERS))
    finally:
        pit.close()
    pit.sweep()
    assert not pit.twice
    assert store.find(CLAIMS) == []
    docs = {doc["path"]: doc for doc in queue.walk(store, "tag")}
    assert len(docs) == len(paths)
    quarantined = {key for outcome in pit.outcomes.values() for key in outcome.quarantined}
    assert quarantined == {doc["_key"] for doc in docs.values() if doc["status"] == "quarantined"}
    for path, doc in docs.items():
        crashes = len(doc.get("crashes", ()))
        clean = doc["status"] == "done" or (doc["error"] or {}).get("type") == "E"
        # Every attempt ended, one way, and was counted.
        assert doc["attempts"] == crashes + clean, doc
        assert pit.begun[doc["_key"]] <= doc["attempts"]
        assert pit.ended[doc["_key"]] <= clean
        if policy == "restart-fail-in-flight":
            assert doc["attempts"] == 1
            assert doc["status"] == ("error" if crashes or BROKEN in path else "done")
        elif POISON in path:
            assert (doc["status"], crashes) == ("quarantined", 2)
        elif doc["status"] != "quarantined":
            assert doc["status"] == ("error" if BROKEN in path else "done")
    assert bool(pit.put_back) == (batch > 1 and store.can_hold)
    settled = sum(len(outcome.settled) for outcome in pit.outcomes.values())
    assert settled == sum(len(doc.get("crashes", ())) for doc in docs.values())
    store.close()
