"""The supervisor's parts on their own: loop, run state, frame ring, log, topics, inotify."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.inotify import DirectoryWatch
from nomarr_systemd.host.log import WARNING, RateLimit, log
from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.supervisor.frame_ring import CAPACITY, MAX_PACKED, FrameRing
from nomarr_systemd.supervisor.loop import FEW, Loop
from nomarr_systemd.supervisor.run_state import RECORD, RunState
from nomarr_systemd.supervisor.run_state import encode as encode_record
from nomarr_systemd.supervisor.workers import Deadlines, Workers
from tests.support.waiting import PATIENCE_S


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


@contextlib.contextmanager
def watched_gently(count: int) -> Iterator[tuple[Loop, list[int], list[list[int]]]]:
    """A loop with pipes, their writing ends, and which of them were read in each turn so far."""
    loop = Loop()
    turns: list[list[int]] = [[]]
    ends = [os.pipe2(os.O_NONBLOCK) for _ in range(count)]

    def read(number: int, _events: int) -> None:
        turns[-1].append(number)
        if b"much" in os.read(ends[number][0], 99):
            loop.hurry()

    try:
        for number, (reader, _) in enumerate(ends):
            loop.watch_gently(reader, select.EPOLLIN | select.EPOLLET, partial(read, number))
        yield loop, [writer for _, writer in ends], turns
    finally:
        for reader, writer in ends:
            loop.forget(reader)
            os.close(reader)
            os.close(writer)
        loop.close()


def test_many_pipes_are_read_together_and_few_at_once() -> None:
    with watched_gently(FEW + 1) as (loop, writers, turns):

        def turn() -> list[int]:
            turns.append([])
            loop.turn()
            return turns[-1]

        os.write(writers[0], b"x")
        assert turn() == [0], "the first is read at once"
        os.write(writers[1], b"x")
        assert turn() == [], "the next one waits for others"
        os.write(writers[2], b"x")
        os.write(writers[3], b"much")
        assert sorted(turn()) == [1, 2, 3], "one wakeup for all of them"
        os.write(writers[4], b"much")
        assert turn() == [4], "who writes much is not kept waiting"
        os.write(writers[4], b"x")
        assert turn() == [4]
    with watched_gently(FEW) as (loop, writers, turns):
        for number, writer in enumerate(writers):
            os.write(writer, b"x")
            loop.turn()
            assert turns[-1][-1] == number


def test_what_has_the_same_interval_shares_a_turn() -> None:
    loop = Loop()
    called: list[tuple[int, float]] = []

    def again(interval_s: float) -> None:
        called.append((loop.turns, interval_s))
        loop.at_next(interval_s, lambda: again(interval_s))

    for interval_s in (0.05, 0.1):
        again(interval_s)
    while len(called) < 14:
        loop.turn()
    long = [turn for turn, interval_s in called[2:] if interval_s == 0.1]
    assert set(long) <= {turn for turn, interval_s in called[2:] if interval_s == 0.05}
    assert len(long) >= 3
    loop.close()


def test_frames_do_not_touch_the_heap() -> None:
    """One armed deadline per worker, however many frames come."""
    loop = Loop()
    deadlines = Deadlines(loop, lambda _worker: None)
    worker = Workers().add(Component("tag", 0), -1)
    changes = [*worker.register(loop.now)]
    deadlines.arm(worker)
    for n in range(1000):
        loop.now += 0.001
        chunk = encode("worker:tag:0", "healthy", seq=n)
        changes += worker.take_all(worker.decoder.feed(chunk), loop.now)
        deadlines.arm(worker)
    assert len(loop._heap) == 2  # the start's, and the earlier one that took its place
    assert [change.new for change in changes] == ["pending", "healthy"]
    assert worker.frames == 1000
    loop.close()


def test_a_late_frame_of_a_dead_worker_is_no_sign_of_life() -> None:
    worker = Workers().add(Component("tag", 0), -1)
    worker.begin("a" * 32)
    worker.register(1.0)
    worker.tick(100.0)
    assert worker.state.status == "dead"
    worker.take(worker.decoder.feed(encode("worker:tag:0", "healthy")), 101.0)
    assert (worker.state.status, worker.state.late, worker.heard_at) == ("dead", 1, 1.0)


def test_frames_of_another_run_do_not_step_the_machine() -> None:
    worker = Workers().add(Component("tag", 0), -1)
    worker.begin("a" * 32)
    worker.register(1.0)

    def feed(status: str, invocation: str | None) -> list[str]:
        chunk = encode("worker:tag:0", status, invocation=invocation)
        frames = worker.decoder.feed(chunk)
        assert len(frames) == 1
        return [each.new for each in worker.take_all(frames, 2.0)]

    assert feed("healthy", "b" * 32) == []
    assert feed("stopping", "b" * 32) == []
    assert (worker.state.late, worker.frames, worker.line, worker.heard_at) == (2, 0, b"", 1.0)
    assert not worker.state.stopping
    assert len(worker.ring.frames()) == 2
    assert feed("healthy", "a" * 32) == ["healthy"]
    assert feed("unhealthy", None) == ["unhealthy"]
    assert worker.frames == 2


def make_state(path: str, loop: Loop, **workers: str) -> RunState:
    """A run state that has these workers, by number, in these invocations."""
    state = RunState(path, loop)
    for name, invocation in workers.items():
        worker = Workers().add(Component("tag", int(name[1:])), -1)
        worker.begin(invocation)
        state.keep(worker)
    return state


def test_the_run_state_lasts(tmp_path: Path) -> None:
    loop = Loop()
    path = str(tmp_path / "memory")
    make_state(path, loop, w0="a" * 32, w1="b" * 32).close()
    make_state(path, loop, w0="c" * 32).close()
    state = RunState(path, loop)
    assert state.recall("worker:tag:0")["invocation"] == "c" * 32
    assert state.recall("worker:tag:1")["invocation"] == "b" * 32
    state.forget("worker:tag:0")
    state.close()
    make_state(path, loop, w2="d" * 32).close()
    assert os.path.getsize(path) == 2 * RECORD
    state = RunState(path, loop)
    assert sorted(state.component_ids()) == ["worker:tag:1", "worker:tag:2"]
    state.close()
    loop.close()


def test_a_record_that_is_too_long_loses_its_longest_value() -> None:
    record = encode_record("worker:tag:0", {"invocation": "c" * 32, "long": "x" * 5000})
    assert len(record) == RECORD
    assert json.loads(record) == {"id": "worker:tag:0", "invocation": "c" * 32}


@pytest.mark.parametrize("content", [b"\xff" * 5000, b"{" * 3000, b"[]\n", b'{"id": 7}', b""])
def test_a_run_state_that_cannot_be_parsed_is_skipped(tmp_path: Path, content: bytes) -> None:
    loop = Loop()
    path = tmp_path / "memory"
    path.write_bytes(content)
    state = make_state(str(path), loop)
    assert state.component_ids() == []
    state.close()
    make_state(str(path), loop, w0="a" * 32).close()
    state = RunState(str(path), loop)
    assert state.recall("worker:tag:0")["invocation"] == "a" * 32
    state.close()
    loop.close()


def test_a_run_state_that_cannot_be_written_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nomarr_systemd.supervisor.run_state.RETRY_S", 0.02)
    loop = Loop()
    path = tmp_path / "memory"
    path.mkdir()  # in the file's place
    state = make_state(str(path), loop, w0="a" * 32, w1="b" * 32)
    said = capfd.readouterr().err
    assert said.count("the run state cannot be written") == 1
    assert f"path={path}" in said
    loop.turn()
    path.rmdir()
    while state._unwritten:
        loop.turn()
    assert "can be written again records=2" in capfd.readouterr().err
    state.close()
    state = RunState(str(path), loop)
    assert sorted(state.component_ids()) == ["worker:tag:0", "worker:tag:1"]
    state.close()
    loop.close()


@pytest.mark.parametrize("step", [1, 7, 20, 33, 450])
def test_the_ring_forgets_the_oldest(step: int) -> None:
    ring = FrameRing()
    lines = [b"%d" % n for n in range(1000)]
    for start in range(0, 1000, step):
        ring.add(lines[start : start + step], start, "ab" * 16)
        seen = lines[: start + step]
        assert [each.line for each in ring.frames()] == seen[-CAPACITY:]


def test_the_ring_keeps_fewer_frames_that_cannot_be_compressed() -> None:
    ring = FrameRing()
    lines = [base64.b64encode(random.Random(n).randbytes(3000)) for n in range(CAPACITY)]
    for line in lines:
        ring.add([line], 1, "ab" * 16)
    kept = [each.line for each in ring.frames()]
    assert kept == lines[-len(kept) :]
    assert 0 < sum(map(len, kept)) < 3 * MAX_PACKED


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


def test_log_lines_are_limited_and_harmless(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    limited = RateLimit(burst=3, every_s=3600)
    for n in range(10):
        limited.log(WARNING, "too much", n=n)
    log(WARNING, "a\nb\x1b", component="worker:tag:0", error="c\nd", empty="")
    monkeypatch.delenv("JOURNAL_STREAM")
    log(WARNING, "for a person", text="a b")
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "<4>too much n=0",
        "<4>too much n=1",
        "<4>too much n=2",
        "<4>a\\nb\\x1b component=worker:tag:0 error=c\\nd",
        'for a person text="a b"',
    ]


def test_a_log_that_nobody_reads_does_not_block() -> None:
    """As when journald is stopped: its socket takes no more, and the program goes on."""
    code = """
from nomarr_systemd.host import log as log_module
from nomarr_systemd.host.log import WARNING, flush, log
for n in range(5000):
    log(WARNING, "x" * 400, n=n)
print("done", flush=True)
input()
while log_module._output._kept:
    flush()
log(WARNING, "back")
while log_module._output._kept:
    flush()
"""
    ours, theirs = socket.socketpair()
    with (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=theirs.fileno(),
        ) as child,
        ours,
    ):
        assert child.stdin
        assert child.stdout
        theirs.close()
        assert child.stdout.readline() == b"done\n"
        ours.setblocking(False)
        read = b""
        with contextlib.suppress(BlockingIOError):
            while piece := ours.recv(1 << 20):
                read += piece
        at_once = read.count(b"\n")
        assert 10 < at_once < 4000
        ours.settimeout(PATIENCE_S)
        child.stdin.write(b"\n")
        child.stdin.flush()
        while piece := ours.recv(1 << 20):  # until it ends
            read += piece
    *lines, last = read.decode().splitlines()
    written = [int(line.rpartition("n=")[2]) for line in lines]
    assert len(written) == at_once + 1000, "so many lines are kept"
    assert written == list(range(len(written))), "in order, and none of them is lost"
    assert last == f"back lines_dropped={5000 - len(written)}"
