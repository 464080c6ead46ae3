"""The manager over its own socket, beside what systemctl says."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nomarr_systemd.controller import ended_units, observe
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host import clock
from nomarr_systemd.operate import overview, waiting
from nomarr_systemd.postmortem import witnesses
from nomarr_systemd.supervisor import disagreement
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.dbus.connection import BusError, Call
from nomarr_systemd.systemd.manager import Manager, monotonic_ms
from nomarr_systemd.systemd.systemctl import ManagerError
from nomarr_systemd.systemd.timers import read_timer, timer_of
from tests.support.asked import keep_calls
from tests.support.lab import Lab

TAG = parse_component("tag-0")
POOL = """\
[pool.tag]
workers = 1
command = ["/bin/sh", "-c", "systemd-notify --ready; exec sleep 1000"]
watchdog_s = 3600
"""
# All that is asked for anywhere.
PROPERTIES = sorted(
    {
        *overview.FACTS,
        *waiting.FACTS,
        *witnesses.FACTS,
        *disagreement.PROPERTIES,
        *ended_units.EXIT_FACTS,
        *observe.UNIT_FACTS,
        *("LoadState", "UnitFileState", "NFileDescriptorStore", "ConditionResult", "StatusText"),
    }
)


@pytest.fixture
def manager(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    lab.install(POOL)
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(Manager(user=True)) as manager:
        yield manager


def test_it_shows_what_systemctl_shows(lab: Lab, manager: Manager) -> None:
    lab.start("tag-0")
    units = [TAG.unit, "no-such.service"]
    shown = manager.show([*units, "nomarr-workers.target"], PROPERTIES)
    assert shown["nomarr-workers.target"]["Result"] == ""
    for unit in units:
        for name in PROPERTIES:
            said = lab.systemctl("show", f"--property={name}", "--value", unit).rstrip("\n")
            assert shown[unit][name] == said, (unit, name)
    assert manager.show_manager("Version")["Version"].startswith("2")


def test_of_workers_that_are_not_loaded_no_run_is_asked_for(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each question systemd would load all workers, and forget them again: with 300 of them,
    stopped with their target, ``status`` took a minute."""
    lab.wait_for(
        lambda: not manager.list_loaded("nomarr-workers.target", TAG.unit), what="nothing is loaded"
    )
    asked = keep_calls(manager, monkeypatch)
    facts = sorted({*overview.FACTS, *ended_units.EXIT_FACTS, *observe.UNIT_FACTS})
    shown = manager.show_each({TAG.unit: facts, TAG.wanted_unit: stop_intent.WANTED_FACTS})
    assert not [call for call in asked if call.member == "Get" and "/unit/" in call.path]
    for unit, found in shown.items():
        for name, text in found.items():
            said = lab.systemctl("show", f"--property={name}", "--value", unit).rstrip("\n")
            assert text == said, (unit, name)


def test_a_worker_that_starts_before_it_is_asked_about(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was not loaded no run is asked for: it was shown as active, in no run."""
    list_loaded = manager.list_loaded

    def start_then(*patterns: str) -> dict[str, dict[str, str]]:
        found = list_loaded(*patterns)
        lab.start("tag-0")
        return found

    monkeypatch.setattr(manager, "list_loaded", start_then)
    shown = manager.show([TAG.unit], ["ActiveState", "InvocationID"])
    assert shown[TAG.unit] == lab.show("tag-0", "ActiveState", "InvocationID")


def test_workers_stay_loaded_while_their_supervisor_runs(lab: Lab, manager: Manager) -> None:
    lab.start("nomarr-supervisor.service", "tag-0")
    run = lab.get("tag-0", "InvocationID")
    lab.systemctl("stop", TAG.unit)
    # systemd forgets a unit that it unloads.
    assert lab.get("tag-0", "InvocationID") == run
    assert TAG.unit in manager.list_loaded(TAG.unit)


def test_what_it_shows_of_a_unit_was_true_at_one_moment(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ended between two answers was shown as failed with the times of the run
    before, and taken for one that could not be started."""
    lab.start("tag-0")
    ask_all = manager._bus.call_all
    deaths: list[str] = []

    def ask_with_a_death_in_between(calls: Sequence[Call]) -> list[list[Any] | BusError]:
        if deaths:
            return ask_all(calls)
        answers = [ask_all([call])[0] for call in calls[:-2]]
        deaths.append(lab.get("tag-0", "InvocationID"))
        os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
        lab.wait_until("tag-0", "failed")
        return answers + ask_all(calls[-2:])

    monkeypatch.setattr(manager._bus, "call_all", ask_with_a_death_in_between)
    questions = {TAG.unit: observe.UNIT_FACTS, TAG.wanted_unit: stop_intent.WANTED_FACTS}
    shown = manager.show_each(questions)
    unit, wanted = shown[TAG.unit], shown[TAG.wanted_unit]
    assert deaths == [unit["InvocationID"]]
    assert stop_intent.is_down(unit, wanted)
    assert stop_intent.has_begun(unit, wanted)
    assert int(unit["InactiveEnterTimestampMonotonic"]) > int(
        unit["InactiveExitTimestampMonotonic"]
    )


def test_it_starts_and_finds_the_failed(lab: Lab, manager: Manager) -> None:
    manager.start(TAG.unit)
    lab.wait_until("tag-0", "active")
    lab.systemctl("kill", "--signal=SEGV", TAG.unit)
    lab.wait_until("tag-0", "failed")
    assert manager.list_failed("nomarr-worker@*.service") == [TAG.unit]
    with pytest.raises(ManagerError, match=r"StartUnit no-such.service: Unit no-such.service not"):
        manager.start("no-such.service")


def test_a_timer_is_replaced_cancelled_and_stays_when_it_has_elapsed(
    lab: Lab, manager: Manager
) -> None:
    timer = timer_of(TAG)

    def state() -> str:
        return read_timer(manager.show([timer], ["Job", "SubState"])[timer])

    def schedule(in_ms: int) -> None:
        assert manager.schedule_all({TAG: monotonic_ms() + in_ms}) == {TAG: None}

    assert state() == "none"
    for far_ms in (100_000, 200_000, 300_000):
        schedule(far_ms)
        assert state() == "waiting"
    manager.cancel_timer(TAG)
    lab.wait_for(lambda: state() == "none")
    manager.cancel_timer(TAG)  # of none
    schedule(0)
    lab.wait_for(lambda: state() == "elapsed")
    schedule(100_000)
    assert state() == "waiting"


@pytest.mark.parametrize(
    ("due_s", "wall_s"), [(3600, 1), (1, 3600)], ids=["clock-set-forward", "clock-set-back"]
)
def test_the_end_of_a_pause_follows_both_clocks(
    lab: Lab, manager: Manager, due_s: int, wall_s: int
) -> None:
    """Between two clocks that were set apart, the first decides. The tests do not set the clock,
    which is the whole machine's; systemd looks at its calendar timers again when it is set."""
    lab.write_unit("probe.service", "[Service]\nType=oneshot\nExecStart=/bin/true\n")
    lab.reload()
    now_ms = clock.now().wall_ms
    manager.schedule_service("probe", monotonic_ms() + due_s * 1000, now_ms + wall_s * 1000)
    lab.wait_for(
        lambda: lab.get("probe.service", "ExecMainExitTimestampMonotonic") not in ("", "0"),
        what="the service was started",
    )


def test_a_manager_that_executes_itself_anew_is_asked_again(lab: Lab, manager: Manager) -> None:
    before = manager.show([TAG.unit], ["LoadState"])
    lab.systemctl("daemon-reexec")
    assert manager.show([TAG.unit], ["LoadState"]) == before


def test_no_manager_is_an_error_of_ours(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{lab.directory}/nowhere")
    with pytest.raises(ManagerError, match=r"does not answer: .*No such file"):
        manager.start(TAG.unit)


def test_one_that_does_not_answer_is_given_up(
    lab: Lab, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nomarr_systemd.systemd.manager.TIMEOUT_S", 0.3)
    with contextlib.closing(Manager(user=True)) as slow:
        os.kill(lab.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ManagerError, match="timed out"):
                slow.show([TAG.unit], ["LoadState"])
        finally:
            os.kill(lab.pid, signal.SIGCONT)
        lab.wait_for(lambda: manager.show([TAG.unit], ["LoadState"]))


def test_calls_that_meet_a_manager_about_to_come_back_wait_for_it(
    lab: Lab, manager: Manager
) -> None:
    before = manager.show([TAG.unit], ["LoadState"])
    for _ in range(10):
        lab.systemctl("daemon-reexec")
        with contextlib.closing(Manager(user=True)) as fresh:
            assert fresh.show([TAG.unit], ["LoadState"]) == before
        assert manager.show([TAG.unit], ["LoadState"]) == before
