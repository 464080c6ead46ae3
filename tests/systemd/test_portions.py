"""More than 64 workers under a real systemd: started in portions with their target, unless a person
stops them meanwhile, and kept loaded when they are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nomarr_systemd.controller import observe
from nomarr_systemd.core.ids import TARGET, Component
from nomarr_systemd.operate import overview
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.dbus.connection import BusError, Call
from nomarr_systemd.systemd.manager import Manager
from tests.support.lab import Lab
from tests.support.operator_site import Installation

MANY, IN_FIRST = 70, 64
POOL = f"""\
[pool.tag]
workers = {MANY}
command = ["/bin/sleep", "1000"]
watchdog_s = 3600
"""
STARTER = "nomarr-portions.service"
FIRST, SECOND = "nomarr-portion@tag-0.target", "nomarr-portion@tag-1.target"
WORKERS = [Component("tag", number) for number in range(MANY)]
UNITS = [worker.unit for worker in WORKERS]
# In place of what starts the portions: it ends when the file "go" is there, and not when asked to.
WAITS = "#!/bin/sh\n{first}\nuntil [ -e {directory}/go ]; do sleep 0.05; done\n"


def install(lab: Lab) -> None:
    lab.install(POOL)
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")


def replace_starter(lab: Lab, first: str = "trap '' INT") -> None:
    text = WAITS.replace("{first}", first).replace("{directory}", lab.directory)
    program = lab.write_program("waits", text)
    lab.write_unit(f"{STARTER}.d/99-test.conf", f"[Service]\nExecStart=\nExecStart={program}\n")
    lab.reload()


def states(lab: Lab) -> list[str]:
    return lab.systemctl("show", "--property=ActiveState", "--value", *UNITS).split()


def list_loaded(lab: Lab, pattern: str = "nomarr-worker@*") -> list[str]:
    listed = lab.systemctl("list-units", "--all", "--plain", "--no-legend", pattern)
    return [line.split()[0] for line in listed.splitlines()]


def wait_until_started(lab: Lab) -> None:
    """They load for ever."""
    lab.wait_for(lambda: set(states(lab)) == {"activating"}, what="all workers are started")


@pytest.fixture
def manager(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(Manager(user=True)) as manager:
        yield manager


def test_the_target_starts_all(any_lab: Lab) -> None:
    install(any_lab)
    any_lab.systemctl("start", TARGET)
    wait_until_started(any_lab)
    any_lab.wait_until(STARTER, "inactive")
    assert any_lab.get(STARTER, "Result") == "success"
    assert {any_lab.get(unit, "ActiveState") for unit in (FIRST, SECOND)} == {"active"}

    any_lab.systemctl("stop", TARGET)
    assert set(states(any_lab)) == {"inactive"}
    assert {any_lab.get(unit, "ActiveState") for unit in (FIRST, SECOND)} == {"inactive"}
    any_lab.systemctl("start", TARGET)
    wait_until_started(any_lab)


def test_the_target_alone_loads_no_worker(lab: Lab) -> None:
    """It would load all of them before systemd answers anybody."""
    install(lab)
    replace_starter(lab)
    lab.systemctl("start", TARGET)
    lab.wait_until(STARTER, "activating")
    assert list_loaded(lab) == []
    lab.systemctl("start", "--job-mode=fail", "--no-block", SECOND)
    lab.wait_until("tag-69", "activating")
    assert set(list_loaded(lab)) == set(UNITS[IN_FIRST:])


def test_a_stop_of_the_target_lets_no_portion_follow(lab: Lab) -> None:
    """A request that was sent before the stop, and is read after it, is refused."""
    install(lab)
    replace_starter(lab)
    lab.systemctl("start", TARGET, FIRST)
    lab.wait_until("tag-63", "activating")
    lab.systemctl("stop", "--no-block", TARGET)
    lab.wait_until(STARTER, "deactivating")
    request = ["systemctl", "--user", "start", "--no-block", "--job-mode=fail", SECOND]
    refused = lab.run(request, check=False)
    assert f"{TARGET} has 'stop' job queued" in refused.stderr
    lab.write_program("go", "")
    lab.wait_until(TARGET, "inactive")
    assert set(states(lab)) == {"inactive"}


@pytest.mark.parametrize("worker", [0, IN_FIRST - 1, IN_FIRST])
def test_all_are_stopped_while_they_start(lab: Lab, worker: int) -> None:
    install(lab)
    lab.systemctl("start", "--no-block", TARGET)
    lab.wait_for(lambda: UNITS[worker] in list_loaded(lab), what=f"tag-{worker} is loaded")
    lab.systemctl("stop", TARGET)
    lab.wait_for(lambda: not lab.systemctl("list-jobs", "--no-legend"), what="no job is left")
    for unit in (TARGET, STARTER, *UNITS):
        assert lab.get(unit, "ActiveState") == "inactive", unit


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_starter_that_is_killed_starts_again(lab: Lab, sign: signal.Signals) -> None:
    install(lab)
    replace_starter(lab, "")
    lab.systemctl("start", TARGET)
    lab.wait_until(STARTER, "activating")
    os.unlink(f"{lab.units}/{STARTER}.d/99-test.conf")
    lab.reload()
    os.kill(lab.main_pid(STARTER), sign)
    wait_until_started(lab)


def test_a_portion_that_is_refused_stops_no_other_and_is_told(lab: Lab) -> None:
    site = Installation(lab)
    site.config.write_text(POOL)
    site.good("apply")
    lab.systemctl("stop", TARGET)
    lab.systemctl("mask", FIRST)
    lab.systemctl("start", TARGET)
    lab.wait_until("tag-69", "activating")
    lab.wait_until(STARTER, "failed")
    assert lab.get("tag-0", "ActiveState") == "inactive"
    said = site.ctl("doctor").stdout
    assert f"{STARTER} has failed" in said
    assert f"systemctl --user restart {STARTER}" in said
    lab.systemctl("unmask", FIRST)
    lab.systemctl("restart", STARTER)
    wait_until_started(lab)


def test_workers_of_a_portion_stay_loaded(lab: Lab) -> None:
    """systemd forgets a run that it unloads; a worker that has finished would start again."""
    install(lab)
    lab.systemctl("start", "--no-block", UNITS[1])
    lab.wait_until("tag-1", "activating")
    run = lab.get("tag-1", "InvocationID")
    lab.systemctl("stop", UNITS[1], "nomarr-supervisor.service", "nomarr-controller.socket")
    lab.systemctl("daemon-reload")
    assert lab.get("tag-1", "InvocationID") == run
    assert set(list_loaded(lab)) == set(UNITS[:IN_FIRST])


def test_of_portions_that_are_not_loaded_no_run_is_asked_for(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lab)
    lab.systemctl("start", "--no-block", UNITS[1])
    lab.wait_until("tag-1", "activating")
    asked: list[Call] = []
    ask_all = manager._bus.call_all

    def keep(calls: Sequence[Call]) -> list[list[Any] | BusError]:
        asked.extend(calls)
        return ask_all(calls)

    monkeypatch.setattr(manager._bus, "call_all", keep)
    facts = sorted({*overview.FACTS, *observe.UNIT_FACTS})
    shown = manager.show_each(
        {worker.unit: facts for worker in WORKERS}
        | {worker.wanted_unit: stop_intent.WANTED_FACTS for worker in WORKERS}
    )
    paths = {call.path for call in asked if call.member == "Get"}
    assert any("tag_2d63" in path for path in paths)
    assert not any("tag_2d64" in path for path in paths)
    for worker in (WORKERS[1], WORKERS[63], WORKERS[64], WORKERS[69]):
        for unit in (worker.unit, worker.wanted_unit):
            for name, text in shown[unit].items():
                said = lab.systemctl("show", f"--property={name}", "--value", unit).rstrip("\n")
                assert text == said, (unit, name)
