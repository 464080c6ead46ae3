"""Jobs of workers that die, with the real supervisor: every kind of death, every crash policy."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.job import UNREPORTED, CrashPolicy, Owner, key_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.settlement import failure_of
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.supervision import Lab, Live, make_lab
from tests.support.waiting import PATIENCE_S

LONG = 600.0  # a claim_timeout_s that has no part in a test


class Desk:
    """The supervisor's lab, and the store beside it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.store = SqliteStore(lab.paths.state, "work")

    def start(self, **settings: Any) -> Live:
        settings = {"workers": 2, "claim_timeout_s": LONG, **settings}
        self.lab.configure(tag=Pool("tag", **settings))
        queue.add(self.store, "tag", ["/a", "/b", "/c"], on_page=lambda *_: None)
        self.lab.start()
        return self.lab.subscribe("queue:tag:status")

    def begin(self, instance: str) -> str:
        """A run begins, and the supervisor has seen it: its end will be seen, too."""
        invocation = self.lab.begin_run(instance)
        component = f"worker:{instance.replace('-', ':')}"
        self.until(lambda: self.lab.snapshot()[component]["invocation"] == invocation)
        return invocation

    def claims(self, invocation: str, number: int = 0, *, boot: str = "") -> Claims:
        owner = Owner(f"worker:tag:{number}", invocation, "", boot or read_boot_id())
        return Claims(self.store, "tag", owner)

    def take(self, invocation: str, path: str = "/a", number: int = 0, *, boot: str = "") -> Claims:
        claims = self.claims(invocation, number, boot=boot)
        assert claims.take(key_of("tag", path))
        return claims

    def death(self, invocation: str, cause: str, **fields: bool) -> dict[str, Any]:
        """A death of tag-0 as the controller reports it."""
        told = {"component": "worker:tag:0", "invocation": invocation, "cause": cause}
        return {**told, "decision": "restart", "blamed": True, "failed": False, **fields}

    def crashed(self, invocation: str, cause: str, **fields: bool) -> dict[str, Any]:
        """Report a death, again until it is settled, as the controller does."""
        live = self.lab.live()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = live.ask(op="crashed", deaths=[self.death(invocation, cause, **fields)])
            outcome: dict[str, Any] = answer["outcomes"][invocation]
            if outcome["settled"]:
                return outcome
            assert time.monotonic() < deadline, self.lab.said()[-2000:]

    def job(self, path: str = "/a") -> Doc:
        return queue.find(self.store, "tag", path)

    def until(self, what: Callable[[], object]) -> None:
        """The store cannot be waited on."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, self.lab.said()[-2000:]
            time.sleep(0.01)


def settled(event: dict[str, Any]) -> bool:
    return bool(event["type"] == "settled")


@pytest.fixture
def desk() -> Iterator[Desk]:
    with make_lab() as lab:
        desk = Desk(lab)
        yield desk
        desk.store.close()


@pytest.mark.parametrize(
    ("policy", "status"),
    [("restart-fail-in-flight", "error"), ("restart-requeue-in-flight", "pending")],
)
def test_a_death_settles_its_job_and_no_other(desk: Desk, policy: CrashPolicy, status: str) -> None:
    events = desk.start(crash_policy=policy)
    invocation = desk.begin("tag-0")
    other = desk.begin("tag-1")
    desk.take(invocation)
    living = desk.take(other, "/b", 1)
    desk.lab.end_run("tag-0")
    desk.until(lambda: desk.lab.snapshot()["worker:tag:0"]["status"] == "crashed")
    assert desk.job()["status"] == "running"  # until its cause is reported
    answer = desk.crashed(invocation, "killed by SIGSEGV")
    key = key_of("tag", "/a")
    assert answer == {
        "settled": True,
        "jobs": [key],
        "quarantined": [],
        "failed": [key] if status == "error" else [],
        "refund": [invocation] if status == "error" else [],
        "fail_pool": "",
    }
    outcome = events.until(settled)[-1]["outcome"]
    assert outcome["settled"] == [{"job": key, "path": "/a", "status": status}]
    job = desk.job()
    assert job["status"] == status
    assert job["error"]["type"] == "WorkerCrashedError"
    assert (job["error"]["pool"], job["error"]["worker_index"]) == ("tag", 0)
    assert [(each["invocation"], each["cause"]) for each in job["crashes"]] == [
        (invocation, "killed by SIGSEGV")
    ]
    assert desk.job("/b")["status"] == "running"
    assert living.end(key_of("tag", "/b"), End("done"))
    assert desk.store.find(CLAIMS) == []
    # Told again, also another supervisor, the same outcome comes.
    assert desk.crashed(invocation, "killed by SIGSEGV") == answer
    desk.lab.kill()
    desk.lab.start()
    assert desk.crashed(invocation, "another cause") == answer
    assert desk.job()["crashes"] == job["crashes"]


def test_an_unblamed_death_is_not_held_against_the_job(desk: Desk) -> None:
    desk.start(job_max_crashes=1, crash_max_retries=0)
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    desk.lab.end_run("tag-0")
    answer = desk.crashed(invocation, "its supervisor is gone", blamed=False)
    assert (answer["jobs"], answer["fail_pool"]) == ([key_of("tag", "/a")], "")
    job = desk.job()
    assert (job["status"], job["error"]["cause"]) == ("error", "its supervisor is gone")
    assert not job.get("crashes")


def test_what_ended_while_no_supervisor_was_there(desk: Desk) -> None:
    events = desk.start(crash_policy="restart-requeue-in-flight", job_max_crashes=1, workers=3)
    queue.add(desk.store, "tag", ["/d"], on_page=lambda *_: None)
    died = desk.begin("tag-0")
    runs = desk.begin("tag-1")
    left = desk.begin("tag-2")
    desk.take(died)
    desk.take(runs, "/b", 1)
    desk.take("f" * 32, "/c", 7, boot="another")  # of a worker that is gone, before a reboot
    desk.take(left, "/d", 2)
    events.close()
    desk.lab.kill()
    desk.lab.end_run("tag-0")
    desk.lab.writer("tag-2").frame("stopping", invocation=left)
    desk.lab.end_run("tag-2")
    desk.lab.start()
    desk.until(lambda: len(desk.store.find(CLAIMS)) == 2)
    assert [desk.job(path)["status"] for path in ("/c", "/d")] == ["pending", "pending"]
    assert [desk.job(path)["status"] for path in ("/a", "/b")] == ["running", "running"]
    assert desk.crashed(died, "killed by SIGKILL")["quarantined"] == [key_of("tag", "/a")]
    assert desk.job("/b")["status"] == "running"


def test_a_claim_nobody_saw_end_expires_and_a_long_job_does_not(desk: Desk) -> None:
    desk.start(claim_timeout_s=0.2)
    long = desk.begin("tag-1")
    died = desk.begin("tag-0")
    desk.take(long, "/b", 1)
    desk.take("e" * 32)
    desk.take(died, "/c")
    desk.lab.end_run("tag-0")  # and nobody reports it
    desk.until(lambda: [desk.job(path)["status"] for path in ("/a", "/c")] == ["error", "error"])
    assert desk.job("/c")["error"]["cause"] == UNREPORTED
    assert len(desk.job("/c")["crashes"]) == 1
    assert desk.job("/b")["status"] == "running"
    [claim] = desk.store.find(CLAIMS)
    assert claim["invocation"] == long
    # A report that comes too late changes nothing.
    desk.crashed(died, "killed by SIGSEGV", blamed=False)
    assert len(desk.job("/c")["crashes"]) == 1


def test_quarantine_and_what_the_controller_gives_back(desk: Desk) -> None:
    desk.start(crash_policy="restart-requeue-in-flight", crash_max_retries=1)
    invocations = []
    for _ in range(2):
        invocations.append(desk.begin("tag-0"))
        desk.take(invocations[-1])
        desk.lab.end_run("tag-0")
        answer = desk.crashed(invocations[-1], "killed by SIGSEGV")
    assert desk.job()["status"] == "quarantined"
    assert answer["quarantined"] == [key_of("tag", "/a")]
    assert answer["refund"] == invocations
    assert answer["fail_pool"] == ""  # the job was at fault, not the pool
    assert desk.job("/b")["status"] == "pending"


@pytest.mark.parametrize("settings", [{"crash_policy": "fail-pool"}, {"crash_max_retries": 0}])
def test_a_pool_fails_with_all_its_work(desk: Desk, settings: dict[str, Any]) -> None:
    events = desk.start(**settings)
    other = desk.begin("tag-1")
    living = desk.take(other, "/b", 1)
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    desk.lab.end_run("tag-0")
    answer = desk.crashed(invocation, "killed by SIGSEGV", failed=True)
    assert desk.lab.snapshot()["worker:tag:0"]["status"] == "failed"
    outcome = events.until(settled)[-1]["outcome"]
    assert outcome["fail_pool"]
    assert answer["fail_pool"] == outcome["fail_pool"]
    assert failure_of(desk.store, "tag") == outcome["fail_pool"]
    for path in ("/a", "/b", "/c"):
        assert desk.job(path)["status"] == "error"
        assert desk.job(path)["error"]["type"] == "WorkerCrashedError"
    assert not living.end(key_of("tag", "/b"), End("done"))
    assert desk.store.find(CLAIMS) == []


def test_who_leaves_in_peace_and_fails_all_the_same_is_counted(desk: Desk) -> None:
    """As a worker does after too many errors: only systemd knows its exit status."""
    desk.start(crash_policy="fail-pool")
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    desk.lab.writer("tag-0").frame(status="stopping", invocation=invocation)
    desk.until(lambda: desk.lab.snapshot()["worker:tag:0"]["status"] == "stopping")
    desk.lab.end_run("tag-0")
    desk.until(lambda: desk.job()["status"] == "error")  # at once, and uncounted
    before = desk.job()
    assert not before.get("crashes")
    assert before["error"]["cause"] == "left by itself"
    assert desk.job("/b")["status"] == "pending"
    answer = desk.crashed(invocation, "exit status 70", blamed=False)
    assert (answer["jobs"], answer["fail_pool"]) == ([before["_key"]], "")
    answer = desk.crashed(invocation, "exit status 70")
    assert "exit status 70" in answer["fail_pool"]
    assert desk.job() == before, "its job is not touched again"
    assert desk.job("/b")["status"] == "error"
    assert desk.crashed(invocation, "exit status 70") == answer


def test_a_report_waits_for_its_answer_but_not_for_long(desk: Desk) -> None:
    """And what could not be settled in time is settled when the store is back."""
    desk.start()
    runs = [desk.begin("tag-0"), desk.begin("tag-1")]
    desk.take(runs[0])
    with sqlite3.connect(desk.store.path, isolation_level=None) as locked:
        locked.execute("BEGIN IMMEDIATE")
        desk.lab.end_run("tag-0")
        begun = time.monotonic()
        deaths = [desk.death(runs[0], "killed"), desk.death("b" * 32 + "#1", "no start")]
        live = desk.lab.live()
        live.send(op="crashed", deaths=deaths)
        live.send(op="snapshot")  # answered after the first
        assert desk.lab.snapshot(), "others are served meanwhile"
        outcomes = live.read()["outcomes"]
        waited_s = time.monotonic() - begun
        assert len(live.read()["workers"]) == 2
        locked.execute("ROLLBACK")
    locked.close()
    assert 0.9 < waited_s < 5
    assert outcomes[runs[0]] == {"settled": False}
    assert outcomes["b" * 32 + "#1"]["settled"]
    desk.until(lambda: desk.job()["status"] == "error")
    assert desk.crashed(runs[0], "killed")["jobs"] == [key_of("tag", "/a")]
    assert len(desk.job()["crashes"]) == 1


def test_a_store_that_is_away_costs_time_and_nothing_else(desk: Desk) -> None:
    desk.start()
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    work = f"{desk.lab.paths.state}/work"
    os.rename(work, f"{work}.aside")
    with open(work, "x", encoding="ascii"):
        pass
    desk.lab.end_run("tag-0")
    deaths = [desk.death(invocation, "killed")]
    outcomes = desk.lab.live().ask(op="crashed", deaths=deaths)["outcomes"]
    assert outcomes == {invocation: {"settled": False}}
    desk.until(lambda: "jobs cannot be settled now" in desk.lab.said())
    os.unlink(work)
    os.rename(f"{work}.aside", work)
    desk.until(lambda: desk.job()["status"] == "error")
    assert desk.store.find(CLAIMS) == []


HANGING = """\
import sqlite3, sys, threading
def connect(*args, **options):
    print("the store hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
sqlite3.connect = connect
"""


def test_a_store_that_never_answers_holds_nothing_up(desk: Desk) -> None:
    """No deadline ends its calls here, so a loop that made one would never go on."""
    place = f"{desk.lab.root}/patched"
    os.mkdir(place)
    with open(f"{place}/sitecustomize.py", "x", encoding="ascii") as file:
        file.write(HANGING)
    desk.lab.environment["PYTHONPATH"] = place
    desk.start()
    desk.until(lambda: "the store hangs" in desk.lab.said())
    invocation = desk.begin("tag-0")
    writer = desk.lab.writer("tag-0")
    writer.frame(invocation=invocation)
    desk.until(lambda: desk.lab.snapshot()["worker:tag:0"]["status"] == "healthy")
    desk.lab.end_run("tag-0")
    deaths = [desk.death(invocation, "killed")]
    answer = desk.lab.live().ask(op="crashed", deaths=deaths)["outcomes"]
    assert answer == {invocation: {"settled": False}}
    desk.lab.reload()
    assert desk.lab.kill(signal.SIGTERM) == 0


def test_a_running_job_that_has_lost_its_claim_is_settled_all_the_same(desk: Desk) -> None:
    desk.start(claim_timeout_s=0.2, crash_policy="restart-requeue-in-flight")
    ended, runs = desk.begin("tag-0"), desk.begin("tag-1")
    desk.take(ended)
    living = desk.take(runs, "/b", 1)
    desk.lab.kill()
    desk.lab.end_run("tag-0")
    for claim in desk.store.find(CLAIMS):
        desk.store.delete(CLAIMS, claim["_key"], claim["_rev"])
    desk.lab.start()
    desk.until(lambda: desk.job()["status"] == "pending")
    assert [each["cause"] for each in desk.job()["crashes"]] == [UNREPORTED]
    assert [claim["invocation"] for claim in desk.store.find(CLAIMS)] == [runs]
    assert living.end(key_of("tag", "/b"), End("done"))
    assert desk.store.find(CLAIMS) == []


def test_damaged_claims_keep_no_other_from_being_settled(desk: Desk) -> None:
    """Workers may write anything into this store."""
    desk.store.insert(CLAIMS, {"_key": "0", "host": ""})
    desk.store.insert(CLAIMS, {"_key": "1", "host": "", "component_id": [], "invocation": "x"})
    desk.store.insert(CLAIMS, {"_key": "2", "host": "", "pool": "tag", "job": {}})
    desk.start(claim_timeout_s=0.2, crash_policy="restart-requeue-in-flight")
    desk.take(desk.begin("tag-0"))
    desk.lab.end_run("tag-0")
    desk.until(lambda: desk.job()["status"] == "pending")


@pytest.mark.parametrize("figure", ["1e308", "1" + "0" * 400, "-1e308", "1" + "0" * 30])
def test_figures_beyond_all_numbers_stop_no_queue(desk: Desk, figure: str) -> None:
    """A frame of one worker: sums of such numbers are infinite, and no store keeps them."""
    desk.start()
    invocation = desk.begin("tag-0")
    events = desk.lab.subscribe("queue:tag:status", "queue:jobs")
    metrics = f'"metrics":{{"avg_time_s":{figure},"files_processed":{figure}}}'
    line = f'HEALTH|{{"component_id":"worker:tag:0","status":"healthy",{metrics}}}\n'
    desk.lab.writer("tag-0").raw(line.encode())
    desk.until(lambda: desk.lab.snapshot()["worker:tag:0"]["frames"])
    desk.take(invocation)
    desk.lab.writer("tag-1").frame(phase="processing", job="/b")
    state = events.until(lambda event: event.get("queue", {}).get("running") == 1)[-1]["queue"]
    assert (state["avg_time"], state["eta"]) == (None, None)
    assert "cannot be settled" not in desk.lab.said()


def test_what_a_worker_writes_into_the_store_takes_no_memory(desk: Desk) -> None:
    desk.start()
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    before = desk.lab.pid
    lists = "[" + "[]," * 700_000 + "[]]"  # each takes 64 bytes in memory, and 3 here
    deep = "[" * 970 + "]" * 970
    with sqlite3.connect(desk.store.path) as db:
        insert = "INSERT INTO {} VALUES (?, 'r', ?)"
        job = '{{"pool": "tag", "status": "error", "path": "/x", "result": {}}}'
        claim = '{{"host": "", "pool": "tag", "job": [], "more": {}}}'
        db.execute(insert.format("jobs"), ("tag:deep:1", job.format(deep)))
        rows = [(f"{number}", claim.format(lists)) for number in range(20)]
        db.executemany(insert.format("worker_claims"), rows)
    db.close()
    live = desk.lab.live()
    listed = live.ask(op="jobs", pool="tag", status="error")
    assert listed["ok"]
    assert listed["jobs"] == []
    events = desk.lab.subscribe("queue:jobs")
    desk.lab.writer("tag-0").frame(phase="processing", job="/a")
    desk.until(lambda: "more than 16 MiB at once" in desk.lab.said())
    for pid, most in ((before, 50_000), *((pid, 300_000) for pid in desk.lab.helpers())):
        facts = Path(f"/proc/{pid}/status").read_text()
        assert int(facts.partition("VmHWM:")[2].split()[0]) < most  # kB
    with sqlite3.connect(desk.store.path) as db:
        db.execute("DELETE FROM worker_claims WHERE rev = 'r'")
    db.close()
    events.until(lambda event: event["type"] == "job_update")


def test_an_answer_that_no_client_reads_is_not_kept(desk: Desk) -> None:
    desk.start()
    for number in range(15):
        doc = {"_key": f"tag:x:{number:024x}", "pool": "tag", "status": "done", "path": "/x"}
        desk.store.insert(queue.JOBS, {**doc, "result": "\U0001f480" * 60_000})  # 12 bytes each
    live = desk.lab.live()
    told = live.ask(op="jobs", pool="tag", status="done")
    assert told["error"] == "the answer is longer than 8388608 bytes; ask for less"
    assert len(live.ask(op="jobs", pool="tag", status="done", limit=10)["jobs"]) == 10


def test_queues_and_jobs_are_shown(desk: Desk) -> None:
    desk.start()
    events = desk.lab.subscribe("queue:*:status", "queue:status", "queue:jobs")
    invocation = desk.begin("tag-0")
    writer = desk.lab.writer("tag-0")
    claims = desk.take(invocation)
    metrics = {"avg_time_s": 2.0, "files_processed": 1}
    writer.frame(phase="processing", job="/a", metrics=metrics)
    job = events.until(lambda event: event["type"] == "job_update")[-1]["job"]
    assert (job["path"], job["status"], job["worker"]) == ("/a", "running", "worker:tag:0")
    claims.end(key_of("tag", "/a"), End("done", {"bpm": 90}))
    writer.frame(phase="idle", metrics=metrics)
    seen: list[dict[str, Any]] = []
    topics: dict[str, dict[str, Any]] = {}
    ended: dict[str, Any] = {"status": ""}
    while not (
        ended["status"] == "done"
        and topics.get("queue:tag:status", {}).get("completed") == 1
        and topics.get("queue:status", {}).get("completed") == 1
    ):
        seen.append(events.read())
        if "queue" in seen[-1]:
            topics[seen[-1]["topic"]] = seen[-1]["queue"]
        elif seen[-1]["type"] == "job_update":
            ended = seen[-1]["job"]
    assert ended["results"] == {"bpm": 90}
    state = topics["queue:tag:status"]
    assert (state["pending"], state["running"]) == (2, 0)
    assert (state["avg_time"], state["eta"]) == (2.0, 4.0)
