"""``nomarrctl demo``: real processes crash and hang, real files remember; every claim is checked.

It needs no systemd and no root, and leaves nothing behind. Where a step would wait out a backoff,
the ledger's clock is moved instead: time is an argument of everything that decides.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

import nomarr_systemd
from nomarr_systemd.core.errors import NomarrError, StoreUnavailable
from nomarr_systemd.core.exits import Exit, classify
from nomarr_systemd.core.frames import Decoder
from nomarr_systemd.core.health import REGISTERED, TICK, State, deadline, step
from nomarr_systemd.core.model import Failure, HealthRules, Moment, Rules
from nomarr_systemd.core.policy import decide_blind
from nomarr_systemd.host import clock
from nomarr_systemd.ledger import Ledger
from nomarr_systemd.spool import Spool, Spooled
from nomarr_systemd.store.opening import open_store

RULES = Rules(backoff_jitter=0)
QUICK = HealthRules(staleness_interval_s=0.3)

CRASHER = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.kill(os.getpid(), signal.SIGSEGV)
"""
FRAMER = """
import os, sys, time
from nomarr_systemd.core.frames import encode
pipe = os.open(sys.argv[1], os.O_WRONLY)
seq = 0
while True:
    seq += 1
    os.write(pipe, encode("worker:tag:1", "healthy", phase="processing", job="song.flac", seq=seq))
    time.sleep(0.05)
"""
BOOKER = """
import os, signal, sys
from nomarr_systemd.core.model import Failure, Rules
from nomarr_systemd.ledger import Ledger
from nomarr_systemd.store.opening import open_store
store = open_store(sys.argv[1], "policy")
Ledger(store).record_failure("tag-2", Failure(sys.argv[2], "signal", -9), Rules())
os.kill(os.getpid(), signal.SIGKILL)
"""


class DemoFailed(NomarrError):
    """Something the demo claims turned out not to be so."""

    code = "demo-failed"


@click.command()
def demo() -> None:
    """See it work: crashes, decisions, a hang, a kill, a store that is away."""
    with tempfile.TemporaryDirectory(prefix="nomarr-demo-") as directory:
        url = f"sqlite://{directory}/state"
        _crash_loop(url, directory)
        _hang(directory)
        _kill(url)
        _store_away(url, directory)
    _check(not os.path.exists(directory), "everything was removed")
    _say("Done. Next to come: the same under systemd, with real restarts and masks.", bold=True)


def _crash_loop(url: str, directory: str) -> None:
    _say("A worker crashes as soon as it starts. Five restarts in five minutes are its limit.")
    now = clock.now()
    with _ledger(url, lambda: now) as ledger:
        delays = []
        twice = False
        for attempt in range(1, 7):
            death = _run_crasher()
            failure = Failure(f"{attempt:032x}", death.kind, death.code)
            record = ledger.record_failure("tag-0", failure, RULES).record
            again = ledger.record_failure("tag-0", failure, RULES)
            twice = twice or again.fresh
            _tell(f"crash {attempt}: {death.line}", f"{record.action}: {record.text}")
            delays.append(record.delay_ms)
            now = now.later(record.delay_ms)
        _check(not twice, "each was reported twice and counted once")
        _check(delays == [1000, 2000, 4000, 8000, 16000, 0], "1, 2, 4, 8, 16 s, then no more")
        _check(record.action == "fail", "the sixth crash was its last")
        with open(f"{directory}/state/public/tag-0.json", encoding="utf-8") as file:
            shown = json.load(file)
        _check(shown["failure_reason"] == record.text, "the reason is on record for all to read")
        ledger.reset("tag-0", by=f"uid {os.getuid()}")
        _check(ledger.get_restart_state("tag-0") == (0, None), "a reset begins the counts again")


def _hang(directory: str) -> None:
    _say("A worker hangs in the middle of a job: it is stopped, so its pipe falls silent.")
    fifo = f"{directory}/tag-1"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    worker = subprocess.Popen([sys.executable, "-c", FRAMER, fifo], env=_environment())
    try:
        decoder, state = Decoder("worker:tag:1"), State("worker:tag:1")
        state, _ = step(state, REGISTERED, time.monotonic(), QUICK)
        frames = 0
        while state.status != "dead":
            wait_s = max(0.0, (deadline(state, QUICK) or 0) - time.monotonic())
            ready, _, _ = select.select([reader], [], [], wait_s)
            seen = decoder.feed(os.read(reader, 65536)) if ready else []
            for event in [frame.event for frame in seen] or [TICK]:
                state, transitions = step(state, event, time.monotonic(), QUICK)
                for change in transitions:
                    _tell(f"after {frames} frames: {change.old} → {change.new}", change.context)
            frames += len(seen)
            if frames >= 5:
                worker.send_signal(signal.SIGSTOP)
        _check(state.cause == "stale", "three silent intervals are death")
    finally:
        worker.kill()
        worker.wait()
        os.close(reader)


def _kill(url: str) -> None:
    _say("The program that keeps the books is killed with SIGKILL right after a booking.")
    run = f"{99:032x}"
    command = [sys.executable, "-c", BOOKER, url, run]
    booker = subprocess.run(command, env=_environment(), check=False)
    _check(booker.returncode == -signal.SIGKILL, "it was killed")
    with _ledger(url, clock.now) as ledger:
        again = ledger.record_failure("tag-2", Failure(run, "signal", -9), RULES)
        _tell("the same failure, reported again", f"on record already: {again.record.text}")
        _check(not again.fresh, "the booking survived")
        _check(ledger.get_restart_state("tag-2")[0] == 1, "and counts once")


def _store_away(url: str, directory: str) -> None:
    _say("The database is away when a worker dies. The failure waits in a file.")
    spool = Spool(f"{directory}/spool")
    failure = Failure(f"{7:032x}", "oom", -9)
    os.rename(f"{directory}/state", f"{directory}/elsewhere")
    os.close(os.open(f"{directory}/state", os.O_CREAT | os.O_WRONLY))
    away = ""
    try:
        with _ledger(url, clock.now) as ledger:
            ledger.record_failure("tag-3", failure, RULES)
    except StoreUnavailable as error:
        away = str(error)
        decision = decide_blind(failure, RULES)
        spool.write(Spooled("worker:tag:3", failure, decision, clock.now()))
        _tell("out of memory; killed by SIGKILL", f"{decision.action}: {decision.reason}")
    _check(bool(away), "the store said that it cannot be used")
    os.unlink(f"{directory}/state")
    os.rename(f"{directory}/elsewhere", f"{directory}/state")
    with _ledger(url, clock.now) as ledger:
        for _ in range(2):
            spool.replay(ledger, lambda _: RULES)
        _check(ledger.get_restart_state("tag-3")[0] == 1, "booked once when it was back")


@contextmanager
def _ledger(url: str, now: Callable[[], Moment]) -> Iterator[Ledger]:
    store = open_store(url, "policy")
    try:
        yield Ledger(store, clock=now)
    finally:
        store.close()


def _run_crasher() -> Exit:
    started = time.monotonic_ns()
    status = subprocess.run([sys.executable, "-c", CRASHER], check=False).returncode
    run_ms = (time.monotonic_ns() - started) // 1_000_000
    name = signal.Signals(-status).name.removeprefix("SIG") if status < 0 else str(status)
    result, how = ("signal", "killed") if status < 0 else ("exit-code", "exited")
    return classify(result, how, name, run_ms=run_ms)


def _environment() -> dict[str, str]:
    """For children that import what this program imports, wherever it is installed."""
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(nomarr_systemd.__file__))}


def _say(text: str, *, bold: bool = False) -> None:
    click.echo("\n" + click.style(text, bold=True, fg="cyan" if not bold else None))


def _tell(what: str, then: str) -> None:
    click.echo(f"  {what}" + (click.style(f"  →  {then}", fg="yellow") if then else ""))


def _check(holds: bool, claim: str) -> None:
    if not holds:
        raise DemoFailed(f"not so: {claim}", hint="please report this with the output above")
    click.echo(click.style(f"  ✓ {claim}", fg="green"))
