"""The supervisor's parts on their own: loop, memory, black box, topics, watching a directory."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.health import REGISTERED, HealthRules, Transition
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.inotify import DirectoryWatch
from nomarr_systemd.ledger.health_history import COLLECTION, Sample, append, prune
from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.supervisor.frame_ring import CAPACITY, BlackBox
from nomarr_systemd.supervisor.log import WARNING, Limited, log
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.run_state import RECORD, Memory
from nomarr_systemd.supervisor.workers import Registry, Worker


def test_deadlines_come_after_input_and_in_order() -> None:
    loop = Loop()
    read, write = os.pipe()
    happened: list[str] = []
    try:
        loop.watch(read, select.EPOLLIN, lambda _: happened.append(os.read(read, 9).decode()))
        os.write(write, b"input")
        past = time.monotonic() - 1
        loop.at(past + 0.5, lambda: happened.append("later"))
        loop.at(past, lambda: happened.append("sooner"))
        loop.at(past, lambda: happened.append("never")).cancel()
        loop.soon(lambda: happened.append("soon"))
        loop.turn()
        assert happened == ["input", "soon", "sooner", "later"]
        loop.forget(read)
    finally:
        loop.close()
        os.close(read)
        os.close(write)


def test_another_thread_can_wake_the_loop() -> None:
    loop = Loop()
    thread = threading.Thread(target=lambda: loop.post(loop.stop))
    thread.start()
    loop.run()
    thread.join()
    loop.close()


def test_frames_do_not_touch_the_heap() -> None:
    """One armed deadline per worker, however many frames come."""
    loop = Loop()
    changes: list[Transition] = []
    registry = Registry(
        loop,
        HealthRules(),
        on_change=lambda _worker, transitions: changes.extend(transitions),
        before_tick=lambda _worker: None,
    )
    worker: Worker = registry.add(Component("tag", 0), -1)
    registry.step(worker, REGISTERED)
    for n in range(1000):
        loop.now += 0.001
        registry.feed(worker, encode("worker:tag:0", "healthy", seq=n))
    assert len(loop._heap) == 2  # the start's, and the earlier one that took its place
    assert [change.new for change in changes] == ["pending", "healthy"]
    assert worker.frames == 1000
    assert registry.running() == {}
    loop.close()


def test_memory_lasts(tmp_path: Path) -> None:
    path = str(tmp_path / "memory")
    memory = Memory(path)
    memory.keep("worker:tag:0", {"invocation": "a" * 32})
    memory.keep("worker:tag:1", {"invocation": "b" * 32})
    memory.keep("worker:tag:0", {"invocation": "c" * 32, "long": "x" * 5000})
    memory.close()
    memory = Memory(path)
    assert memory.recall("worker:tag:0") == {"id": "worker:tag:0", "invocation": "c" * 32}
    assert memory.recall("worker:tag:1")["invocation"] == "b" * 32
    memory.forget("worker:tag:0")
    memory.keep("worker:tag:2", {"failed": True})
    assert os.path.getsize(path) == 2 * RECORD
    memory.close()
    memory = Memory(path)
    assert sorted(memory.remembered()) == ["worker:tag:1", "worker:tag:2"]
    memory.close()


@pytest.mark.parametrize("content", [b"\xff" * 5000, b"{" * 3000, b"[]\n", b'{"id": 7}', b""])
def test_a_memory_that_makes_no_sense_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    memory = Memory(str(path))
    assert memory.remembered() == []
    memory.keep("worker:tag:0", {"failed": True})
    memory.close()
    memory = Memory(str(path))
    assert memory.recall("worker:tag:0")["failed"] is True
    memory.close()


@pytest.mark.parametrize("step", [1, 7, 20, 33, 450])
def test_the_black_box_forgets_the_oldest(step: int) -> None:
    box = BlackBox()
    lines = [b"%d" % n for n in range(1000)]
    for start in range(0, 1000, step):
        box.add(lines[start : start + step])
        seen = lines[: start + step]
        assert box.lines() == seen[-CAPACITY:]


def test_patterns() -> None:
    patterns = Patterns(["worker:tag:*:status", "system:health"])
    assert patterns.match("worker:tag:0:status")
    assert patterns.match("worker:tag:0:status")  # also by memory
    assert not patterns.match("worker:library:0:status")
    assert not patterns.match("worker:tag:0:frames")
    assert patterns.match("system:health")
    assert Patterns(["*"]).match("worker:tag:0:status")
    for bad in (
        None,
        "worker:*",
        [],
        [7],
        [""],
        ["a" * 101],
        ["ä"],
        ["a.b"],
        ["*" * 4],
        ["x"] * 65,
    ):
        with pytest.raises(BadName):
            Patterns(bad)


def test_names_that_come_and_go(tmp_path: Path) -> None:
    watch = DirectoryWatch(str(tmp_path))
    assert watch.read() == set()
    (tmp_path / "a").symlink_to("x")
    (tmp_path / "b").symlink_to("x")
    (tmp_path / "b").rename(tmp_path / "c")
    (tmp_path / "a").unlink()
    assert watch.read() == {"a", "b", "c"}
    assert watch.read() == set()
    (tmp_path / "c").unlink()
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        watch.read()
    watch.close()
    with pytest.raises(OSError, match="No such file"):
        DirectoryWatch(str(tmp_path))


def test_too_many_changes_to_tell(tmp_path: Path) -> None:
    with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
        most = int(file.read())
    watch = DirectoryWatch(str(tmp_path))
    for n in range(most // 2 + 2):
        path = tmp_path / f"{n % 10}"
        path.symlink_to("x")
        path.unlink()
    assert watch.read() is None
    assert watch.read() == set()
    watch.close()


def test_log_lines_are_limited_and_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    limited = Limited(burst=3, every_s=3600)
    for n in range(10):
        limited.log(WARNING, "too much", n=n)
    log(WARNING, "a\nb\x1b", component="worker:tag:0", error="c\nd", empty="")
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "<4>too much n=0",
        "<4>too much n=1",
        "<4>too much n=2",
        '<4>a\\nb\\x1b component=worker:tag:0 error=c\\nd empty=""',
    ]


def test_history_is_pruned(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path), "work")
    day_ms = 86_400_000
    samples = [
        Sample("worker:tag:0", day * day_ms, "healthy", "a" * 32, 0, 0, 0, "", b"")
        for day in range(10)
    ]
    append(store, samples)
    assert prune(store, 9 * day_ms, keep_days=3) == 6
    left = store.find(COLLECTION, order="wall_ms")
    assert [doc["wall_ms"] // day_ms for doc in left] == [6, 7, 8, 9]
    store.close()
