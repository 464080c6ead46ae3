"""Ending a worker: the right process, once, and for certain; nobody else, whatever changes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nomarr_systemd.core.frames import Decoder
from nomarr_systemd.core.ids import Component
from nomarr_systemd.supervisor import disagreement
from nomarr_systemd.supervisor.disagreement import Facts, compare, is_stalled, read_facts
from nomarr_systemd.supervisor.kill import Killer, open_process, send_signals
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.run_state import RunState
from nomarr_systemd.supervisor.unit_queries import UnitQueries
from nomarr_systemd.supervisor.workers import Workers
from tests.support.waiting import PATIENCE_S

RUN = "a" * 32
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGABRT, lambda *_: os.write(1, b"abrt"))
os.write(1, b"here")
while True:
    signal.pause()
"""


class Child:
    """A real process that is ended at the end."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout
        self.said = self.process.stdout
        assert os.read(self.said.fileno(), 4) == b"here"
        self.pid = self.process.pid

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.said.close()


@pytest.fixture
def plain() -> Iterator[Child]:
    child = Child("import os, signal; os.write(1, b'here'); signal.pause()")
    yield child
    child.close()


@pytest.fixture
def stubborn() -> Iterator[Child]:
    child = Child(STUBBORN)
    yield child
    child.close()


def count_pidfds() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "[pidfd]" in os.readlink(f"/proc/self/fd/{fd}")
    return count


class Answers(UnitQueries):
    """A systemd that answers what it is told to; None: it does not answer."""

    def __init__(self, loop: Loop, answers: tuple[Facts | None, ...]) -> None:
        super().__init__(loop, user=True)
        self.asked: list[str] = []
        self._answers = answers
        self._answers_loop = loop

    def ask(self, unit: str, answer: Callable[[Facts | None], None]) -> None:
        facts = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(unit)
        self.error = "" if facts else "no bus today"
        self._answers_loop.soon(lambda: answer(facts))


class Trial:
    """A killer, and the worker it is to kill."""

    def __init__(self, path: str, loop: Loop, answers: Answers, grace_s: float) -> None:
        self.loop = loop
        self.answers = answers
        self.worker = Workers().add(Component("tag", 0), -1)
        self.worker.begin(RUN)
        self.run_state = RunState(path, loop)
        self.killer = Killer(loop, answers, self.run_state, grace_s=grace_s)
        self.pidfds = count_pidfds()  # those of others, before the trial

    @property
    def asked(self) -> list[str]:
        return self.answers.asked

    def kill(self) -> None:
        self.killer.kill(self.worker, "stale")

    def turn_until(self, what: Callable[[], bool]) -> None:
        self.loop.at(time.monotonic() + PATIENCE_S, self._give_up)
        while not what():
            self.loop.turn()

    def see_end(self, child: Child) -> None:
        """Until the process has ended, and the killer has let go of it."""
        self.turn_until(lambda: child.process.poll() is not None and count_pidfds() == self.pidfds)

    def _give_up(self) -> None:
        raise AssertionError("it did not happen in time")


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    loop = Loop()
    made: list[Trial] = []

    def make(*answers: Facts | None, grace_s: float = 60.0) -> Trial:
        made.append(Trial(str(tmp_path / "memory"), loop, Answers(loop, answers), grace_s))
        return made[-1]

    yield make
    for each in made:
        each.run_state.close()
    loop.close()


def test_sigabrt_ends_it(plain: Child, trial: Callable[..., Trial]) -> None:
    facts = Facts(plain.pid, RUN, "active")
    one = trial(facts)
    one.kill()
    one.kill()  # once is enough
    one.see_end(plain)
    assert plain.process.returncode == -signal.SIGABRT
    assert one.asked == ["nomarr-worker@tag-0.service"] * 2
    assert one.worker.label == "stale"


def test_a_stopped_process_is_ended_too(plain: Child, trial: Callable[..., Trial]) -> None:
    os.kill(plain.pid, signal.SIGSTOP)
    os.waitpid(plain.pid, os.WUNTRACED)
    one = trial(Facts(plain.pid, RUN, "active"))
    one.kill()
    one.see_end(plain)
    assert plain.process.returncode == -signal.SIGABRT


def test_sigkill_follows_after_a_grace(stubborn: Child, trial: Callable[..., Trial]) -> None:
    one = trial(Facts(stubborn.pid, RUN, "active"), grace_s=0.2)
    one.kill()
    started = time.monotonic()
    one.see_end(stubborn)
    assert os.read(stubborn.said.fileno(), 4) == b"abrt"
    assert stubborn.process.returncode == -signal.SIGKILL
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 0},
        {"invocation": "b" * 32},
        {"active": "deactivating"},
        {"active": "failed"},
        {"active": ""},
    ],
)
@pytest.mark.parametrize("when", ["at once", "after the pidfd was opened"])
def test_nobody_else_is_hit(
    plain: Child, trial: Callable[..., Trial], change: dict[str, object], when: str
) -> None:
    before = count_pidfds()
    right = Facts(plain.pid, RUN, "active")
    wrong = right._replace(**change)  # type: ignore[arg-type]
    one = trial(wrong) if when == "at once" else trial(right, wrong)
    one.kill()
    done = [1, 2][when != "at once"]
    one.turn_until(lambda: len(one.asked) == done)
    one.loop.soon(lambda: None)
    one.loop.turn()
    assert one.worker.label == ""
    assert plain.process.poll() is None
    assert count_pidfds() == before, "a pidfd was left open"


def test_another_process_in_its_place_is_not_hit(
    plain: Child, stubborn: Child, trial: Callable[..., Trial]
) -> None:
    one = trial(Facts(plain.pid, RUN, "active"), Facts(stubborn.pid, RUN, "active"))
    one.kill()
    one.turn_until(lambda: len(one.asked) == 2)
    one.loop.soon(lambda: None)
    one.loop.turn()
    assert one.worker.label == ""
    assert (plain.process.poll(), stubborn.process.poll()) == (None, None)


def test_a_pardon_in_time_spares_it(plain: Child, trial: Callable[..., Trial]) -> None:
    one = trial(Facts(plain.pid, RUN, "active"))
    one.kill()
    one.loop.turn()
    one.killer.forget(RUN)
    one.loop.turn()
    assert (one.worker.label, plain.process.poll()) == ("", None)


def test_a_systemd_that_does_not_answer_is_asked_again(
    plain: Child,
    trial: Callable[..., Trial],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nomarr_systemd.supervisor.kill.RETRY_S", 0.05)
    facts = Facts(plain.pid, RUN, "active")
    one = trial(None, facts, None, facts)
    one.kill()
    one.see_end(plain)
    assert len(one.asked) == 5
    said = capfd.readouterr().err
    assert said.count('retrying component=worker:tag:0 error="no bus today"') == 2


def test_a_process_that_is_gone(plain: Child, trial: Callable[..., Trial]) -> None:
    pidfd = open_process(plain.pid)
    assert pidfd is not None
    plain.process.kill()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    assert send_signals(pidfd, signal.SIGABRT)  # not waited for yet: there, and beyond harm
    plain.process.wait()
    assert not send_signals(pidfd, signal.SIGABRT)
    assert open_process(plain.pid) is None
    os.close(pidfd)
    one = trial(Facts(plain.pid, RUN, "active"))
    one.kill()
    one.turn_until(lambda: len(one.asked) == 1)
    assert one.worker.label == ""


def test_facts_from_what_systemctl_shows() -> None:
    shown = {
        "MainPID": "12",
        "InvocationID": RUN,
        "ActiveState": "active",
        "WatchdogTimestampMonotonic": "2500000",
    }
    assert read_facts(shown) == Facts(12, RUN, "active", 2.5)
    assert read_facts({}) == Facts()
    assert read_facts({"MainPID": "-1", "WatchdogTimestampMonotonic": "x"}) == Facts()


def test_the_two_witnesses() -> None:
    def name(facts: Facts, frames: int = 5, invocation: str = RUN) -> str:
        return compare(facts, 100.0, frames=frames, invocation=invocation, staleness_s=5.0)

    fed = Facts(1, RUN, "active", 103.0)
    assert name(fed) == disagreement.WEDGED
    assert name(fed._replace(fed_at=99.0)) == ""
    assert name(fed._replace(fed_at=100.1)) == "", "sent together, seen one after the other"
    assert name(fed, frames=0) == disagreement.BLIND
    assert name(fed._replace(active="activating"), frames=0) == ""
    assert name(fed, invocation="b" * 32) == ""


def test_a_frame_without_progress() -> None:
    def stalled(said: bytes, limit: float) -> bool:
        line = b'HEALTH|{"component_id":"worker:tag:0","status":"healthy"' + said + b"}\n"
        (frame,) = Decoder("worker:tag:0").feed(line)
        return is_stalled(frame.progress_age_s, limit)

    assert stalled(b',"progress_age_s":300.5', 300)
    assert stalled(b',"progress_age_s": 301', 300)
    assert not stalled(b',"progress_age_s":299', 300)
    assert not stalled(b',"progress_age_s":null', 300)
    assert not stalled(b',"progress_age_s":999', 0)
    assert not stalled(b',"metrics":{"progress_age_s":999}', 300)
    assert not stalled(b"", 300)
