"""The examples in other languages keep the same contract, held to it by the same harness."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.running_worker import ROOT, Start, workers

EXAMPLES = ROOT / "examples"


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler, cc")
    program = tmp_path_factory.mktemp("examples") / "c-worker"
    source = EXAMPLES / "c-worker.c"
    flags = ["-Wall", "-Wextra", "-Werror", "-O2"]
    subprocess.run(["cc", *flags, "-o", str(program), str(source)], check=True)
    return str(program)


@pytest.fixture(params=["sh", "c"])
def command(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "c":
        return [request.getfixturevalue("compiled")]
    if not shutil.which("systemd-notify"):
        pytest.skip("needs systemd-notify")
    return [str(EXAMPLES / "shell-worker.sh"), "0.1"]


def test_an_example_lives_and_stops(start: Start, command: list[str]) -> None:
    worker = start(command)
    worker.until(lambda: worker.count("READY=1"))
    assert "working" in worker.statuses()
    worker.until(lambda: len(worker.frames) >= 4)
    worker.until(lambda: worker.count("WATCHDOG=1") >= 3)
    assert worker.frames[0]["status"] == "pending"
    assert {frame["status"] for frame in worker.frames[1:]} == {"healthy"}
    assert worker.count("READY=1") == 1
    assert worker.stop() == 0
    assert worker.frame["status"] == "stopping"
    assert worker.eof
    assert worker.decoder.drops == {}
    assert worker.stdout == worker.stderr == ""


def test_an_example_leaves_with_its_supervisor(start: Start, command: list[str]) -> None:
    worker = start(command)
    worker.until_frame(status="healthy")
    worker.leave()
    assert worker.wait() == 75
    late = start(command, environment={"NOMARR_HEALTH_PIPE": str(worker.pipe)})
    assert late.wait() == 75


def test_an_example_does_not_wait_for_a_full_pipe(start: Start, command: list[str]) -> None:
    if len(command) > 1:
        command = [command[0], "0.001"]
    worker = start(command, is_read=False)
    filler = subprocess.run(  # what another writer of the pipe left in it
        ["dd", "if=/dev/zero", f"of={worker.pipe}", "oflag=nonblock", "bs=1", "count=5000"],
        capture_output=True,
        check=False,
    )
    assert b"temporarily unavailable" in filler.stderr
    pinged = worker.count("WATCHDOG=1")
    worker.until(lambda: worker.count("WATCHDOG=1") >= pinged + 3)
    worker.child.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_the_shell_example_is_short() -> None:
    text = (EXAMPLES / "shell-worker.sh").read_text()
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    assert len(lines) <= 15
