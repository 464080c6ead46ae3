"""What a Python worker proves: progress to systemd, life to the supervisor, and never by waiting
for either of them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.running_worker import Start, workers


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


def test_a_hung_loop_frames_on_pings_no_more_and_leaves_its_stacks(start: Start) -> None:
    worker = start("Hangs", {"stall_timeout_s": 0.6})
    worker.until(lambda: worker.count("WATCHDOG=1") >= 2)
    worker.until(lambda: worker.frame.get("progress_age_s", 0) >= 0.6)
    pinged, seen = worker.count("WATCHDOG=1"), len(worker.frames)
    worker.until(lambda: worker.frame["progress_age_s"] > 1.6)
    assert worker.count("WATCHDOG=1") == pinged
    ages = [frame["progress_age_s"] for frame in worker.frames[seen:]]
    assert len(ages) >= 5
    assert ages == sorted(ages)
    assert worker.frame["status"] == "healthy"
    worker.child.send_signal(signal.SIGABRT)
    assert worker.wait() == -signal.SIGABRT
    assert "hang_for_ever" in worker.stderr
    assert "in _run" in worker.stderr  # the frame thread: all threads are shown


@pytest.mark.parametrize("kind", ["Locks", "Vanishes"])
def test_a_job_that_ends_all_at_once_is_named_and_the_worker_was_ready(
    start: Start, kind: str
) -> None:
    """READY=1 and the frames of changes were left to a thread that never ran again: systemd took
    it for a start that timed out, and nobody knew the job."""
    worker = start(kind)
    worker.until_frame(job="at once")
    assert worker.count("READY=1") == 1
    if kind == "Locks":
        worker.child.kill()
    assert worker.wait() == (-signal.SIGKILL if kind == "Locks" else 3)


def test_progress_within_a_job_is_enough(start: Start) -> None:
    worker = start("Told", {"stall_timeout_s": 0.5})
    worker.tell("a")
    worker.until_frame(job="a")
    worker.until(lambda: worker.frame["progress_age_s"] >= 0.5)
    for _ in range(2):
        pinged = worker.count("WATCHDOG=1")
        worker.tell("progress")
        worker.until(lambda before=pinged: worker.count("WATCHDOG=1") > before)  # type: ignore[misc]
        worker.until(lambda: worker.frame["progress_age_s"] >= 0.5)


def test_pings_do_not_need_frames(start: Start) -> None:
    worker = start(
        "Told", {"frame_interval_s": 3600, "stall_timeout_s": 0.5}, {"WATCHDOG_USEC": "100000"}
    )
    worker.tell("a")
    worker.until_frame(job="a")
    worker.until(lambda: worker.count("WATCHDOG=1") >= 5)
    pinged = worker.count("WATCHDOG=1")
    while worker.count("WATCHDOG=1") < pinged + 10:  # without a frame to wake the thread
        worker.tell("progress")
        seen = worker.count("WATCHDOG=1")
        worker.until(lambda before=seen: worker.count("WATCHDOG=1") > before)  # type: ignore[misc]
    assert len(worker.frames) <= 4


def test_progress_after_a_stall_is_told_at_once(start: Start) -> None:
    """Without waiting for the next frame: systemd may be about to kill."""
    worker = start("Told", {"frame_interval_s": 3, "stall_timeout_s": 0.3})
    worker.tell("a")
    worker.until(lambda: worker.frame.get("progress_age_s", 0) > 1)
    seen, pinged = len(worker.frames), worker.count("WATCHDOG=1")
    worker.tell("progress")
    worker.until(lambda: worker.count("WATCHDOG=1") > pinged)
    assert len(worker.frames) == seen


def test_a_stall_timeout_of_0_judges_no_age(start: Start) -> None:
    worker = start("Hangs", {"stall_timeout_s": 0}, {"WATCHDOG_USEC": "50000"})
    worker.until(lambda: worker.frame.get("progress_age_s", 0) > 0.5)
    pinged = worker.count("WATCHDOG=1")
    worker.until(lambda: worker.count("WATCHDOG=1") > pinged + 5)


def test_a_watchdog_for_another_process_is_not_ours(start: Start) -> None:
    worker = start("Told", environment={"WATCHDOG_PID": "1", "WATCHDOG_USEC": "2000"})
    worker.until(lambda: worker.count("READY=1"))
    seen = len(worker.frames)
    worker.until(lambda: len(worker.frames) > seen + 5)
    assert worker.count("WATCHDOG=1") == 0


def test_a_full_pipe_drops_frames_and_stops_nothing(start: Start) -> None:
    worker = start("Told", {"frame_interval_s": 0.005}, {"WATCHDOG_USEC": "20000"}, is_read=False)
    worker.tell("a")
    worker.until(lambda: worker.count("WATCHDOG=1") >= 50)
    worker.tell("done", "b")
    worker.until(lambda: any("processing b; 1 done" in text for text in worker.statuses()))
    worker.read()
    worker.until_frame(job="b")
    numbers = [frame["seq"] for frame in worker.frames]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > len(numbers)
    assert worker.decoder.drops == {}
    assert worker.stop() == 0


def test_a_deaf_systemd_holds_up_nothing_and_hears_it_all_later(start: Start) -> None:
    worker = start("Told", is_heard=False)
    worker.tell("a", "done", "b")
    worker.until_frame(job="b", status="healthy")
    seen = len(worker.frames)
    worker.until(lambda: len(worker.frames) > seen + 5)
    worker.hear()
    worker.until(lambda: worker.count("READY=1"))
    worker.until(lambda: worker.count("WATCHDOG=1") >= 2)


def test_a_frame_thread_that_fails_is_said_and_ends_the_pings(start: Start) -> None:
    worker = start("PulseFails", {"frame_interval_s": 0.002})
    worker.until(lambda: worker.count("WATCHDOG=1"))
    worker.tell("a")
    worker.until(lambda: worker.count("WATCHDOG=1") and "no frame today" in worker.stderr)
    assert "the frame thread failed; this worker sends no more frames" in worker.stderr
    pinged, framed = worker.count("WATCHDOG=1"), len(worker.frames)
    worker.tell("done", *["more", "done"] * 50, "last", "done")  # the main thread frames no more
    worker.until(lambda: "did last" in worker.stderr)
    assert worker.stop() == 0
    assert (worker.count("WATCHDOG=1"), len(worker.frames)) == (pinged, framed)
    assert worker.eof


def test_a_job_is_named_before_it_can_kill(start: Start) -> None:
    """By the main thread itself: one more frame of the other thread would come too late."""
    worker = start("Told", {"frame_interval_s": 3600}, {"WATCHDOG_USEC": "200000"})
    worker.tell("a")
    worker.until_frame(job="a")
    pinged = worker.count("WATCHDOG=1")
    worker.until(lambda: worker.count("WATCHDOG=1") > pinged + 3)  # longer than BURST_S
    worker.tell("done", "killer", "die")
    assert worker.wait() == -signal.SIGKILL
    assert worker.frame["job"] == "killer"


def test_short_jobs_do_not_flood_the_pipe(start: Start) -> None:
    worker = start("Told", {"frame_interval_s": 3600})
    worker.until_frame(phase="idle")
    jobs = 300
    worker.tell(*[line for n in range(jobs) for line in (str(n), "done")])
    worker.until(lambda: worker.frame["metrics"]["files_processed"] == jobs)
    assert len(worker.frames) < jobs
    worker.tell("last")
    worker.until_frame(job="last")


@pytest.mark.parametrize(
    ("word", "seconds"), [("oom 7.5", 7.5), ("recovering 11", 11), ("memory", 30)]
)
def test_recovering_lasts_until_the_next_success(start: Start, word: str, seconds: float) -> None:
    worker = start("Told")
    worker.tell("a", word, "b")
    frame = worker.until_frame(status="recovering", phase="processing", job="b")
    assert frame["recover_for_s"] == seconds
    assert frame["metrics"]["consecutive_errors"] == 1
    worker.tell("nonfatal", "c")
    worker.until_frame(status="recovering", job="c")
    worker.tell("done", "d")
    frame = worker.until_frame(status="healthy", job="d")
    assert "recover_for_s" not in frame
    assert frame["metrics"]["consecutive_errors"] == 0


def test_recovering_ends_with_its_time_too(start: Start) -> None:
    """An idle worker would else be taken for one that never recovers."""
    worker = start("Told")
    worker.tell("a", "oom 0.3", "none")
    worker.until_frame(status="recovering")
    worker.until_frame(status="healthy", phase="idle")
