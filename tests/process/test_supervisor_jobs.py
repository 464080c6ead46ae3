"""Jobs of workers that die, with the real supervisor: every kind of death, every crash policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.job import CrashPolicy, Owner, key_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.settlement import failure_of
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.supervision import PATIENCE_S, Lab, Live, make_lab

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
    outcome = events.until(settled)[-1]["outcome"]
    assert outcome["settled"] == [{"job": key_of("tag", "/a"), "path": "/a", "status": status}]
    job = desk.job()
    assert job["status"] == status
    assert job["error"]["type"] == "WorkerCrashedError"
    assert (job["error"]["pool"], job["error"]["worker_index"]) == ("tag", 0)
    assert [each["invocation"] for each in job["crashes"]] == [invocation]
    assert desk.job("/b")["status"] == "running"
    assert living.end(key_of("tag", "/b"), End("done"))
    assert desk.store.find(CLAIMS) == []
    # The controller knows better what it died of.
    live = desk.lab.live()
    told = {"component": "tag-0", "invocation": invocation, "cause": "killed by SIGSEGV"}
    answer = live.ask(op="crashed", decision="restart", **told)
    assert answer["settled"]
    assert answer["job"] == key_of("tag", "/a")
    assert (answer["quarantined"], answer["refund"], answer["fail_pool"]) == ([], [], "")
    desk.until(lambda: desk.job()["crashes"][0]["cause"] == "killed by SIGSEGV")


def test_a_stop_is_not_held_against_the_job(desk: Desk) -> None:
    events = desk.start(job_max_crashes=1)
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    with open(f"{desk.lab.paths.stop}/{invocation}", "x", encoding="ascii"):
        pass
    desk.lab.end_run("tag-0")
    events.until(settled)
    job = desk.job()
    assert (job["status"], job["error"]["cause"]) == ("error", "stopped")
    assert not job.get("crashes")


def test_what_ended_while_no_supervisor_was_there(desk: Desk) -> None:
    desk.start(crash_policy="restart-requeue-in-flight", job_max_crashes=1)
    died = desk.begin("tag-0")
    runs = desk.begin("tag-1")
    desk.take(died)
    desk.take(runs, "/b", 1)
    desk.take("f" * 32, "/c", 7, boot="another")  # of a worker that is gone, before a reboot
    desk.lab.kill()
    desk.lab.end_run("tag-0")
    desk.lab.start()
    desk.until(lambda: len(desk.store.find(CLAIMS)) == 1)
    assert desk.job()["status"] == "quarantined"
    assert desk.job("/b")["status"] == "running"
    assert desk.job("/c")["status"] == "pending"


def test_a_claim_nobody_saw_end_expires_and_a_long_job_does_not(desk: Desk) -> None:
    desk.start(claim_timeout_s=0.2)
    long = desk.begin("tag-1")
    desk.take(long, "/b", 1)
    desk.take("e" * 32)
    desk.until(lambda: desk.job()["status"] == "error")
    assert desk.job("/b")["status"] == "running"
    [claim] = desk.store.find(CLAIMS)
    assert claim["invocation"] == long


def test_quarantine_and_what_the_controller_gives_back(desk: Desk) -> None:
    events = desk.start(crash_policy="restart-requeue-in-flight", crash_max_retries=1)
    invocations = []
    for _ in range(2):
        invocations.append(desk.begin("tag-0"))
        desk.take(invocations[-1])
        desk.lab.end_run("tag-0")
        events.until(settled)
    assert desk.job()["status"] == "quarantined"
    answer = desk.lab.live().ask(op="settlement", component="tag-0", invocation=invocations[-1])
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
    outcome = events.until(settled)[-1]["outcome"]
    assert outcome["fail_pool"]
    assert failure_of(desk.store, "tag") == outcome["fail_pool"]
    for path in ("/a", "/b", "/c"):
        assert desk.job(path)["status"] == "error"
        assert desk.job(path)["error"]["type"] == "WorkerCrashedError"
    assert not living.end(key_of("tag", "/b"), End("done"))
    assert desk.store.find(CLAIMS) == []
    answer = desk.lab.live().ask(op="settlement", component="tag-0", invocation=invocation)
    assert answer["fail_pool"] == outcome["fail_pool"]
    # A supervisor that comes after this one says the same when it is asked.
    desk.lab.kill()
    desk.lab.start()
    live = desk.lab.live()
    asked = {"op": "settlement", "component": "tag-0", "invocation": invocation, "crashed": True}
    while not (answer := live.ask(**asked))["settled"]:
        pass
    assert answer["fail_pool"] == outcome["fail_pool"]


def test_who_leaves_in_peace_and_fails_all_the_same_is_counted(desk: Desk) -> None:
    """As a worker does after too many errors: only systemd knows its exit status."""
    events = desk.start(crash_policy="fail-pool")
    invocation = desk.begin("tag-0")
    writer = desk.lab.writer("tag-0")
    writer.frame(status="stopping")
    desk.lab.end_run("tag-0")
    live = desk.lab.live()
    asked = {"op": "settlement", "component": "tag-0", "invocation": invocation}
    while not (answer := live.ask(**asked))["settled"]:
        pass
    assert answer["fail_pool"] == ""
    live.ask(**asked, crashed=True)
    told = {"component": "tag-0", "invocation": invocation, "cause": "exit status 70"}
    live.ask(op="crashed", decision="hold: paused", **told)
    assert live.ask(**asked) == answer
    live.ask(op="crashed", decision="restart: after 1 s", **told)
    outcome = events.until(settled)[-1]["outcome"]
    assert "exit status 70" in outcome["fail_pool"]
    assert live.ask(**asked)["fail_pool"] == outcome["fail_pool"]


def test_a_store_that_is_away_costs_time_and_nothing_else(desk: Desk) -> None:
    desk.start()
    invocation = desk.begin("tag-0")
    desk.take(invocation)
    work = f"{desk.lab.paths.state}/work"
    os.rename(work, f"{work}.aside")
    with open(work, "x", encoding="ascii"):
        pass
    desk.lab.end_run("tag-0")
    desk.until(lambda: "jobs cannot be settled now" in desk.lab.said())
    os.unlink(work)
    os.rename(f"{work}.aside", work)
    desk.until(lambda: desk.job()["status"] == "error")
    assert desk.store.find(CLAIMS) == []


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
