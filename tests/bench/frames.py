"""A thousand FIFOs, one frame each per round: all that a supervisor does with a frame, beside
reading and splitting alone, with each decoder. In processor time, which a busy machine distorts
less."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from nomarr_systemd.core.frames import Decoder, encode
from nomarr_systemd.core.health import REGISTERED, HealthRules, State, step
from nomarr_systemd.core.typed_frames import TypedDecoder
from tests.bench.timing import report

WORKERS = 1000
ROUNDS = 120
RULES = HealthRules()


class Pipe(NamedTuple):
    reader: int
    writer: int


class Worker:
    """What a frame touches of the supervisor's Worker."""

    __slots__ = ("decoder", "heard_at", "state")

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.state, _ = step(State(), REGISTERED, 0.0, RULES)
        self.heard_at = 0.0


class Bench(NamedTuple):
    pipes: list[Pipe]
    poll: select.epoll
    workers: dict[int, Worker]
    typed: dict[int, Worker]


@contextlib.contextmanager
def make_bench() -> Iterator[Bench]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 4096), max(limit[1], 4096)))
    bench = Bench([], select.epoll(), {}, {})
    with tempfile.TemporaryDirectory() as directory:
        for number in range(WORKERS):
            path = f"{directory}/tag-{number}"
            os.mkfifo(path)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            bench.pipes.append(Pipe(reader, os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
            bench.poll.register(reader, select.EPOLLIN | select.EPOLLET)
            component = f"worker:tag:{number}"
            bench.workers[reader] = Worker(Decoder(component))
            bench.typed[reader] = Worker(TypedDecoder(component))
        yield bench
        bench.poll.close()
        for fd in (fd for pipe in bench.pipes for fd in pipe):
            os.close(fd)


def send(bench: Bench, number: int, job_length: int) -> None:
    """One frame from each worker; a job lasts for ``job_length`` frames."""
    for worker, pipe in enumerate(bench.pipes):
        frame = encode(
            f"worker:tag:{worker}",
            "healthy",
            phase="processing",
            job=f"/music/artist/album/track {(number + worker) // job_length}.flac",
            pid=1000 + worker,
            invocation="0123456789abcdef" * 2,
            seq=number,
            progress_age_s=round(0.1 + (number * 7 + worker) % 90 / 10, 1),
        )
        os.write(pipe.writer, frame)


def read_and_split(bench: Bench) -> None:
    left = WORKERS
    while left:
        for fd, _ in bench.poll.poll():
            os.read(fd, 65536).split(b"\n")
            left -= 1


def supervise(bench: Bench) -> None:
    _supervise(bench, bench.workers)


def supervise_typed(bench: Bench) -> None:
    _supervise(bench, bench.typed)


def _supervise(bench: Bench, workers: Mapping[int, Worker]) -> None:
    now = time.monotonic()
    left = WORKERS
    while left:
        for fd, _ in bench.poll.poll():
            worker = workers[fd]
            for frame in worker.decoder.feed(os.read(fd, 65536)):
                worker.state, _ = step(worker.state, frame, now, RULES)
                worker.heard_at = now
            left -= 1


CONTENDERS: dict[str, Callable[[Bench], None]] = {
    "floor": read_and_split,
    "json": supervise,
    "msgspec": supervise_typed,
}


def measure() -> None:
    with make_bench() as bench:
        for job_length, name in ((10, "a job of 25 s"), (1, "another job in each")):
            taken: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
            for number in range(ROUNDS):
                for contender, run in CONTENDERS.items():  # in turn
                    send(bench, number, job_length)
                    started = time.thread_time()
                    run(bench)
                    taken[contender].append(time.thread_time() - started)
            floor, *ours = ((each, statistics.median(taken[each])) for each in CONTENDERS)
            report(f"reading and splitting, {name}", f"{floor[1] / WORKERS * 1e6:.1f} µs a frame")
            for contender, seconds in ours:
                report(
                    f"  and decoded by {contender}, stepped",
                    f"{seconds / WORKERS * 1e6:.1f} µs, {floor[1] / seconds:.2f}",
                    "bar 0.6" if contender == "msgspec" else "",
                )
        workers = (*bench.workers.values(), *bench.typed.values())
        healthy = sum(worker.state.status == "healthy" for worker in workers)
        drops = sum(sum(worker.decoder.drops.values()) for worker in workers)
        if (healthy, drops) != (len(workers), 0):
            raise SystemExit(f"{healthy} of {len(workers)} healthy, {drops} dropped: no figure")
