"""A worker that takes its jobs from the store: every end recorded once, whatever the store does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nomarr_systemd.core.job import Doc
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.jobs.stats import GpuHealth, report_gpu
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.running_worker import INVOCATION, PATIENCE_S, Start, workers


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


class Jobs:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = SqliteStore(str(place), "work")
        self.settings = {"store": {"url": f"sqlite://{place}"}}

    def add(self, *paths: str | bytes) -> None:
        queue.add(self.store, "tag", map(os.fsdecode, paths), on_page=lambda *_: None)

    def job(self, path: str | bytes) -> Doc:
        return queue.find(self.store, "tag", os.fsdecode(path))

    def until(self, what: Callable[[], object]) -> None:
        """The store cannot be waited on."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def take_away(self) -> None:
        os.rename(self.place / "work", self.place / "aside")
        (self.place / "work").write_text("no directory")

    def bring_back(self) -> None:
        os.unlink(self.place / "work")
        os.rename(self.place / "aside", self.place / "work")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.store.close()


def test_jobs_and_their_ends(start: Start, jobs: Jobs) -> None:
    odd = b"/x/\xff\n\x1b"
    jobs.add("/x/good", "/x/nonfatal", "/x/error", "/x/odd", odd)
    worker = start("FromQueue", jobs.settings)
    jobs.until(lambda: not jobs.store.count(queue.JOBS, {"pool": "tag", "status": "pending"}))
    worker.until(lambda: worker.frame.get("metrics", {}).get("files_processed") == 3)
    jobs.until(lambda: jobs.store.find(CLAIMS) == [])
    assert worker.stop() == 0
    assert jobs.job("/x/good")["result"] == {"length": 7}
    assert jobs.job("/x/nonfatal")["error"] == {"type": "NonFatal", "message": "bad file"}
    assert jobs.job("/x/error")["error"] == {"type": "RuntimeError", "message": "broken"}
    assert "not_kept" in jobs.job("/x/odd")["result"]
    assert jobs.job(odd)["status"] == "done"
    assert odd.hex() in worker.stderr
    assert jobs.store.find(CLAIMS) == []


def test_a_result_outlives_a_store_that_is_away(start: Start, jobs: Jobs) -> None:
    jobs.add("/x/wait")
    worker = start("FromQueue", jobs.settings)
    worker.until_frame(job="/x/wait")
    [claim] = jobs.store.find(CLAIMS)
    assert (claim["component_id"], claim["invocation"]) == ("worker:tag:0", INVOCATION)
    jobs.take_away()
    worker.tell("go on")
    worker.until_frame(status="unhealthy", phase="backing_off")
    jobs.bring_back()
    jobs.until(lambda: jobs.job("/x/wait")["status"] == "done")
    assert jobs.job("/x/wait")["result"] == {"length": 7}
    assert (jobs.job("/x/wait")["attempts"], jobs.store.find(CLAIMS)) == (1, [])
    assert worker.stderr.count("begin") == 1


def test_a_worker_that_is_stopped_says_its_last_words(start: Start, jobs: Jobs) -> None:
    jobs.add("/x/wait", "/x/z")
    worker = start("FromQueue", jobs.settings)
    worker.until_frame(job="/x/wait")
    jobs.take_away()
    worker.child.send_signal(signal.SIGTERM)
    worker.tell("go on")
    worker.until(lambda: "cannot be recorded" in worker.stderr)
    jobs.bring_back()
    assert worker.wait() == 0
    assert jobs.job("/x/wait")["status"] == "done"
    assert jobs.job("/x/z")["status"] == "pending"
    assert jobs.store.find(CLAIMS) == []


def test_a_store_that_is_away_from_the_start(start: Start, jobs: Jobs) -> None:
    jobs.add("/x/a")
    jobs.take_away()
    worker = start("FromQueue", jobs.settings)
    worker.until_frame(phase="backing_off")
    jobs.bring_back()
    jobs.until(lambda: jobs.job("/x/a")["status"] == "done")
    assert worker.stop() == 0


def test_no_job_is_begun_without_the_gpu(start: Start, jobs: Jobs) -> None:
    jobs.add("/x/a")
    report_gpu(jobs.store, GpuHealth(available=False, reason="fell off the bus"))
    worker = start("FromQueue", jobs.settings)
    worker.until_frame(status="unhealthy", phase="backing_off")
    worker.until(lambda: "fell off the bus" in worker.stderr)
    jobs.until(lambda: jobs.store.find(CLAIMS) == [])
    report_gpu(jobs.store, GpuHealth(available=True))
    jobs.until(lambda: jobs.job("/x/a")["status"] == "done")
    assert worker.stop() == 0


def test_old_news_of_the_gpu_is_no_news(start: Start, jobs: Jobs) -> None:
    jobs.add("/x/a")
    report_gpu(jobs.store, GpuHealth(available=False))
    worker = start("FromQueue", {**jobs.settings, "gpu_health_max_age_s": 0})
    jobs.until(lambda: jobs.job("/x/a")["status"] == "done")
    assert worker.stop() == 0


def test_without_a_run_of_systemds_there_is_no_queue(start: Start, jobs: Jobs) -> None:
    worker = start("FromQueue", jobs.settings, {"INVOCATION_ID": None})
    assert worker.wait() == 78
    assert "needs INVOCATION_ID" in worker.stderr
    worker = start("FromQueue", {"store": {"url": "nowhere"}})
    assert worker.wait() == 78
