"""A Python worker from its start to its end: loading, jobs, idleness, eviction, every way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.support.running_worker import COMPONENT, INVOCATION, Start, workers


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


def test_ready_comes_after_loading_and_stopping_at_the_end(start: Start) -> None:
    worker = start("Loads")
    worker.until_frame(status="pending", phase="loading_models")
    first = worker.frames[0]
    assert (first["status"], first["seq"]) == ("pending", 1)
    worker.until(lambda: worker.count("EXTEND_TIMEOUT_USEC=") >= 1)
    worker.until(lambda: len(worker.frames) >= 5)
    assert worker.count("READY=1") == 0
    assert worker.count("WATCHDOG=1") == 0
    worker.tell("loaded")
    worker.until(lambda: worker.count("READY=1"))
    worker.until_frame(status="healthy", phase="idle")
    worker.until(lambda: worker.count("WATCHDOG=1") >= 2)
    assert worker.count("READY=1") == 1
    assert worker.stop() == 0
    assert worker.eof
    assert worker.frame["status"] == worker.frame["phase"] == "stopping"
    assert worker.messages[-1] == "STOPPING=1\nSTATUS=stopping"
    assert worker.stdout == ""
    assert worker.decoder.drops == {}


def test_a_load_that_makes_no_progress_is_no_longer_excused(start: Start) -> None:
    worker = start("Loads", {"stall_timeout_s": 0.3})
    worker.until(lambda: worker.frame.get("progress_age_s", 0) > 0.3)
    extended = worker.count("EXTEND_TIMEOUT_USEC=")
    assert extended >= 1
    worker.until(lambda: worker.frame["progress_age_s"] > 0.8)
    assert worker.count("EXTEND_TIMEOUT_USEC=") == extended
    worker.tell("more")
    worker.until(lambda: worker.count("EXTEND_TIMEOUT_USEC=") > extended)


def test_a_stop_does_not_wait_for_a_load(start: Start) -> None:
    worker = start("Loads")
    worker.until_frame(phase="loading_models")
    assert worker.stop() == 0
    assert worker.count("READY=1") == 0
    assert worker.frame["status"] == "stopping"


def test_a_load_that_fails_is_a_crash(start: Start) -> None:
    worker = start("LoadsBadly")
    assert worker.wait() == 1
    assert worker.frame["status"] == "pending"
    assert worker.count("STOPPING=1") == 0
    assert "RuntimeError: no such model" in worker.stderr


def test_a_lazy_worker_is_pending_until_its_first_job_is_done(start: Start) -> None:
    worker = start("Lazy")
    worker.until(lambda: worker.count("READY=1"))
    worker.until_frame(status="pending", phase="idle")
    worker.tell("a", "nonfatal", "b")
    worker.until_frame(status="pending", phase="processing", job="b")
    worker.tell("done", "c")
    worker.until_frame(status="healthy", phase="processing", job="c")
    worker.tell("done")
    assert worker.stop() == 0


def test_frames_go_on_through_a_long_job_and_only_on_the_pipe(start: Start) -> None:
    worker = start("Told")
    worker.tell("long.flac")
    worker.until_frame(job="long.flac")
    seen = len(worker.frames)
    worker.until(lambda: len(worker.frames) >= seen + 10)
    during = worker.frames[seen : seen + 10]
    assert {(f["status"], f["phase"], f["job"]) for f in during} == {
        ("healthy", "processing", "long.flac")
    }
    assert [f["seq"] for f in worker.frames] == list(range(1, len(worker.frames) + 1))
    ages = [f["progress_age_s"] for f in during]
    assert ages == sorted(ages)
    frame = during[0]
    assert list(frame) == [
        *("component_id", "status", "phase", "job", "pid", "invocation", "metrics"),
        *("seq", "progress_age_s"),
    ]
    assert (frame["component_id"], frame["invocation"]) == (COMPONENT, INVOCATION)
    assert frame["pid"] == worker.child.pid
    assert frame["metrics"] == {
        "discovery_attempts": 1,
        "claim_conflicts": 0,
        "files_processed": 0,
        "consecutive_errors": 0,
        "avg_time_s": 0.0,
    }
    worker.tell("done")
    done = worker.until(lambda: worker.frame.get("metrics", {}).get("files_processed") == 1)
    assert done
    assert worker.frame["metrics"]["avg_time_s"] >= 0.3
    assert worker.stop() == 0
    assert worker.eof
    assert worker.stdout == ""


def test_the_status_line_is_for_people(start: Start) -> None:
    worker = start("Told")
    worker.until(lambda: worker.count("READY=1"))
    assert "idle" in worker.statuses()
    worker.tell("Motörhead/Ace\x1b of\x0bSpades.flac")
    worker.until(lambda: "processing Motörhead/Ace\\x1b of\\x0bSpades.flac" in worker.statuses())
    worker.tell("done", "b")
    worker.until(lambda: worker.statuses()[-1].startswith("processing b; 1 done, "))
    assert worker.statuses()[-1].endswith(" s on average")
    told = worker.statuses()
    assert all(before != after for before, after in pairwise(told))


def test_sigterm_finishes_the_job_and_asks_for_time(start: Start) -> None:
    worker = start("Told")
    worker.tell("a")
    worker.until_frame(job="a")
    extended = worker.count("EXTEND_TIMEOUT_USEC=")
    worker.child.send_signal(signal.SIGTERM)
    worker.until(lambda: worker.count("EXTEND_TIMEOUT_USEC=") > extended)
    seen = len(worker.frames)
    worker.until(lambda: len(worker.frames) >= seen + 3)
    assert worker.frame["job"] == "a"
    worker.until(lambda: worker.statuses()[-1] == "stopping: processing a")
    worker.tell("done", "b")
    assert worker.wait() == 0
    assert "did a" in worker.stderr
    assert all(frame.get("job") != "b" for frame in worker.frames)


def test_a_job_without_progress_gets_no_more_time_to_stop(start: Start) -> None:
    worker = start("Told", {"stall_timeout_s": 0.3})
    worker.tell("a")
    worker.until(lambda: worker.frame.get("progress_age_s", 0) > 0.3 and worker.frame.get("job"))
    extended = worker.count("EXTEND_TIMEOUT_USEC=")
    worker.child.send_signal(signal.SIGTERM)
    worker.until(lambda: worker.frame["progress_age_s"] > 0.8)
    assert worker.count("EXTEND_TIMEOUT_USEC=") == extended
    worker.tell("progress")
    worker.until(lambda: worker.count("EXTEND_TIMEOUT_USEC=") > extended)
    worker.tell("done")
    assert worker.wait() == 0


def test_sigterm_is_heard_while_the_job_is_inside_one_long_call(start: Start) -> None:
    worker = start("Computes")
    worker.until_frame(phase="processing")
    worker.until(lambda: worker.count("READY=1"))
    extended = worker.count("EXTEND_TIMEOUT_USEC=")
    worker.child.send_signal(signal.SIGTERM)
    worker.until(lambda: worker.count("EXTEND_TIMEOUT_USEC=") > extended)


def test_sigterm_ends_an_idle_wait_at_once(start: Start) -> None:
    worker = start("Sleeps")
    worker.until_frame(phase="idle")
    assert worker.stop() == 0


def test_an_idle_wait_is_no_stall(start: Start) -> None:
    worker = start("Sleeps", {"stall_timeout_s": 0.1})
    worker.until_frame(phase="idle")
    seen = len(worker.frames)
    pinged = worker.count("WATCHDOG=1")
    worker.until(lambda: worker.count("WATCHDOG=1") >= pinged + 4)
    assert {frame["progress_age_s"] for frame in worker.frames[seen:]} == {0}


def test_a_supervisor_lost_in_a_job_lets_it_finish(start: Start) -> None:
    worker = start("Told")
    worker.tell("a")
    worker.until_frame(job="a")
    worker.leave()
    worker.until(lambda: "supervisor gone: processing a" in worker.statuses())
    pinged = worker.count("WATCHDOG=1")
    worker.until(lambda: worker.count("WATCHDOG=1") >= pinged + 2)
    assert worker.child.poll() is None
    worker.tell("done", "b")
    assert worker.wait() == 75
    assert "did a" in worker.stderr
    assert "did b" not in worker.stderr
    assert worker.count("STOPPING=1") == 1


def test_a_supervisor_lost_while_idle(start: Start) -> None:
    worker = start("Sleeps")
    worker.until_frame(phase="idle")
    worker.leave()
    assert worker.wait() == 75


def test_a_stop_that_was_asked_for_is_no_lost_supervisor(start: Start) -> None:
    worker = start("Told")
    worker.tell("a")
    worker.until_frame(job="a")
    worker.leave()
    worker.until(lambda: "supervisor gone: processing a" in worker.statuses())
    assert worker.stop() == 0


def test_without_a_reader_it_does_not_even_load(start: Start) -> None:
    first = start("Sleeps")
    first.until_frame(phase="idle")
    first.leave()
    assert first.wait() == 75
    worker = start("LoadsBadly", environment={"NOMARR_HEALTH_PIPE": str(first.pipe)})
    assert worker.wait() == 75
    assert "has no reader" in worker.stderr
    assert "no such model" not in worker.stderr
    gone = start("LoadsBadly", environment={"NOMARR_HEALTH_PIPE": "/nonexistent/health/tag-0"})
    assert gone.wait() == 75


def test_without_a_pipe_it_runs_without_frames(start: Start) -> None:
    worker = start("Told", environment={"NOMARR_HEALTH_PIPE": None, "NOMARR_COMPONENT_ID": None})
    worker.tell("a", "done", "b")
    worker.until(lambda: any("processing b; 1 done" in text for text in worker.statuses()))
    worker.until(lambda: worker.count("WATCHDOG=1") >= 3)
    assert worker.stop() == 0
    assert worker.frames == []


def test_without_systemd_it_runs_too(start: Start) -> None:
    worker = start("Told", environment={"NOTIFY_SOCKET": None, "WATCHDOG_USEC": None})
    worker.tell("a", "done")
    worker.until(lambda: worker.frame.get("metrics", {}).get("files_processed") == 1)
    assert worker.stop() == 0


def own_words(stderr: str) -> list[str]:
    """What the worker said itself, without the runtime's log."""
    lines = [line for line in stderr.splitlines() if not line.startswith("nomarr_systemd.")]
    return " ".join(lines).split()


def test_it_evicts_once_and_loads_again_for_the_next_job(start: Start) -> None:
    worker = start("Evicts", {"idle_evict_s": 0.05})
    worker.tell(*["none"] * 40)
    worker.until(lambda: "evict" in worker.stderr)
    attempts = worker.frame["metrics"]["discovery_attempts"]
    worker.until(lambda: worker.frame["metrics"]["discovery_attempts"] >= attempts + 3)
    worker.tell("a")
    worker.until_frame(job="a", phase="processing")
    assert own_words(worker.stderr) == ["load", "evict", "load"]
    worker.tell("done", *["none"] * 40)
    expected = ["load", "evict", "load", "did", "a", "evict"]
    worker.until(lambda: own_words(worker.stderr) == expected)
    worker.tell("b")
    worker.until_frame(job="b", phase="processing")


def test_an_eviction_that_fails_counts_once(start: Start) -> None:
    worker = start("EvictsBadly", {"idle_evict_s": 0.05})
    worker.tell(*["none"] * 40)
    worker.until(lambda: worker.frame.get("metrics", {}).get("consecutive_errors") == 1)
    worker.tell("a", "done", "b")
    worker.until_frame(job="b", phase="processing")
    assert worker.stderr.count("RuntimeError: stuck") == 1
    assert worker.frame["metrics"]["consecutive_errors"] == 0


def test_a_forked_child_is_not_the_worker(start: Start) -> None:
    worker = start("Forks")
    worker.tell("a")
    worker.until(lambda: worker.frame.get("metrics", {}).get("files_processed") == 1)
    assert f"child: -{signal.SIGTERM.value}" in worker.stderr
    worker.tell("b")
    worker.until(lambda: worker.frame["metrics"]["files_processed"] == 2)
