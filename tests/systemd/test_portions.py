"""More than 64 workers under a real systemd: started in portions with their target, unless a person
stops them meanwhile, and kept loaded when they are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.controller import observe
from nomarr_systemd.core.ids import TARGET, Component
from nomarr_systemd.operate import overview
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.manager import Manager
from tests.support.asked import keep_calls
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
# In place of systemctl: before it asks for the second portion, it waits until "go" is there.
WAITS = """\
#!/bin/sh
case $* in *start*tag-1*) until [ -e {directory}/go ]; do sleep 0.05; done;; esac
exec /bin/systemctl "$@"
"""


def install(lab: Lab) -> None:
    lab.install(POOL)
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")


def hold_second(lab: Lab) -> None:
    """The first portion is started, and a request for the second is under way."""
    program = lab.write_program("systemctl", WAITS.replace("{directory}", lab.directory))
    path = f"{os.path.dirname(program)}:/usr/bin:/bin"
    lab.write_unit(f"{STARTER}.d/99-test.conf", f"[Service]\nEnvironment=PATH={path}\n")
    lab.reload()
    lab.systemctl("start", TARGET)
    lab.wait_until("tag-63", "activating")
    second = f"start --no-block {SECOND}"
    lab.wait_for(lambda: any(second in words for words in commands(lab)), what="it is under way")


def commands(lab: Lab) -> list[str]:
    """Of the processes of the starter."""
    found = []
    for pid in list_processes(lab, STARTER):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def states(lab: Lab) -> list[str]:
    return lab.systemctl("show", "--property=ActiveState", "--value", *UNITS).split()


def list_loaded(lab: Lab) -> list[str]:
    listed = lab.systemctl("list-units", "--all", "--plain", "--no-legend", "nomarr-worker@*")
    return [line.split()[0] for line in listed.splitlines()]


def has_stop_jobs(lab: Lab) -> bool:
    return " stop " in lab.systemctl("list-jobs", "--no-legend")


def list_processes(lab: Lab, unit: str) -> list[str]:
    place = lab.get(unit, "ControlGroup")
    for hierarchy in ("unified", "systemd", ""):
        with contextlib.suppress(OSError):
            return Path(f"/sys/fs/cgroup/{hierarchy}{place}/cgroup.procs").read_text().split()
    return []


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


def test_the_target_loads_one_portion_after_the_other(lab: Lab) -> None:
    """It would load all of them before systemd answers anybody."""
    install(lab)
    hold_second(lab)
    assert set(list_loaded(lab)) == set(UNITS[:IN_FIRST])
    lab.write_program("go", "")
    wait_until_started(lab)


@pytest.mark.parametrize(
    ("verb", "unit", "state"),
    [
        ("stop", TARGET, "inactive"),
        ("restart", TARGET, "activating"),
        ("stop", STARTER, "activating"),
    ],
)
def test_a_stop_while_a_request_is_under_way(lab: Lab, verb: str, unit: str, state: str) -> None:
    """What it has started is stopped, too, if all are to be."""
    install(lab)
    hold_second(lab)
    lab.systemctl(verb, "--no-block", unit)
    lab.wait_until(STARTER, "deactivating")
    lab.write_program("go", "")
    lab.wait_for(lambda: not has_stop_jobs(lab), what="all that was to be stopped is")
    lab.wait_for(lambda: set(states(lab)) == {state}, what=f"all are {state}")
    lab.wait_until(STARTER, "inactive")
    assert lab.get(TARGET, "ActiveState") == ("inactive" if state == "inactive" else "active")


@pytest.mark.parametrize("worker", [0, IN_FIRST - 1, IN_FIRST])
def test_all_are_stopped_while_they_start(lab: Lab, worker: int) -> None:
    install(lab)
    lab.systemctl("start", "--no-block", TARGET)
    lab.wait_for(lambda: UNITS[worker] in list_loaded(lab), what=f"tag-{worker} is loaded")
    lab.systemctl("stop", TARGET)
    lab.wait_for(lambda: not lab.systemctl("list-jobs", "--no-legend"), what="no job is left")
    for unit in (TARGET, STARTER, *UNITS):
        assert lab.get(unit, "ActiveState") == "inactive", unit


def test_a_starter_that_is_killed_starts_the_rest(lab: Lab) -> None:
    """And not what a person has stopped meanwhile."""
    install(lab)
    hold_second(lab)
    lab.systemctl("stop", UNITS[0])
    lab.write_program("go", "")
    os.kill(lab.main_pid(STARTER), signal.SIGKILL)
    lab.wait_until("tag-69", "activating")
    lab.wait_until(STARTER, "inactive")
    assert states(lab) == ["inactive", *["activating"] * (MANY - 1)]
    lab.systemctl("start", TARGET)
    wait_until_started(lab)


def test_a_stray_signal_ends_nothing(lab: Lab) -> None:
    install(lab)
    hold_second(lab)
    os.kill(lab.main_pid(STARTER), signal.SIGTERM)
    lab.write_program("go", "")
    wait_until_started(lab)


def test_a_start_may_stop_another_unit(lab: Lab) -> None:
    """As where the target names the workers."""
    lab.write_unit("other.service", "[Service]\nExecStart=/bin/sleep 1000\n")
    lab.install(f'{POOL}[pool.tag.unit]\nConflicts = "other.service"\n')
    lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service", "other.service")
    lab.systemctl("start", TARGET)
    wait_until_started(lab)
    assert lab.get("other.service", "ActiveState") == "inactive"


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
    assert f"systemctl --user reset-failed {STARTER}" in said
    assert "tag-0" in said
    site.good("apply")
    wait_until_started(lab)
    assert lab.get(STARTER, "ActiveState") == "inactive"


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
    asked = keep_calls(manager, monkeypatch)
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
