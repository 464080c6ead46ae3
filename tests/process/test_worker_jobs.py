"""A worker that takes its jobs from the store: every end recorded once, whatever the store does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.job import Doc, Owner, RunEnd
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.owed_results import OwedResults
from nomarr_systemd.jobs.settlement import settle
from nomarr_systemd.jobs.stats import GpuHealth, publish, report_gpu
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.running_worker import INVOCATION, Start, workers
from tests.support.waiting import PATIENCE_S


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


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_batch_whose_worker_ends_in_the_middle(start: Start, jobs: Jobs, how: str) -> None:
    """Only the job in hand has crashed; the others are free at once, and untouched."""
    jobs.add("/x/a", "/x/wait", "/x/y", "/x/z", "/z")
    worker = start("FromQueue", jobs.settings | {"claim_batch": 4})
    worker.until_frame(job="/x/wait")
    assert len(jobs.store.find(CLAIMS)) == 3
    if how == "kill":
        worker.child.kill()
        worker.wait()
        pool = Pool("tag", crash_policy="restart-requeue-in-flight")
        settle(jobs.store, pool, RunEnd("worker:tag:0", INVOCATION, "killed by signal 9", 1))
    else:
        worker.child.send_signal(signal.SIGTERM)
        worker.tell("go on")
        assert worker.wait() == 0
    assert jobs.store.find(CLAIMS) == []
    assert (jobs.job("/x/a")["status"], jobs.job("/x/a")["attempts"]) == ("done", 1)
    in_hand = jobs.job("/x/wait")
    crashes = len(in_hand.get("crashes", ()))
    assert (in_hand["status"], crashes) == (("pending", 1) if how == "kill" else ("done", 0))
    for path in ("/x/y", "/x/z", "/z"):
        job = jobs.job(path)
        assert (job["status"], job["attempts"], job.get("crashes")) == ("pending", 0, None)


def test_a_result_outlives_its_worker(start: Start, jobs: Jobs, tmp_path: Path) -> None:
    """Killed while the store is away: what it could not record, the next worker does."""
    jobs.add("/x/wait")
    (tmp_path / "state").mkdir()
    own = {"STATE_DIRECTORY": str(tmp_path / "state")}
    worker = start("FromQueue", jobs.settings, own)
    worker.until_frame(job="/x/wait")
    jobs.take_away()
    worker.tell("go on")
    worker.until_frame(status="unhealthy", phase="backing_off")
    worker.child.kill()
    worker.wait()
    assert len(list((tmp_path / "state").iterdir())) == 1
    jobs.bring_back()
    again = start("FromQueue", jobs.settings, own | {"INVOCATION_ID": "b" * 32})
    jobs.until(lambda: jobs.job("/x/wait")["status"] == "done")
    jobs.until(lambda: not list((tmp_path / "state").iterdir()))
    assert (jobs.job("/x/wait")["result"], jobs.job("/x/wait")["attempts"]) == ({"length": 7}, 1)
    assert jobs.store.find(CLAIMS) == []
    assert again.stop() == 0
    assert "begin" not in again.stderr


@pytest.mark.parametrize(
    ("policy", "status", "most"),
    [
        ("restart-fail-in-flight", "error", 2),
        ("restart-requeue-in-flight", "pending", 2),
        ("restart-requeue-in-flight", "quarantined", 1),
    ],
)
def test_a_result_is_delivered_once_whatever_became_of_its_job(
    jobs: Jobs, tmp_path: Path, policy: Any, status: str, most: int
) -> None:
    """The supervisor settles the run before the next worker comes."""
    jobs.add("/x/a")
    dead, next_one = (Owner("worker:tag:0", each * 32) for each in "ab")
    doc = Claims(jobs.store, "tag", dead).take_next()
    assert doc
    OwedResults(str(tmp_path), "tag", dead).keep(doc["_key"], End("done", "x"), doc["attempts"])
    end = RunEnd(dead.component_id, dead.invocation, "killed by SIGKILL", 1)
    settle(jobs.store, Pool("tag", crash_policy=policy, job_max_crashes=most), end)
    assert jobs.job("/x/a")["status"] == status
    for _ in range(2):
        OwedResults(str(tmp_path), "tag", next_one).deliver(jobs.store)
        assert (jobs.job("/x/a")["status"], jobs.job("/x/a")["result"]) == ("done", "x")
    assert not list(tmp_path.glob("owed-*"))
    assert Claims(jobs.store, "tag", next_one).take_next() is None


def test_a_result_that_is_no_longer_wanted_is_not_delivered(jobs: Jobs, tmp_path: Path) -> None:
    jobs.add("/x/a")
    first, second = (Owner("worker:tag:0", each * 32) for each in "ab")
    doc = Claims(jobs.store, "tag", first).take_next()
    assert doc
    owed = OwedResults(str(tmp_path), "tag", first)
    assert owed.keep(doc["_key"], End("done", "old"), doc["attempts"])
    Claims(jobs.store, "tag", first).end(doc["_key"], End("pending"))
    again = Claims(jobs.store, "tag", second).take_next()  # begun again
    assert again
    (tmp_path / "owed-tag-ff.json").write_text("rubbish")
    (tmp_path / "owed-other-ff.json").write_text("another pool's")
    OwedResults(str(tmp_path), "tag", second).deliver(jobs.store)
    assert jobs.job("/x/a")["status"] == "running"
    assert [each.name for each in tmp_path.glob("owed-*")] == ["owed-other-ff.json"]


def test_the_average_goes_on_over_a_restart(start: Start, jobs: Jobs) -> None:
    publish(jobs.store, "worker:tag:0", {"avg_time_s": 10.0})
    publish(jobs.store, "worker:tag:0", {"avg_time_s": 0, "files_processed": 0})  # just started
    jobs.add("/x/a")
    worker = start("FromQueue", jobs.settings)
    worker.until(lambda: worker.frame.get("metrics", {}).get("files_processed") == 1)
    assert 8 <= worker.frame["metrics"]["avg_time_s"] < 9
    assert worker.stop() == 0


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
