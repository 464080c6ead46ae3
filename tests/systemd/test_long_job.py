"""A real job of a minute, and what the supervisor goes through meanwhile: a store that is locked or
away, and floods. The worker with the long job does not notice any of it.

The other tests of this module take their time from that minute.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.live.client import ask
from tests.support.crashes import account_of, wait_for_run
from tests.support.lab import Lab
from tests.support.troubled_workers import FLOODER, ONE_SIDED, TAGGER
from tests.support.watch import Watch

SUPERVISOR = "nomarr-supervisor.service"
JOB_S = 60
LONG = """\
[health]
frame_interval_s = 1
snapshot_interval_s = 0.2

[pool.long]
entrypoint = "tagger:Tagger"

[pool.long.unit]
Environment = ["PYTHONPATH={directory}", "PLACE={directory}"]

[pool.flood]
command = ["{flooder}", "{directory}/flooded"]
watchdog_s = 3600
"""


def install(lab: Lab, config: str) -> None:
    Path(lab.directory, "tagger.py").write_text(TAGGER)
    flooder = lab.write_program("flooder", FLOODER)
    one_sided = lab.write_program("one-sided", ONE_SIDED)
    for name, value in (
        ("directory", lab.directory), ("flooder", flooder), ("one_sided", one_sided)
    ):  # fmt: skip
        config = config.replace(f"{{{name}}}", value)
    lab.install(config)
    lab.systemctl("start", "nomarr-controller.socket")


def give_job(lab: Lab, name: str, text: str) -> None:
    path = Path(lab.directory, f"{name}.new")
    path.write_text(text)
    path.rename(path.with_suffix(".job"))


class Shared:
    """One lab for the module; in it the long job runs."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        install(lab, LONG)
        lab.systemctl("start", SUPERVISOR)
        lab.start("long-0", "flood-0")
        self.frames = Watch(lab.paths.live, "worker:long:0:frames", "worker:long:0:status")
        self.run = lab.get("long-0", "InvocationID")
        self.supervisor = lab.main_pid(SUPERVISOR)
        lab.wait_for(lambda: self.statuses() == {"healthy"}, what="health")
        give_job(lab, "a", f"sleep {JOB_S}")

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """The supervisor answers, whatever goes on."""
        answer = ask(self.lab.paths.live, {"op": "snapshot"}, timeout_s=20)
        return {worker["component"]: worker for worker in answer["workers"]}

    def statuses(self) -> set[str]:
        return {worker["status"] for worker in self.snapshot().values()}

    def check(self) -> None:
        """Nobody died, and everybody is well."""
        assert self.statuses() == {"healthy"}
        assert [worker["last_crash"] for worker in self.snapshot().values()] == [None, None]
        assert self.lab.get("long-0", "InvocationID") == self.run
        assert self.lab.main_pid(SUPERVISOR) == self.supervisor, "it missed its watchdog"

    def said(self, text: str) -> bool:
        return text in self.lab.journal("--output=cat", f"_PID={self.supervisor}")


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        shared = Shared(lab)
        yield shared
        shared.frames.close()
    finally:
        lab.end()


def test_a_locked_history_store_holds_up_nothing(shared: Shared) -> None:
    """Its writer waits for the lock and gives up; the loop does neither."""
    path = Path(shared.lab.paths.state, "work", "work.db")
    shared.lab.wait_for(lambda: path.exists() and samples(path), what="history is written")
    with sqlite3.connect(path, isolation_level=None, timeout=20) as other:
        other.execute("BEGIN EXCLUSIVE")
        answers = 0

        def gives_up() -> bool:
            nonlocal answers
            shared.check()
            answers += 1
            return shared.said("a history snapshot could not be written")

        shared.lab.wait_for(gives_up, what="a snapshot is given up")
        other.execute("ROLLBACK")
    other.close()
    print(f"{answers} snapshots of the live socket while the store was locked")
    assert answers > 1
    shared.lab.wait_for(lambda: shared.said("the history store is back"), what="it is back")
    shared.check()


def test_a_history_store_that_is_away_is_said_and_borne(lab: Lab) -> None:
    install(lab, LONG)
    work, aside = Path(lab.paths.state, "work"), Path(lab.paths.state, "aside")
    work.rename(aside)
    work.touch()
    lab.systemctl("start", SUPERVISOR)
    watch = Watch(lab.paths.live, "system:health", "worker:flood:0:status")
    lab.start("flood-0")
    away = "'the store cannot be written'"
    lab.wait_for(lambda: away in str(watch.events), what="it is said")
    lab.wait_for(lambda: "'status': 'healthy'" in str(watch.events), what="health")
    work.unlink()
    aside.rename(work)
    lab.wait_for(lambda: away not in str(watch.last("system")), what="it is back")
    watch.close()
    assert samples(work / "work.db")
    assert lab.get(SUPERVISOR, "NRestarts") == "0"


def test_floods_of_anything_are_borne(shared: Shared) -> None:
    lab = shared.lab
    flooded = Path(lab.directory, "flooded")
    before_kb = peak_kb(shared.supervisor)
    os.kill(lab.main_pid("flood-0"), signal.SIGUSR1)

    def is_over() -> bool:
        assert shared.snapshot()["worker:long:0"]["status"] == "healthy"
        return flooded.exists()

    lab.wait_for(is_over, what="the floods are over")
    report = json.loads(flooded.read_text())
    grown_kb = peak_kb(shared.supervisor) - before_kb
    rate = report["bytes"] / report["seconds"] / 1e6
    print(
        f"{report['bytes'] / 1e6:.0f} MB at {rate:.0f} MB/s; the supervisor grew by {grown_kb} kB"
    )
    assert grown_kb < 20_000
    drops = shared.snapshot()["worker:flood:0"]["drops"]
    assert drops.keys() >= {"length", "json", "prefix", "component"}
    shared.check()


def test_a_start_that_takes_longer_than_a_silent_one_may(lab: Lab) -> None:
    """Twice as long, and more; in earnest it is two minutes against one."""
    install(
        lab,
        "[health]\nframe_interval_s = 0.2\nstartup_timeout_s = 5\nstall_timeout_s = 4\n"
        '[pool.tag]\nentrypoint = "tagger:Tagger"\n[pool.tag.unit]\n'
        'Environment = ["PYTHONPATH={directory}", "PLACE={directory}", "LOAD_S=12"]\n',
    )
    lab.systemctl("start", SUPERVISOR)
    frames = Watch(lab.paths.live, "worker:tag:0:frames")
    lab.start("tag-0")  # returns when it is ready: one run, and no death
    lab.wait_for(lambda: '"healthy"' in str(frames.events), what="health")
    said = frames.close()
    loading = [frame["seq"] for frame in said if frame["phase"] == "loading_models"]
    assert len(loading) > 5
    assert {frame["status"] for frame in said[: len(loading)]} == {"pending"}
    assert account_of(lab).restart_count == 0
    assert "is dead" not in lab.journal("--output=cat")


def test_a_supervisor_that_stops_lets_the_job_be_finished(lab: Lab) -> None:
    """Then the worker leaves with 75, is held and not counted, and comes back with it."""
    install(
        lab,
        "[health]\nframe_interval_s = 0.2\n"
        '[pool.tag]\nentrypoint = "tagger:Tagger"\n[pool.tag.unit]\n'
        'Environment = ["PYTHONPATH={directory}", "PLACE={directory}"]\n',
    )
    lab.systemctl("start", SUPERVISOR)
    lab.start("tag-0")
    lab.systemctl("start", "nomarr-reconcile.service")
    died = lab.get("tag-0", "InvocationID")
    go = Path(lab.directory, "go")
    give_job(lab, "a", f"until {go}")
    lab.wait_for(lambda: "a.job" in lab.get("tag-0", "StatusText"), what="the job is in hand")
    lab.systemctl("stop", SUPERVISOR)
    lab.wait_for(lambda: "supervisor gone" in lab.get("tag-0", "StatusText"), what="it is missed")
    assert lab.get("tag-0", "ActiveState") == "active"
    assert not Path(lab.directory, "a.done").exists()
    go.touch()
    record = lab.wait_for(lambda: account_of(lab).find(died), what="a record")
    assert record is not None
    assert (record.action, record.code) == ("hold", 75)
    assert Path(lab.directory, "a.done").exists()
    lab.systemctl("start", SUPERVISOR)
    wait_for_run(lab, died)
    assert account_of(lab).restart_count == 0


def test_the_two_witnesses_disagree(lab: Lab) -> None:
    """systemd is fed by both: one has never framed, the other does so no more."""
    install(
        lab,
        "[health]\nframe_interval_s = 0.1\nstaleness_interval_s = 0.5\nstartup_timeout_s = 600\n"
        '[pool.blind]\ncommand = ["{one_sided}", "0"]\nwatchdog_s = 600\n'
        '[pool.wedge]\ncommand = ["{one_sided}", "3"]\nwatchdog_s = 600\n',
    )
    lab.systemctl("start", SUPERVISOR)
    frames = Watch(lab.paths.live, "worker:*:status")
    lab.start("blind-0", "wedge-0")
    told = {"worker:blind:0": "supervisor-blind", "worker:wedge:0": "pipe-wedged"}

    def named() -> bool:
        shown = [event["worker"] for event in tuple(frames.events) if "worker" in event]
        found = {(worker["component"], worker["disagreement"]) for worker in shown}
        return found >= set(told.items())

    lab.wait_for(named, what="both disagreements")
    frames.close()
    said = lab.journal("--output=cat")
    for component, name in told.items():
        assert f"systemd and the pipe disagree: {name} component={component}" in said
    # It explains, and decides nothing: silence is what ends a worker.
    record = lab.wait_for(lambda: account_of(lab, "wedge-0").records, what="a record")[0]
    assert (record.kind, record.code) == ("stale", -2)
    assert account_of(lab, "blind-0").records == []


def test_the_long_job_ends_as_if_nothing_had_been(shared: Shared) -> None:
    lab = shared.lab
    done = Path(lab.directory, "a.done")
    lab.wait_for(done.exists, timeout_s=JOB_S + 30, what="the job is done")
    assert float(done.read_text()) >= JOB_S
    shared.check()
    lab.stop("long-0")
    left = json.loads(Path(lab.directory, "left").read_text())
    assert left == {"threads": ["MainThread"], "pipe open": False}
    lab.wait_for(lambda: shared.snapshot()["worker:long:0"]["status"] == "stopped")

    said = shared.frames.close()
    numbers = [frame["seq"] for frame in said]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    working = [frame for frame in said if str(frame.get("job")).endswith("/a.job")]
    assert len(working) >= JOB_S / 3, "frames stood still"
    assert {(frame["status"], frame["phase"]) for frame in working} == {("healthy", "processing")}
    assert working[-1]["progress_age_s"] > JOB_S - 10
    assert said[-1]["status"] == "stopping"
    shown = [event["worker"]["status"] for event in shared.frames.events if "worker" in event]
    assert set(shown) <= {"starting", "healthy", "stopping", "stopped"}
    assert "HEALTH|" not in lab.journal("--output=cat", f"_SYSTEMD_INVOCATION_ID={shared.run}")
    assert "HEALTH|" not in lab.journal("--output=cat")
    assert account_of(lab, "long-0").records == []


def samples(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        try:
            count: int = db.execute("SELECT count(*) FROM health_history").fetchone()[0]
        except sqlite3.Error:
            return 0
    return count


def peak_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
