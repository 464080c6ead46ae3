"""The small parts of the worker runtime that need no process: waits, counts, the status line."""

from __future__ import annotations

import pytest

from nomarr_systemd.core.frames import Decoder, encode
from nomarr_systemd.jobs.source import OwnJobs
from nomarr_systemd.worker.environment import Environment, Settings, read_environment
from nomarr_systemd.worker.runtime import Worker
from nomarr_systemd.worker.vitals import Condition, Tally, describe


def test_waits_grow_to_their_limit() -> None:
    waits = [0.0]
    while waits[-1] < 30:
        waits.append(Worker.idle_waits.after(waits[-1]))
    assert waits[1:5] == [1, 1.5, 2.25, 3.375]
    assert waits[-1] == 30
    backoffs = [0.0]
    for _ in range(8):
        backoffs.append(Worker.backoff_waits.after(backoffs[-1]))
    assert backoffs[1:] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_average_rolls() -> None:
    tally = Tally()
    tally.consecutive_errors = 3
    tally.count_done(10)
    assert tally.avg_time_s == 10
    tally.count_done(20)
    assert tally.avg_time_s == pytest.approx(12)
    assert tally.consecutive_errors == 0
    assert tally.metrics()["files_processed"] == 2
    line = encode("worker:tag:0", "healthy", metrics=tally.metrics(), seq=1)
    assert Decoder("worker:tag:0").feed(line)


@pytest.mark.parametrize(
    ("condition", "ending", "text"),
    [
        (Condition("pending", "initializing"), "", "pending: initializing"),
        (Condition("pending", "loading_models"), "", "loading models"),
        (Condition("healthy", "processing", "a.flac"), "", "processing a.flac"),
        (Condition("recovering", "idle"), "", "recovering: idle"),
        (
            Condition("healthy", "processing", "x"),
            "supervisor gone",
            "supervisor gone: processing x",
        ),
        (Condition("stopping", "stopping"), "stopping", "stopping"),
        (
            Condition("unhealthy", "backing_off", note="no GPU; retrying in 4 s"),
            "",
            "backing off: no GPU; retrying in 4 s",
        ),
        # No job's name may speak to systemd in our place.
        (Condition("healthy", "processing", "a\nREADY=1"), "", "processing a\\nREADY=1"),
        (Condition("healthy", "processing", "\udcff"), "", "processing \\udcff"),
    ],
)
def test_a_line_for_people(condition: Condition, ending: str, text: str) -> None:
    assert describe(condition, Tally(), ending=ending) == text


def test_a_line_with_counts_and_of_bounded_length() -> None:
    tally = Tally()
    tally.count_done(1.234)
    tally.consecutive_errors = 2
    line = describe(Condition("healthy", "processing", "/a" * 500), tally, ending="")
    assert line.endswith("/a/a; 1 done, 1.23 s on average; 2 errors in a row")
    assert len(line) < 200


def test_a_released_job_is_the_next_one() -> None:
    queue = iter(["a", "b"])
    jobs = OwnJobs(lambda: next(queue, None))
    assert jobs.discover() == "a"
    jobs.release("a")
    assert [jobs.discover() for _ in range(3)] == ["a", "b", None]


def test_the_environment_has_the_configurations_defaults() -> None:
    assert read_environment({}, 1) == Environment(settings=Settings(2.5, 300.0, 300.0))
    told = read_environment(
        {
            "NOMARR_COMPONENT_ID": "tag-3",
            "NOMARR_HEALTH_PIPE": "/run/x",
            "WATCHDOG_USEC": "30000000",
            "WATCHDOG_PID": "1",
        },
        1,
    )
    assert told == Environment("worker:tag:3", "/run/x", "", 30.0)
