"""The supervisor's health: frames make it, silence and ends unmake it, history keeps it."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator

import pytest

from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.ledger.health_history import COLLECTION
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.supervision import Lab, make_lab, status_of
from tests.support.waiting import PATIENCE_S

QUICK = HealthRules(staleness_interval_s=0.1, startup_timeout_s=0.3, min_recovery_s=0.1)
CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        yield lab


def test_all_pipes_are_there_and_stored_before_it_is_ready(lab: Lab) -> None:
    lab.configure(tag=2, library=1)
    lab.start()
    ready = next(n for n, text in enumerate(lab.manager.messages) if "READY=1" in text)
    stored = [text for text in lab.manager.messages[:ready] if "FDSTORE=1" in text]
    assert len(stored) == 1
    kept = lab.manager.pipes()
    assert kept.keys() == {"tag-0", "tag-1", "library-0"}
    for instance in ("tag-0", "tag-1", "library-0"):
        status = os.stat(f"{lab.paths.health}/{instance}")
        assert stat.S_ISFIFO(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert [os.path.samestat(each, status) for each in kept[instance]] == [True]
    assert any("STATUS=3 workers: 3 stopped" in text for text in lab.manager.messages)


def test_from_start_to_healthy_to_stopped(lab: Lab) -> None:
    lab.configure(tag=2, health=CALM)
    lab.start()
    events = lab.subscribe()
    assert [events.read()["worker"]["status"] for _ in range(2)] == ["stopped", "stopped"]
    invocation = lab.begin_run("tag-0")
    assert events.read()["worker"]["status"] == "starting"
    writer = lab.writer("tag-0")
    writer.frame("pending", phase="loading_models")
    assert events.read()["worker"]["phase"] == "loading_models"
    writer.frame(phase="processing", job="a.flac", pid=77, progress_age_s=0.5)
    event = events.read()
    assert event["topic"] == "worker:tag:0:status"
    assert event["type"] == "worker_update"
    assert abs(event["timestamp"] / 1000 - time.time()) < PATIENCE_S
    assert 0 <= event["worker"].pop("frame_age_s") < PATIENCE_S
    assert event["worker"] == {
        "component": "worker:tag:0",
        "id": 0,
        "queue_type": "tag",
        "status": "healthy",
        "pid": 77,
        "current_job": "a.flac",
        "last_crash": None,
        "invocation": invocation,
        "phase": "processing",
        "seq": 2,
        "misses": 0,
        "late": 0,
        "drops": {},
        "disagreement": "",
        "progress_age_s": 0.5,
        "frames": 2,
        "metrics": None,
        "note": None,
    }
    shown = lab.snapshot()["worker:tag:0"]
    del shown["frame_age_s"]
    assert shown == event["worker"]
    writer.frame("stopping")
    assert events.read()["worker"]["status"] == "stopping"
    writer.close()
    lab.end_run("tag-0")
    assert events.read()["worker"]["status"] == "stopped"
    assert lab.snapshot()["worker:tag:0"]["last_crash"] is None


def test_frames_before_the_link_was_seen_belong_to_the_run(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    events = lab.subscribe()
    for _ in range(20):
        lab.begin_run("tag-0")
        writer = lab.writer("tag-0")
        writer.frame()
        events.until(status_of("healthy"))
        writer.close()
        lab.end_run("tag-0")
        events.until(status_of("crashed"))


def test_a_run_that_ends_without_a_word_has_crashed(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    events = lab.subscribe()
    invocation = lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame(job="bad.flac")
    events.until(status_of("healthy"))
    writer.close()  # its end is first seen on the pipe, then by systemd
    lab.end_run("tag-0")
    crash = events.until(lambda event: event["type"] == "worker:crash")[-1]
    assert crash["cause"] == "pipe-closed"
    assert crash["invocation"] == invocation
    events.until(status_of("crashed"))
    live = lab.live()
    label = live.ask(op="label", component="tag-0", invocation=invocation)
    assert label == {"ok": True, "label": "", "job": "bad.flac", "bad_line": ""}
    lab.begin_run("tag-0")
    shown = events.until(status_of("starting"))[-1]["worker"]
    assert shown["current_job"] is None
    assert shown["last_crash"]["invocation"] == invocation


def test_a_closed_pipe_of_a_living_worker_is_only_silence(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM._replace(staleness_interval_s=0.1))
    lab.start()
    events = lab.subscribe()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame()
    writer.close()
    words = [event["worker"]["status"] for event in events.until(status_of("crashed"))]
    assert words.index("unhealthy") < words.index("crashed")
    assert lab.snapshot()["worker:tag:0"]["last_crash"]["error"] == "no frame came on its pipe"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ([], "startup-timeout"),
        (["healthy"], "stale"),
        (["recovering"], "recovery-timeout"),
        (["noise"], "invalid-heartbeat"),
    ],
)
def test_silence_is_death_in_the_end(lab: Lab, said: list[str], cause: str) -> None:
    lab.configure(tag=1, health=QUICK._replace(max_recovery_s=0.2))
    lab.start()
    events = lab.subscribe()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    for word in said:
        if word == "noise":
            writer.raw(b"hello\n")
        else:
            writer.frame(word)
    crash = events.until(lambda event: event["type"] == "worker:crash")[-1]
    assert crash["cause"] == cause
    writer.frame()
    lab.begin_run("tag-0")  # dead, until systemd shows a new run
    events.until(status_of("starting"))
    writer.frame()
    events.until(status_of("healthy"))


def test_a_frame_that_says_the_work_stands_still_is_a_disagreement(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM._replace(stall_timeout_s=10))
    lab.start()
    events = lab.subscribe()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame(progress_age_s=11)
    shown = events.until(status_of("healthy"))[-1]["worker"]
    assert shown["disagreement"] == "hung-but-pinging"
    writer.frame(progress_age_s=0.1, metrics={"progress_age_s": 99})
    assert events.read()["worker"]["disagreement"] == ""


def test_history_is_written_now_and_then(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM._replace(snapshot_interval_s=0.1))
    lab.start()
    events = lab.subscribe()
    invocation = lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame(phase="processing", job="a.flac", metrics={"files": 3})
    events.until(status_of("healthy"))
    store = SqliteStore(lab.paths.state, "work")
    deadline = time.monotonic() + PATIENCE_S
    found: list[dict[str, object]] = []
    while not found and time.monotonic() < deadline:
        found = store.find(COLLECTION, {"status": "healthy"}, limit=1)
    store.close()
    sample = found[0]
    assert sample["component_id"] == "worker:tag:0"
    assert sample["invocation"] == invocation
    assert sample["job"] == "a.flac"
    assert sample["metrics"] == {"files": 3}


@pytest.mark.parametrize("how", ["failing", "slow"])
def test_a_store_that_is_no_use_changes_nothing(lab: Lab, how: str) -> None:
    lab.configure(tag=1, health=CALM._replace(snapshot_interval_s=0.1))
    work = f"{lab.paths.state}/work"
    if how == "failing":
        with open(work, "w", encoding="ascii"):
            pass  # a file in the directory's place
    else:
        store = SqliteStore(lab.paths.state, "work")
        locked = sqlite3.connect(store.path, isolation_level=None)
        locked.execute("BEGIN IMMEDIATE")  # and every write waits for two seconds
    lab.start()
    events = lab.subscribe()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    deadline = time.monotonic() + PATIENCE_S
    jobs = 0
    while "could not be written" not in lab.said() or jobs < 50:
        assert time.monotonic() < deadline
        jobs += 1
        writer.frame(job=str(jobs))
        events.until(lambda event: event["worker"]["current_job"] == str(jobs))  # noqa: B023
    if how == "slow":
        locked_until_ms = time.time_ns() // 1_000_000
        locked.close()
        sampled: list[int] = []
        while not sampled or sampled[-1] <= locked_until_ms:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            sampled = [doc["wall_ms"] for doc in store.find("health_history")]
        store.close()
        assert "the history store is back dropped_samples=0" in lab.said()
        # All that was sampled meanwhile is there, and not only the last.
        assert len([moment for moment in sampled if moment < locked_until_ms]) >= 3
    assert lab.kill(15) == 0


def test_its_own_watchdog_is_fed_by_the_loop(lab: Lab) -> None:
    lab.environment["WATCHDOG_USEC"] = "200000"
    lab.configure(tag=1)
    lab.start()
    lab.manager.wait_for(lambda _: lab.manager.count("WATCHDOG=1") >= 5)


def test_without_a_configuration_it_waits_for_one(lab: Lab) -> None:
    lab.start()
    assert lab.snapshot() == {}
    lab.configure(tag=1)
    lab.reload()
    assert lab.snapshot().keys() == {"worker:tag:0"}


def test_where_no_systemd_is_it_says_so(lab: Lab) -> None:
    from nomarr_systemd.supervisor.main import main

    os.rmdir(lab.units)
    assert main([f"--runtime={lab.paths.runtime}", f"--state={lab.paths.state}"]) == 1
    assert main(["--bogus"]) == 2
