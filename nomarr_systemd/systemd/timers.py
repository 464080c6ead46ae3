"""Transient timers: as calls to systemd, their names, and their state.

They have OnStartupSec=, an absolute time: OnActiveSec= begins again at every daemon-reload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from nomarr_systemd.core.ids import TARGET, Component
from nomarr_systemd.systemd.dbus.connection import Call

RESTART_TIMERS: Final = "nomarr-restart@*.timer"  # the pattern of all of them
NO_TIMER: Final = {"Job": "", "SubState": "dead"}  # of one that is not loaded


def make_restart_timer(component: Component, since_start_us: int) -> Call:
    """Return the call for the timer of a backoff. It stays when it has elapsed; if it is gone, it
    was cancelled."""
    settings = [
        ("Description", ("s", f"Nomarr backoff of worker {component.instance}")),
        ("TimersMonotonic", ("a(st)", [("OnStartupSec", since_start_us)])),
        ("AccuracyUSec", ("t", 10_000)),
        ("RemainAfterElapse", ("b", True)),
        ("PartOf", ("as", [component.unit, TARGET])),
    ]
    return _start(timer_of(component), settings)


def make_service_timer(name: str, since_start_us: int, wall_ms: int) -> Call:
    """Return the call for a timer that starts the service of the same name: a transient timer can
    start no other."""
    settings = [
        ("Description", ("s", f"Nomarr start of {name}.service")),
        ("TimersMonotonic", ("a(st)", [("OnStartupSec", since_start_us)])),
        ("TimersCalendar", ("a(ss)", [("OnCalendar", f"@{-(-wall_ms // 1000)}")])),
        ("AccuracyUSec", ("t", 100_000)),
        ("RemainAfterElapse", ("b", False)),
    ]
    return _start(f"{name}.timer", settings)


def timer_of(component: Component) -> str:
    return f"nomarr-restart@{component.instance}.timer"


def read_timer(shown: Mapping[str, str]) -> Literal["none", "waiting", "elapsed"]:
    """Read the state of a restart's timer from its Job and SubState."""
    if shown["SubState"] in ("elapsed", "running"):  # running: what it has started still runs
        return "elapsed"
    # A busy manager answers before it has started the timer.
    return "waiting" if shown["SubState"] == "waiting" or shown["Job"] else "none"


def _start(timer: str, settings: list[tuple[str, Any]]) -> Call:
    return Call("StartTransientUnit", "ssa(sv)a(sa(sv))", (timer, "replace", settings, []))
