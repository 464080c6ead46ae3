"""Kills, restarts and reloads of the supervisor: no worker notices, no frame is lost or doubled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import RunEnd
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.pipe_store import PipeStore
from nomarr_systemd.supervisor.run_state import RunState
from nomarr_systemd.supervisor.supervisor import Supervisor
from nomarr_systemd.supervisor.workers import Worker, Workers
from tests.support.capabilities import needs_root
from tests.support.supervision import Lab, holds, make_lab, read_all, sequences, status_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12
CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        yield lab


def test_frames_written_while_it_was_away_are_seen_once(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    events = lab.subscribe("worker:*:frames")
    writer.frame()
    seen = events.until(holds(1))
    lab.kill()
    for _ in range(5):
        writer.frame()  # no EPIPE: the reading end lives in the store
    lab.start()
    again = lab.subscribe("worker:*:frames")
    seen += again.until(holds(6))
    writer.frame()
    seen += again.until(holds(7))
    assert sequences(seen) == [1, 2, 3, 4, 5, 6, 7]
    assert lab.snapshot()["worker:tag:0"]["status"] == "healthy"
    assert "no frames" not in lab.said()
    assert lab.manager.stored.keys() == {"pipes.1", "live.sock"}, "nothing was stored anew"


def test_who_waits_for_it_is_served_first(lab: Lab) -> None:
    """A subscriber that comes back while nobody is there waits in the stored socket."""
    lab.configure(tag=3, health=CALM)
    lab.start()
    writers = []
    for n in range(3):
        lab.begin_run(f"tag-{n}")
        writers.append(lab.writer(f"tag-{n}"))
    events = lab.subscribe("worker:*:frames")
    seen: list[dict[str, Any]] = []
    for _ in range(10):
        # Until it is taken a connection belongs to the stored socket, and no kill ends it.
        seen += [events.read() for _ in range(3)]
        for writer in writers:
            writer.frame()
        lab.kill(signal.SIGKILL)
        seen += read_all(events)
        events = lab.subscribe("worker:*:frames")
        lab.start()
    for writer in writers:
        writer.frame()
        seen += events.until(holds(writer.seq))
    gaps = 0
    for n in range(3):
        mine = [event for event in seen if event["topic"] == f"worker:tag:{n}:frames"]
        numbers = sequences(mine)
        assert numbers == sorted(set(numbers)), "a frame came twice"
        # A read may hold the frames of several rounds: how many depends on when the kill came.
        gaps += sum(after > before + 1 for before, after in pairwise([0, *numbers]))
    assert gaps <= 10, "one kill may cost one read of one pipe, not more"


def test_a_clean_restart_interrupts_nothing(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    seen: list[dict[str, Any]] = []
    events = lab.subscribe("worker:*:frames")
    for _ in range(10):
        seen.append(events.read())
        for _ in range(50):
            writer.frame()
        assert lab.kill(signal.SIGTERM) == 0
        seen += read_all(events)
        events = lab.subscribe("worker:*:frames")
        lab.start()
    writer.frame()
    seen += events.until(holds(501))
    assert sequences(seen) == list(range(1, 502))
    assert lab.manager.count("STOPPING=1") == 10


def test_what_died_meanwhile_is_found_at_the_start(lab: Lab) -> None:
    lab.configure(tag=2, health=CALM)
    lab.start()
    first = [lab.begin_run(f"tag-{n}") for n in range(2)]
    writers = [lab.writer(f"tag-{n}") for n in range(2)]
    events = lab.subscribe()
    for writer in writers:
        writer.frame(job="a")
        events.until(status_of("healthy", writer.component_id))
    lab.kill()
    for writer in writers:
        writer.frame(job="b")
        writer.close()
    lab.end_run("tag-0")
    second = lab.begin_run("tag-1")
    lab.start()
    shown = lab.wait_for_crashes(2)
    assert shown["worker:tag:0"]["status"] == "crashed"
    assert shown["worker:tag:0"]["last_crash"]["invocation"] == first[0]
    assert shown["worker:tag:1"]["status"] == "starting"
    assert shown["worker:tag:1"]["invocation"] == second
    assert shown["worker:tag:1"]["last_crash"]["invocation"] == first[1]
    live = lab.live()
    for n in range(2):
        answer = live.ask(op="label", component=f"tag-{n}", invocation=first[n])
        assert answer == {"ok": True, "label": "", "job": "b", "bad_line": ""}


def test_it_still_knows_what_it_was_told(lab: Lab) -> None:
    lab.configure(tag=2, health=CALM)
    lab.start()
    live = lab.live()
    assert live.ask(op="set_failed", component="worker:tag:0") == {"ok": True}
    told = {"component": "tag-1", "invocation": "a" * 32, "cause": "killed by SIGSEGV"}
    assert live.ask(op="crashed", deaths=[{**told, "decision": "restart after 1 s"}])["ok"]
    lab.kill()
    lab.start()
    shown = lab.snapshot()
    assert shown["worker:tag:0"]["status"] == "failed"
    assert shown["worker:tag:1"]["last_crash"]["error"] == "killed by SIGSEGV"
    assert shown["worker:tag:1"]["last_crash"]["decision"] == "restart after 1 s"
    live = lab.live()
    assert live.ask(op="reset", component="worker:tag:0") == {"ok": True}
    lab.kill()
    lab.start()
    assert lab.snapshot()["worker:tag:0"]["status"] == "stopped"


def test_a_reload_adds_and_removes_pipes(lab: Lab) -> None:
    lab.configure(tag=2, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    kept, dropped = lab.writer("tag-0"), lab.writer("tag-1")
    events = lab.subscribe()
    kept.frame()
    events.until(status_of("healthy"))
    lab.configure(tag=1, library=1, health=CALM)
    lab.reload()
    assert sorted(os.listdir(lab.paths.health)) == ["library-0", "tag-0"]
    assert lab.manager.pipes().keys() == {"tag-0", "library-0"}
    with pytest.raises(BrokenPipeError):
        dropped.frame()
    assert events.until(status_of("stopped", "worker:library:0"))
    kept.frame(job="still here")
    assert events.until(status_of("healthy"))[-1]["worker"]["seq"] == 2
    lab.begin_run("library-0")
    lab.writer("library-0").frame()
    events.until(status_of("healthy", "worker:library:0"))
    reloading = [text for text in lab.manager.messages if "RELOADING=1" in text]
    assert len(reloading) == 1
    assert re.search(r"MONOTONIC_USEC=\d+", reloading[0])
    lab.configure(tag=2, library=1, health=CALM)
    lab.reload()
    lab.begin_run("tag-1")
    lab.writer("tag-1").frame()
    events.until(status_of("healthy", "worker:tag:1"))


def test_a_broken_configuration_changes_nothing(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    with open(lab.paths.resolved, "w", encoding="ascii") as file:
        file.write("{")
    lab.reload()
    assert lab.snapshot().keys() == {"worker:tag:0"}
    lab.kill()
    lab.start()  # what was stored is all it knows, and is enough
    events = lab.subscribe()
    writer.frame()
    events.until(status_of("healthy", "worker:tag:0"))
    assert "run nomarrctl apply" in lab.said()


def test_it_can_be_killed_again_and_again(lab: Lab) -> None:
    lab.configure(tag=20, health=CALM)
    lab.start()
    writers = []
    for n in range(20):
        lab.begin_run(f"tag-{n}")
        writers.append(lab.writer(f"tag-{n}"))
    for turn in range(10):
        lab.kill()
        for writer in writers:
            writer.frame()
        lab.start()
        if turn % 2:
            lab.snapshot()
    events = lab.subscribe()
    for writer in writers:
        writer.frame(job="last")
    left = {writer.component_id for writer in writers}
    while left:
        worker = events.read()["worker"]
        assert worker["last_crash"] is None
        if worker["status"] == "healthy" and worker["current_job"] == "last":
            left.discard(worker["component"])
            assert worker["seq"] == 11
            assert worker["drops"] == {}


class Inside:
    """A supervisor in this process, for what is not seen from outside."""

    def __init__(self, lab: Lab) -> None:
        self.loop = Loop()
        self.settled: list[tuple[str, str, str]] = []
        self.supervisor = Supervisor(lab.paths, read_applied(lab.paths), self.loop, PipeStore({}))
        setattr(self.supervisor.store_tasks, "settle", self._note)  # noqa: B010 (for mypy)
        self.supervisor.start()
        self.supervisor.watch_pipes()

    def _note(self, end: RunEnd) -> None:
        assert not end.counted
        self.settled.append((end.component_id, end.invocation, end.cause))

    def turn_until(self, what: Callable[[], bool]) -> None:
        timer = self.loop.at(time.monotonic() + PATIENCE_S, self._give_up)
        while not what():
            self.loop.turn()
        timer.cancel()

    def _give_up(self) -> None:
        raise AssertionError("it did not happen in time")

    def worker(self, component_id: str) -> Worker:
        return self.supervisor.workers.by_id[component_id]

    def statuses(self) -> list[str]:
        return [worker.status for worker in self.supervisor.workers]

    def close(self) -> None:
        self.turn_until(lambda: not self.supervisor._actions._queries._busy)
        for worker in self.supervisor.workers:
            self.loop.forget(worker.fd)
            os.close(worker.fd)
        self.supervisor.close()
        self.loop.close()


def test_runs_that_left_are_settled_once(lab: Lab) -> None:
    """All others wait for the controller's report."""
    lab.configure(tag=4, health=CALM)
    first = Inside(lab)
    runs = [lab.begin_run(f"tag-{n}") for n in range(4)]
    writers = [lab.writer(f"tag-{n}") for n in range(4)]
    for n, writer in enumerate(writers):
        writer.frame("stopping" if n == 1 else "healthy", invocation=runs[n])
    first.turn_until(lambda: first.statuses() == ["healthy", "stopping", "healthy", "healthy"])
    names = [writer.component_id for writer in writers]
    for n in range(2):
        writers[n].close()
        lab.end_run(f"tag-{n}")
    first.turn_until(lambda: first.statuses()[:2] == ["crashed", "stopped"])
    first.turn_until(lambda: bool(first.settled))
    assert first.settled == [(names[1], runs[1], "left by itself")]
    first.close()
    for n in (2, 3):
        writers[n].close()
        lab.end_run(f"tag-{n}")  # without a supervisor
    second = Inside(lab)
    second.turn_until(lambda: second.statuses()[2:] == ["crashed", "crashed"])
    assert second.settled == []
    second.close()
    third = Inside(lab)
    assert third.settled == []
    third.close()


@pytest.mark.parametrize("was_running", [True, False])
def test_a_frame_that_is_read_before_its_run_is_known_is_not_lost(
    lab: Lab, was_running: bool
) -> None:
    """The run begins after inotify was asked and before the pipe is read."""
    lab.configure(tag=1, health=CALM)
    inside = Inside(lab)
    worker = inside.worker("worker:tag:0")
    run = ""
    writer = lab.writer("tag-0")
    if was_running:
        run = lab.begin_run("tag-0")
        writer.frame(invocation=run, job="a")
        inside.turn_until(lambda: inside.statuses() == ["healthy"])
        writer.frame(invocation=run, job="b")
        lab.end_run("tag-0")
    new = lab.begin_run("tag-0")
    writer.frame(**({"invocation": new} if was_running else {}), job="c")
    inside.supervisor._read(worker)
    assert (worker.invocation, worker.status, worker.job) == (new, "healthy", "c")
    assert (worker.ended and worker.ended.job, worker.state.late) == (
        "b" if was_running else None,
        0,
    )
    inside.close()


def test_a_kill_that_was_begun_is_remembered(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    run = lab.begin_run("tag-0")
    os.makedirs(os.path.dirname(lab.paths.run_state), exist_ok=True)
    loop = Loop()
    state = RunState(lab.paths.run_state, loop)
    worker = Workers().add(Component("tag", 0), -1)
    worker.begin(run)
    worker.label = "stale"
    state.keep(worker)
    state.close()
    loop.close()
    inside = Inside(lab)
    assert inside.statuses() == ["crashed"]
    lab.end_run("tag-0")
    inside.turn_until(lambda: inside.worker("worker:tag:0").ended is not None)
    ended = inside.worker("worker:tag:0").ended
    assert ended
    assert (ended.invocation, ended.label) == (run, "stale")
    assert inside.settled == []
    inside.close()


@pytest.mark.parametrize("names_its_run", [True, False])
def test_a_farewell_of_an_earlier_run_says_nothing_of_the_present_one(
    lab: Lab, names_its_run: bool
) -> None:
    """A worker that was down is started, stopped and started while the supervisor hangs."""
    lab.configure(tag=1, health=CALM._replace(staleness_interval_s=0.1))
    lab.start()
    os.kill(lab.pid, signal.SIGSTOP)
    writer = lab.writer("tag-0")
    for status in ("stopping", "healthy"):
        run = lab.begin_run("tag-0")
        fields = {"invocation": run} if names_its_run else {}
        writer.frame(**fields)
        writer.frame(status, **fields)
        if status == "stopping":
            lab.end_run("tag-0")
    events = lab.subscribe()
    os.kill(lab.pid, signal.SIGCONT)
    crash = events.until(lambda event: event["type"] == "worker:crash")[-1]
    assert (crash["cause"], crash["invocation"]) == ("stale", run)


def test_frames_of_a_new_run_that_were_read_with_the_old_ones_are_its_own(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    events = lab.subscribe()
    first = lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame(invocation=first, job="a")
    events.until(status_of("healthy"))
    os.kill(lab.pid, signal.SIGSTOP)
    writer.frame(invocation=first, job="b")
    lab.end_run("tag-0")
    second = lab.begin_run("tag-0")
    writer.frame(invocation=second, job="c")
    os.kill(lab.pid, signal.SIGCONT)
    shown = events.until(lambda event: event["worker"]["current_job"] == "c")[-1]["worker"]
    assert (shown["status"], shown["invocation"]) == ("healthy", second)
    answer = lab.live().ask(op="label", component="tag-0", invocation=first)
    assert answer == {"ok": True, "label": "", "job": "b", "bad_line": ""}


@needs_root
def test_a_full_run_does_not_end_it(lab: Lab) -> None:
    lab.configure(tag=3, health=CALM)
    place = os.path.dirname(lab.paths.run_state)
    os.makedirs(place)
    small = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=755", "tmpfs", place]
    subprocess.run(small, check=True)
    try:
        with contextlib.suppress(OSError), open(f"{place}/filler", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        lab.start()
        events = lab.subscribe()
        runs = [lab.begin_run(f"tag-{n}") for n in range(3)]
        for n in range(3):
            lab.writer(f"tag-{n}").frame()
            events.until(status_of("healthy", f"worker:tag:{n}"))
        assert "the run state cannot be written" in lab.said()
        assert lab.said().count("the run state cannot be written") == 1
        os.unlink(f"{place}/filler")
        deadline = time.monotonic() + PATIENCE_S
        while "the run state can be written again" not in lab.said():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lab.kill()
        lab.end_run("tag-0")
        lab.start()
        shown = lab.wait_for_crashes(1)["worker:tag:0"]
        assert (shown["status"], shown["last_crash"]["invocation"]) == ("crashed", runs[0])
        assert lab.kill(signal.SIGTERM) == 0
    finally:
        if lab.child:
            lab.kill()
        subprocess.run(["umount", "-l", place], check=True)
