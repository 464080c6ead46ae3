"""Many workers, floods and hostile lines: nobody else suffers, and memory stays bounded."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import threading
import time
from collections.abc import Iterator

import pytest

from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.health import HealthRules
from tests.support.supervision import Lab, make_lab, status_of
from tests.support.waiting import PATIENCE_S, wait_for

CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        yield lab


class Flood:
    """Writes as fast as the pipe takes it, until told to stop."""

    def __init__(self, path: str, lines: bytes) -> None:
        self.written = 0
        self._lines = lines
        self._stop = threading.Event()
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while not self._stop.is_set():
            if poll.poll(1000):  # in bits: should nobody read any more, it can still be stopped
                with contextlib.suppress(BlockingIOError):
                    self.written += os.write(self._fd, self._lines)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._fd)


HOSTILE = {
    "frames": encode("worker:tag:0", "healthy", job="a" * 100, seq=1) * 20,
    "changing frames": b"".join(
        encode("worker:tag:0", word, seq=n, own=n)
        for n, word in enumerate(["healthy", "unhealthy", "recovering", "pending"] * 8)
    ),
    "noise": b"\xff\x00nonsense\n" * 300,
    "no line ever": b"x" * 4096,
    "deep": (b"HEALTH|" + b"[" * 1000 + b"\n") * 4,
    "foreign": encode("worker:tag:1", "healthy", job="b" * 1000) * 3,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_flood_of_one_does_not_starve_another(lab: Lab, kind: str) -> None:
    lab.configure(tag=2, health=HealthRules())
    lab.start()
    for n in range(2):
        lab.begin_run(f"tag-{n}")
    events = lab.subscribe("worker:tag:1:status")
    writer = lab.writer("tag-1")
    writer.frame()
    events.until(status_of("healthy"))
    before = lab.rss_kb()
    started = time.monotonic()
    flood = Flood(f"{lab.paths.health}/tag-0", HOSTILE[kind])
    slowest = 0.0
    try:
        n = 0
        deadline = started + PATIENCE_S
        while flood.written < 10_000_000 or n < 100:
            assert time.monotonic() < deadline, f"only {flood.written} bytes were taken"
            n += 1
            sent = time.monotonic()
            writer.frame(job=f"{n}")
            events.until(lambda event: event["worker"]["current_job"] == f"{n}")  # noqa: B023
            slowest = max(slowest, time.monotonic() - sent)
    finally:
        flood.stop()
    rate = flood.written / (time.monotonic() - started) / 1e6
    grown = lab.rss_kb() - before
    print(
        f"{kind}: {rate:.0f} MB/s; the other's slowest frame {slowest * 1000:.0f} ms; +{grown} kB"
    )
    assert slowest < 5, "a frame of another took longer than the staleness interval"
    assert grown < 20_000
    shown = lab.snapshot()
    assert shown["worker:tag:1"]["status"] == "healthy"
    if kind in ("noise", "no line ever", "deep", "foreign"):
        counted = shown["worker:tag:0"]["drops"]
        assert sum(counted.values()) > 0
        assert len(lab.said()) < 100_000, "drops were logged without a limit"


def test_hostile_lines_are_counted_by_kind(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    events = lab.subscribe()
    writer = lab.writer("tag-0")
    for line in (
        b"hello",
        b"HEALTH|{",
        b"HEALTH|\xff",
        b'HEALTH|{"component_id":"worker:tag:1","status":"healthy"}',
        b'HEALTH|{"component_id":"worker:tag:0","status":"dead"}',
        b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","seq":"x"}',
        b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","progress_age_s":NaN}',
    ):
        writer.raw(line + b"\n")
    writer.raw(b"x" * 4096)
    writer.raw(b"x" * 4000 + b"\n")
    writer.frame()
    shown = events.until(status_of("healthy"))[-1]["worker"]
    kinds = {"prefix": 1, "json": 2, "encoding": 1, "component": 1, "status": 1, "field": 1}
    assert shown["drops"] == {**kinds, "length": 1}
    assert "component=worker:tag:0" in lab.said()


def test_two_thousand_workers(lab: Lab) -> None:
    """All healthy, and again after a kill; prints what it weighs."""
    count = 2000
    need = 3 * count + 1000  # the writers' ends, the store's, and what it hands over
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < need:
        pytest.skip(f"needs {need} open files, and {allowed} are allowed: raise ulimit -Hn")
    lab.configure(tag=count, health=CALM._replace(snapshot_interval_s=3600))
    started = time.monotonic()
    lab.start()
    ready_s = time.monotonic() - started
    empty_kb = lab.rss_kb()
    writers = []
    for n in range(count):
        lab.begin_run(f"tag-{n}")
        writers.append(lab.writer(f"tag-{n}"))
    _see_all_healthy(lab, writers)
    print(f"2,000 workers: ready in {ready_s:.2f} s, {empty_kb} kB, {lab.rss_kb()} kB healthy")
    lab.kill()
    for writer in writers:
        writer.frame()
    lab.start()
    _see_all_healthy(lab, writers)
    # So many pipes are read together, and the second frame of one may come after the first of all.
    wait_for(
        lambda: {worker["seq"] for worker in lab.snapshot().values()} == {3}, PATIENCE_S, "frames"
    )
    for turn in range(11):
        for writer in writers:
            writer.raw(
                b"".join(
                    encode(writer.component_id, "healthy", job=f"/music/{n}.flac", seq=n)
                    for n in range(turn * 20, turn * 20 + 20)
                )
            )
        lab.snapshot()
    print(f"2,000 workers with full black boxes: {lab.rss_kb()} kB")
    assert lab.rss_kb() < 60_000


def _see_all_healthy(lab: Lab, writers: list) -> None:  # type: ignore[type-arg]
    events = lab.subscribe()
    for writer in writers:
        writer.frame()
    left = {writer.component_id for writer in writers}
    deadline = time.monotonic() + PATIENCE_S
    while left:
        assert time.monotonic() < deadline
        event = events.read()
        if event["type"] == "lost":
            shown = lab.snapshot()
            left = {name for name in left if shown[name]["status"] != "healthy"}
        elif event["worker"]["status"] == "healthy":
            left.discard(event["worker"]["component"])
    events.close()
