"""Many workers at once under a real systemd: jobs in portions, a systemd that is slow to answer,
errors that name one unit and not thousands, and the death of all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import Component
from nomarr_systemd.operate import waiting
from nomarr_systemd.operate.waiting import queue, queue_gently
from nomarr_systemd.systemd.manager import Manager, Verb
from nomarr_systemd.systemd.systemctl import ManagerError, Masked
from tests.support.crashes import account_of
from tests.support.lab import Lab

MANY = 40
POLICY = """\
[policy]
backoff_base_s = 0
max_restarts = 10
"""
POOL = """\
[pool.tag]
workers = {many}
command = ["/bin/sh", "-c", "{script}; exec sleep 1000"]
watchdog_s = 3600
"""
READY, LOADS = "systemd-notify --ready", ":"
WORKERS = [Component("tag", number) for number in range(MANY)]
UNITS = [worker.unit for worker in WORKERS]


class Recorder(Manager):
    """A manager that remembers how many jobs were queued at a time."""

    portions: tuple[int, ...] = ()

    def queue(self, verb: Verb, units: Iterable[str]) -> dict[str, ManagerError | None]:
        names = list(units)
        self.portions += (len(names),)
        return super().queue(verb, names)


@pytest.fixture
def manager(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(Recorder(user=True)) as manager:
        yield manager


def install(lab: Lab, script: str = READY, many: int = MANY) -> None:
    lab.install(POLICY + POOL.replace("{many}", str(many)).replace("{script}", script))
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")


def states(lab: Lab) -> set[str]:
    return set(lab.systemctl("show", "--property=ActiveState", "--value", *UNITS).split())


def test_starts_are_queued_in_portions_with_progress(
    lab: Lab, manager: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lab)
    monkeypatch.setattr(waiting, "_PORTION", MANY // 4)
    said: list[str] = []
    queue_gently(manager, "start", UNITS, "starting", said.append)
    assert states(lab) == {"active"}
    assert sum(manager.portions) == MANY
    assert max(manager.portions) < MANY
    assert said
    assert all(line.startswith("starting: ") and line.endswith(f" of {MANY}") for line in said)


def test_workers_that_load_for_long_are_not_waited_for(lab: Lab, manager: Recorder) -> None:
    install(lab, LOADS)
    queue_gently(manager, "start", UNITS, "starting", lambda _line: None)
    assert states(lab) == {"activating"}


def test_a_refusal_is_one_line_and_stops_no_other(lab: Lab, manager: Recorder) -> None:
    install(lab)
    lab.systemctl("mask", *UNITS[1:])
    with pytest.raises(Masked) as raised:
        queue(manager, "start", UNITS)
    assert str(raised.value).endswith(f"(and {MANY - 2} more)")
    assert len(str(raised.value)) < 300
    lab.wait_until("tag-0", "active")


def test_a_systemd_that_is_slow_is_waited_for(
    lab: Lab, manager: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lab, many=1)
    monkeypatch.setattr("nomarr_systemd.systemd.manager.TIMEOUT_S", 0.1)
    monkeypatch.setattr("nomarr_systemd.systemd.systemctl.TIMEOUT_S", 0.1)
    said: list[str] = []
    for name in ("ListUnitsByNames", "systemctl daemon-reload"):
        said.clear()
        with contextlib.closing(Manager(user=True, tell=said.append)) as patient:
            os.kill(lab.pid, signal.SIGSTOP)
            is_question = name == "ListUnitsByNames"
            target = partial(patient.show, [UNITS[0]], ["LoadState"])
            asking = threading.Thread(target=target if is_question else patient.reload)
            try:
                asking.start()
                lab.wait_for(lambda: len(said) > 1, what="it says what it waits for")
                assert asking.is_alive()
            finally:
                os.kill(lab.pid, signal.SIGCONT)
            asking.join()
        assert said[0].startswith(f"systemd is busy, waiting for it: {name}")


def test_units_are_listed_without_being_loaded(lab: Lab, manager: Recorder) -> None:
    install(lab, many=1)
    lab.start("tag-0")
    pattern = "nomarr-worker@*.service"
    loaded = manager.list_loaded(pattern)
    assert loaded == manager.show([UNITS[0]], ("LoadState", "ActiveState", "SubState", "Job"))
    assert not manager.list_loaded(UNITS[1])
    assert UNITS[1] not in lab.systemctl("list-units", "--all", pattern)


def test_a_hook_waits_for_room_in_the_fifo_and_is_not_run_again(lab: Lab) -> None:
    """As when others have filled it before the controller has read the first line."""
    lab.write_unit(
        "nomarr-controller.service.d/99-test.conf",
        "[Service]\nType=simple\nExecStart=\nExecStart=/bin/sleep 1000\n",
    )
    install(lab, many=1)
    lab.start("tag-0")
    fifo = os.open(f"{lab.runtime}/nomarr/failures", os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fifo, b"\n" * 512)
        os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
        hook = "nomarr-wakeup.service"
        lab.wait_until(hook, "activating")
        assert lab.get(hook, "TimeoutStartUSec") == "infinity"
        with contextlib.suppress(BlockingIOError):
            while os.read(fifo, 65536):
                pass
        lab.wait_until(hook, "inactive")
        shown = lab.show(hook, "Result", "NRestarts")
        assert (shown["Result"], shown["NRestarts"]) == ("success", "0")
    finally:
        os.close(fifo)


def test_the_death_of_all_is_booked_published_and_told_once_each(lab: Lab) -> None:
    install(lab)
    lab.start(*(worker.instance for worker in WORKERS))
    text = lab.systemctl("show", "--property=InvocationID", "--value", *UNITS)
    runs = dict(zip(WORKERS, text.split(), strict=True))
    # Not alike: that would be an incident, and they would wait for a canary.
    for number, pid in enumerate(lab.main_pids(*UNITS)):
        os.kill(pid, (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE)[number % 3])
    lab.wait_for(lambda: states(lab) == {"active"}, what="all run again")
    pending = Path(lab.paths.pending)
    lab.wait_for(lambda: not list(pending.iterdir()), what="no report is left")
    for worker, run in runs.items():
        lab.wait_for(lambda: account_of(lab, worker.instance).records, what="a record")  # noqa: B023
        (record,) = account_of(lab, worker.instance).records
        assert (record.invocation, record.action) == (run, "restart")
    past = Path(lab.paths.state, "past")
    assert sorted(os.listdir(past)) == sorted(worker.instance for worker in WORKERS)
    assert not [line for line in lab.journal().splitlines() if "timed out" in line]
