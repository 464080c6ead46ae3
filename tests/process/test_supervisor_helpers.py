"""The supervisor's helpers: they hold nothing of it, nothing is lost with one, and none is left."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.values import Pool, StoreSettings
from nomarr_systemd.core.health import HealthRules, Sample
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import Owner, key_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims
from nomarr_systemd.ledger.health_history import COLLECTION
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.supervisor import store_process, unit_queries
from nomarr_systemd.supervisor.helper import MAX_MESSAGE, Channel, Helper, close_helpers
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.snapshots import Snapshots
from nomarr_systemd.supervisor.store_child import serve
from nomarr_systemd.supervisor.store_process import StoreProcess
from nomarr_systemd.supervisor.unit_queries import UnitQueries
from nomarr_systemd.systemd import manager
from tests.support.supervision import Lab, make_lab, status_of
from tests.support.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12
CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)
# Like the test of a store that never answers in test_supervisor_jobs.py.
HANGING = """\
import sqlite3, sys, threading
def connect(*args, **options):
    print("the store hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
sqlite3.connect = connect
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        yield lab


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    close_helpers()
    loop.close()


def has_sqlite(pid: int) -> bool:
    try:
        return "sqlite" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def find_store_helper(lab: Lab) -> int:
    """The helper that has opened the store."""

    def look() -> int:
        return next((pid for pid in lab.helpers() if has_sqlite(pid)), 0)

    return wait_for(look, PATIENCE_S, "a helper for the store")


def wait_for_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], PATIENCE_S)[0], "it does not end"
    os.close(pidfd)


def take_job(lab: Lab, store: SqliteStore) -> str:
    """A run that has a job in hand, and which the supervisor knows."""
    queue.add(store, "tag", ["/a"], on_page=lambda *_: None)
    invocation = lab.begin_run("tag-0")
    wait_for(
        lambda: lab.snapshot()["worker:tag:0"]["invocation"] == invocation, PATIENCE_S, "the run"
    )
    owner = Owner("worker:tag:0", invocation, "", read_boot_id())
    assert Claims(store, "tag", owner).take(key_of("tag", "/a"))
    return invocation


def end_a_run(lab: Lab) -> int:
    """A run begins and ends; return the pid of the store's helper that is started for it."""
    lab.begin_run("tag-0")
    lab.subscribe().until(lambda event: bool(event["worker"]["invocation"]))
    lab.end_run("tag-0")
    return find_store_helper(lab)


def report(lab: Lab, invocation: str) -> dict[str, Any]:
    """A death, as the controller reports it."""
    told = {"component": "worker:tag:0", "invocation": invocation, "cause": "killed"}
    death = {**told, "decision": "restart", "blamed": True, "failed": False}
    outcome: dict[str, Any] = lab.live().ask(op="crashed", deaths=[death])["outcomes"][invocation]
    return outcome


def test_what_a_killed_helper_owes_is_settled_by_the_next(lab: Lab) -> None:
    lab.configure(tag=Pool("tag", claim_timeout_s=3600))
    store = SqliteStore(lab.paths.state, "work")
    lab.start()
    invocation = take_job(lab, store)
    system = lab.subscribe("system:*")
    with sqlite3.connect(store.path, isolation_level=None) as locked:
        locked.execute("BEGIN IMMEDIATE")
        lab.end_run("tag-0")
        assert report(lab, invocation) == {"settled": False}
        os.kill(find_store_helper(lab), signal.SIGKILL)
        system.until(lambda event: "the store cannot be written" in event["system"]["errors"])
        locked.execute("ROLLBACK")
    locked.close()
    system.until(lambda event: "the store cannot be written" not in event["system"]["errors"])
    wait_for(lambda: report(lab, invocation)["settled"], PATIENCE_S, "the outcome")
    assert queue.find(store, "tag", "/a")["status"] == "error"
    assert len(queue.find(store, "tag", "/a")["crashes"]) == 1
    assert store.find(CLAIMS) == []
    store.close()
    assert "the process for the store is lost" in lab.said()
    assert "the store of jobs is back" in lab.said()


def test_a_helper_that_hangs_delays_nothing(lab: Lab) -> None:
    lab.configure(tag=2, health=CALM)
    lab.environment["WATCHDOG_USEC"] = "400000"
    lab.start()
    invocation = lab.begin_run("tag-0")
    events = lab.subscribe()
    events.until(lambda event: event["worker"]["invocation"] == invocation)
    lab.end_run("tag-0")
    hung = find_store_helper(lab)
    pidfd = os.pidfd_open(hung)
    os.kill(hung, signal.SIGSTOP)
    assert report(lab, invocation) == {"settled": False}
    lab.begin_run("tag-1")
    lab.writer("tag-1").frame()
    events.until(status_of("healthy", "worker:tag:1"))
    fed = lab.manager.count("WATCHDOG=1")
    lab.manager.wait_for(lambda _: lab.manager.count("WATCHDOG=1") > fed + 2)
    assert lab.helpers().count(hung) == 1
    assert lab.kill(signal.SIGTERM) == 0
    wait_for_end(pidfd)


def test_a_helper_holds_nothing_of_the_supervisor(lab: Lab) -> None:
    lab.configure(tag=3, health=CALM)
    lab.start()
    helper = end_a_run(lab)

    def list_files(pid: int) -> set[str]:
        found = set()
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(entry.path) if int(entry.name) > 2 else "")
            except FileNotFoundError:
                continue
        return found - {""}

    own = list_files(lab.pid)
    assert sum("/health/tag-" in each or "fifo" in each for each in own) >= 3, own
    shared = (own & list_files(helper)) - {"anon_inode:[eventpoll]"}
    assert shared == set()
    assert "anon_inode:[eventpoll]" not in list_files(helper)


def test_at_rest_there_is_one_process_with_one_thread_and_no_sqlite(lab: Lab) -> None:
    """After a run has ended, its jobs are settled, and history was written."""
    lab.configure(tag=1, health=CALM._replace(snapshot_interval_s=10))
    store = SqliteStore(lab.paths.state, "work")
    lab.start()
    invocation = take_job(lab, store)
    lab.end_run("tag-0")
    wait_for(lambda: report(lab, invocation)["settled"], PATIENCE_S, "the outcome")
    wait_for(lambda: store.find(COLLECTION, limit=1), PATIENCE_S, "history")
    store.close()
    wait_for(lambda: not lab.helpers(), PATIENCE_S, "the end of all helpers")  # nor a zombie
    assert not has_sqlite(lab.pid)
    assert len(os.listdir(f"/proc/{lab.pid}/task")) == 1
    assert "lost" not in lab.said()


def test_a_helper_ends_with_its_supervisor(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    pidfd = os.pidfd_open(end_a_run(lab))
    lab.kill()
    wait_for_end(pidfd)


def test_a_question_in_a_lost_helper_is_refused(lab: Lab) -> None:
    place = f"{lab.root}/patched"
    os.mkdir(place)
    with open(f"{place}/sitecustomize.py", "x", encoding="ascii") as file:
        file.write(HANGING)
    lab.environment["PYTHONPATH"] = place
    lab.configure(tag=1)
    lab.start()
    live = lab.live()
    live.send(op="jobs", pool="tag", status="done")
    wait_for(lambda: lab.said().count("the store hangs") >= 2, PATIENCE_S, "both threads")
    for pid in lab.helpers():
        os.kill(pid, signal.SIGKILL)
    answer = live.read()
    assert not answer["ok"]
    assert "retry" in answer["error"]


def test_a_helper_that_does_not_answer_is_replaced(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_process, "PING_S", 0.2)
    process = StoreProcess(loop, lambda channel: serve(channel, "", ""))
    history = Snapshots(process)
    process.warm()
    assert process._helper is not None
    os.kill(process._helper.pid, signal.SIGSTOP)
    sample = Sample("worker:tag:0", time.time_ns() // 1_000_000, "healthy", "", 0, 0, 0, "", b"")
    (tmp_path / "work").mkdir()
    history.offer(StoreSettings(f"sqlite://{tmp_path}"), [sample])
    while history.is_busy():
        loop.turn()
    assert not history.is_failing
    store = SqliteStore(str(tmp_path), "work")
    assert len(store.find(COLLECTION)) == 1
    store.close()


@pytest.mark.parametrize("kills", [1, 2])
def test_systemd_is_asked_again_if_the_helper_is_killed(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    class Deadly:
        def __init__(self, *, user: bool) -> None:
            assert user

        def show_each(self, questions: dict[str, list[str]]) -> dict[str, dict[str, str]]:
            place = tmp_path / "killed"
            with place.open("a") as file:
                file.write("x")
            if len(place.read_text()) <= kills:
                os.kill(os.getpid(), signal.SIGKILL)
            return {unit: dict.fromkeys(names, "0") for unit, names in questions.items()}

        def close(self) -> None:
            pass

    monkeypatch.setattr(manager, "Manager", Deadly)
    monkeypatch.setattr(unit_queries, "LINGER_S", 0.0)
    queries = UnitQueries(loop, user=True)
    answers: list[object] = []
    for number in range(2):
        queries.ask(Component("tag", number).unit, answers.append)
    while len(answers) < 2 or queries._helper is not None:
        loop.turn()
    assert [answer is None for answer in answers] == [kills == 2] * 2
    assert ("killed" in queries.error) == (kills == 2)


@pytest.mark.parametrize(
    "data", [MAX_MESSAGE.to_bytes(4, "big") + b"\0\0\0\1", b"\0\0\0\1\0\0\0\0x"]
)
def test_a_helper_that_sends_no_message_is_killed(loop: Loop, data: bytes) -> None:
    """One without end, which is not kept, and one that is no JSON."""

    def babble(channel: Channel) -> None:
        channel._socket.sendall(data)
        channel.read()

    lost: list[bool] = []
    helper = Helper(loop, babble, lambda *_: None, lambda: lost.append(True))
    while not helper._is_over:
        loop.turn()
    assert lost == [True]
    with pytest.raises(ChildProcessError):
        os.waitpid(helper.pid, 0)


def test_large_messages_pass_whole_and_in_order(loop: Loop) -> None:
    def echo(channel: Channel) -> None:
        while (message := channel.read()) is not None:
            channel.send([len(message[0])], message[0].encode())

    got: list[tuple[list[int], int]] = []
    helper = Helper(
        loop, echo, lambda message, body: got.append((message, len(body))), lambda: None
    )
    sizes = [0, 1, 3_000_000, 7, 1_000_000]
    for size in sizes:
        helper.send(["x" * size])
    while len(got) < len(sizes):
        loop.turn()
    assert got == [([size], size) for size in sizes]
