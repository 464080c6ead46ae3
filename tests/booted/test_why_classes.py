"""Every class of death on a booted system: ``nomarrctl why`` names it, from a real journald."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.actor import ACTOR
from tests.support.installed import WORKERS, write
from tests.support.machine import Machine, unit_of

# Here nobody comes back: each is looked at as it died.
MORTAL = ACTOR.replace('if first:\n    open(once, "w").close()\n', "")
POOLS = {
    "leave": ("exit1", 3600, "exit", 1),
    "conf": ("exit78", 3600, "config", 78),
    "killed": ("live", 3600, "signal", -9),
    "segv": ("live", 3600, "signal", -11),
    "hang": ("watchdog", 2, "watchdog", -2),
    "stop": ("live", 3600, "stale", -2),
    "mute": ("silent", 3600, "start-timeout", -1),
    "babble": ("invalid", 3600, "invalid-heartbeat", -3),
    "mend": ("recovering", 3600, "recovery-timeout", -2),
}
HEAD = """\
[policy]
backoff_base_s = 600
backoff_max_s = 600
backoff_jitter = 0

[health]
frame_interval_s = 0.1
staleness_interval_s = 1
startup_timeout_s = 6
min_recovery_s = 0.5
max_recovery_s = 2
"""
NEEDS = f"""\
[pool.need]
command = ["{WORKERS}/mortal", "live", "/nonexistent"]

[pool.need.unit]
Requires = "broken.service"
After = "broken.service"
"""
BROKEN = "[Service]\nType=oneshot\nExecStart=/bin/false\n"
SIGNALS = {"killed": "KILL", "segv": "SEGV", "stop": "STOP"}


def make_config() -> str:
    parts = [HEAD]
    for name, (mode, watchdog_s, _, _) in POOLS.items():
        command = json.dumps([f"{WORKERS}/mortal", mode, "/nonexistent"])
        parts.append(f"[pool.{name}]\ncommand = {command}\nwatchdog_s = {watchdog_s}\n")
        parts.append(f"[pool.{name}.unit]\nLimitCORE = 0\n")
    return "\n".join([*parts, NEEDS])


@pytest.fixture(scope="module", autouse=True)
def graveyard(machine: Machine) -> None:
    write(machine.path(f"{WORKERS}/mortal"), MORTAL, 0o755)
    write(machine.path("/etc/systemd/system/broken.service"), BROKEN)
    machine.apply(make_config())
    for name, number in SIGNALS.items():
        unit = unit_of(f"{name}-0")
        machine.wait_for(lambda: machine.get(unit, "ActiveState") == "active", unit)  # noqa: B023
        machine.run("systemctl", "kill", f"--signal={number}", "--kill-whom=main", unit)


@pytest.mark.parametrize("pool", POOLS)
def test_its_class_is_named(machine: Machine, pool: str) -> None:
    name = f"{pool}-0"
    _, _, kind, code = POOLS[pool]

    def look() -> dict[str, Any] | None:
        said = machine.run("nomarrctl", "why", name, "--json", check=False).stdout
        report: dict[str, Any] = json.loads(said)
        return report if report["decision"] else None

    report = machine.wait_for(look, f"{name} has died", 60)
    assert report is not None
    assert (report["death"]["kind"], report["death"]["code"]) == (kind, code)
    assert report["decision"]["action"] == ("fail" if kind == "config" else "restart")
    assert report["advice"], "it says what to do next"
    told = machine.run("nomarrctl", "why", name).stdout
    assert report["death"]["line"].split(";")[0] in " ".join(told.split())


def test_what_it_needed_and_did_not_get_is_named(machine: Machine) -> None:
    """It never ran, so there is nothing to decide; but there is something to tell."""
    machine.wait_for(lambda: machine.get("broken.service", "ActiveState") == "failed", "broken")
    report = json.loads(machine.run("nomarrctl", "why", "need-0", "--json").stdout)
    assert report["needs"] == ["broken.service: failed"]
    assert "broken.service" in machine.run("nomarrctl", "why", "need-0").stdout
