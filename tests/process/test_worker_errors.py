"""What goes wrong in a Python worker: errors that count, errors that do not, not being ready."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running_worker import Start, workers


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


def test_ten_errors_in_a_row_are_the_end(start: Start) -> None:
    worker = start("Told")
    for n in range(9):
        worker.tell(f"job{n}", "error")
    worker.tell("good", "done")
    for n in range(9):
        worker.tell(f"job{n}", "error")
    worker.tell("bad", "nonfatal", "held")
    frame = worker.until_frame(job="held")
    assert frame["metrics"]["consecutive_errors"] == 9
    assert frame["metrics"]["files_processed"] == 1
    worker.tell("error")
    assert worker.wait() == 70
    assert worker.frame["status"] == "stopping"
    assert worker.stderr.count("RuntimeError: broken") == 19
    assert "10 errors in a row: giving up" in worker.stderr


def test_nonfatal_errors_do_not_count(start: Start) -> None:
    worker = start("Told")
    for n in range(30):
        worker.tell(f"job{n}", "nonfatal")
    worker.tell("last")
    frame = worker.until_frame(job="last", status="healthy")
    assert frame["metrics"]["consecutive_errors"] == 0
    assert worker.stderr.count("bad file") == 30


def test_what_the_operating_system_says_of_the_jobs_own_file_does_not_count(
    start: Start, tmp_path: Path
) -> None:
    worker = start("Forgiving")
    for _ in range(6):
        worker.tell(str(tmp_path / "missing"), "open")
        worker.tell(str(tmp_path), "open")  # a directory
        worker.tell("a", "format")  # named in nonfatal
    worker.tell("last")
    frame = worker.until_frame(job="last", status="healthy")
    assert frame["metrics"]["consecutive_errors"] == 0
    assert worker.stderr.count("FileNotFoundError: ") == 6
    assert worker.stderr.count("IsADirectoryError: ") == 6
    worker.tell("done")
    # A file of the worker's own is its own trouble.
    worker.tell("b", f"open {tmp_path}/model", "c")
    assert worker.until_frame(job="c")["metrics"]["consecutive_errors"] == 1
    worker.tell("done", "d", "format", "e")
    assert worker.until_frame(job="e")["metrics"]["consecutive_errors"] == 0


def test_a_preflight_that_returns_false_is_an_error(start: Start) -> None:
    worker = start("PreflightReturns")
    worker.tell("a")
    worker.until_frame(status="unhealthy", phase="backing_off")
    assert "raise NotReady" in worker.stderr


def test_a_source_that_fails_counts(start: Start) -> None:
    worker = start("SourceFails")
    assert worker.wait() == 70
    assert worker.stderr.count("RuntimeError: no queue") == 10


def test_not_ready_backs_off_and_comes_back(start: Start) -> None:
    worker = start("Checks")
    worker.tell("a")
    worker.until_frame(phase="idle")
    worker.tell("notready")
    worker.until_frame(status="unhealthy", phase="backing_off")
    worker.tell("notready", "notready", "error")
    worker.until(lambda: "retrying in 0.1 s" in worker.stderr)
    waits = [line.split()[-2] for line in worker.stderr.split("\n") if "retrying in" in line]
    assert waits[:3] == ["0.02", "0.04", "0.08"]
    worker.until(
        lambda: any("preflight failed: nvidia-smi; retrying" in text for text in worker.statuses())
    )
    # It checks before it takes the job again, and before the job itself.
    worker.tell("ok", "ok")
    frame = worker.until_frame(status="healthy", phase="processing", job="a")
    assert frame["metrics"]["consecutive_errors"] == 0
    worker.tell("notready")
    worker.until_frame(status="unhealthy", phase="backing_off")
    assert worker.stderr.rstrip().endswith("the GPU went away; retrying in 0.02 s")
    worker.tell("ok", "ok", "done")
    worker.until(lambda: "did a" in worker.stderr)


def test_a_worker_that_backs_off_frames_pings_and_stops(start: Start) -> None:
    worker = start("ChecksSlowly", {"stall_timeout_s": 0.2})
    worker.tell("a", "notready")
    worker.until_frame(phase="backing_off")
    seen, pinged = len(worker.frames), worker.count("WATCHDOG=1")
    worker.until(lambda: len(worker.frames) > seen + 5)
    worker.until(lambda: worker.count("WATCHDOG=1") > pinged + 2)
    assert worker.stop() == 0
    assert worker.frame["status"] == "stopping"


def test_a_supervisor_lost_while_backing_off(start: Start) -> None:
    worker = start("ChecksSlowly")
    worker.tell("a", "notready")
    worker.until_frame(phase="backing_off")
    worker.leave()
    assert worker.wait() == 75


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("tests.process.nowhere:Told", "No module named 'tests.process.nowhere'"),
        ("tests.support.sample_workers:Nobody", "Nobody does not exist in "),
        ("tests.support.sample_workers:NoWorker", "NoWorker is not a subclass of Worker in "),
        ("tests.support.sample_workers:hear", "hear is not a subclass of Worker in "),
        ("no/such:thing", '"no/such:thing" names no class'),
    ],
)
def test_an_entrypoint_that_cannot_be_loaded(start: Start, entrypoint: str, message: str) -> None:
    worker = start(entrypoint)
    assert worker.wait() == 78
    last = worker.stderr.rstrip().split("\n")[-1]
    assert last.startswith("nomarr-worker: ERROR: entrypoint")
    assert message in last
    assert "(hint: " in last
    assert worker.count("READY=1") == 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NOMARR_SETTINGS": "{"}, "NOMARR_SETTINGS is not JSON"),
        ({"NOMARR_SETTINGS": "[]"}, "NOMARR_SETTINGS is not a JSON object"),
        ({"NOMARR_SETTINGS": '{"frame_interval_s":0}'}, "frame_interval_s is '0'"),
        ({"NOMARR_SETTINGS": '{"stall_timeout_s":NaN}'}, "stall_timeout_s is 'nan'"),
        ({"NOMARR_SETTINGS": '{"idle_evict_s":"1"}'}, "idle_evict_s is '1'"),
        ({"NOMARR_COMPONENT_ID": "worker"}, "NOMARR_COMPONENT_ID"),
        ({"NOMARR_COMPONENT_ID": None}, "NOMARR_COMPONENT_ID"),
        ({"WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC is 'soon'"),
        ({"NOMARR_HEALTH_PIPE": "/dev/null"}, "the health pipe /dev/null is not a FIFO"),
        ({"NOMARR_HEALTH_PIPE": "/dev/null/x"}, "cannot open the health pipe /dev/null/x"),
    ],
)
def test_an_environment_that_is_wrong(
    start: Start, environment: dict[str, str | None], message: str
) -> None:
    worker = start("Told", environment=environment)
    assert worker.wait() == 78
    assert message in worker.stderr
    assert "Traceback" not in worker.stderr


def test_a_setting_of_a_newer_version_is_passed_over(start: Start) -> None:
    worker = start("Sleeps", {"from_the_future": 1})
    worker.until_frame(phase="idle")
    assert worker.stop() == 0


def test_one_argument_is_needed(start: Start) -> None:
    main = "import sys; from nomarr_systemd.worker.main import main; sys.exit(main())"
    worker = start([sys.executable, "-c", main])
    assert worker.wait() == 78
    assert "nomarr-worker package.module:Class" in worker.stderr


def test_a_systemd_that_is_not_there_is_said(start: Start) -> None:
    worker = start("Sleeps", environment={"NOTIFY_SOCKET": "/nonexistent/notify"})
    worker.until_frame(phase="idle")
    worker.child.send_signal(signal.SIGINT)  # at a terminal, the same as SIGTERM
    assert worker.wait() == 0
    assert "cannot connect to /nonexistent/notify" in worker.stderr


def test_a_worker_brings_little_with_it() -> None:
    """Its memory is for models: the standard library, sdnotify and our core, nothing else."""
    code = (
        "import sys, nomarr_systemd.worker.main\n"
        "heavy = 'sqlite3 systemd click jinja2 arango asyncio requests tomllib'.split()\n"
        "ours = {'.'.join(name.split('.')[:2]) for name in sys.modules"
        " if name.startswith('nomarr_systemd.')}\n"
        "print([name for name in heavy if name in sys.modules], sorted(ours))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "[] ['nomarr_systemd.config', 'nomarr_systemd.core', 'nomarr_systemd.jobs',"
        " 'nomarr_systemd.worker']"
    )
