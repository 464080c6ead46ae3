"""systemd's manager, the system's or a user's: what it is asked and told.

Questions, starts and timers go over its bus; what changes files or is waited for goes through
``systemctl``. When to do what is decided above. Names of units come from core.ids.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.bus import MANAGER, PROPERTIES, Bus, BusError, Call, unit_path

TARGET: Final = "nomarr-workers.target"
SUPERVISOR: Final = "nomarr-supervisor.service"
CONTROLLER: Final = "nomarr-controller.service"
SHUTDOWN: Final = "shutdown.target"  # has a job while the system, or a user's manager, goes down
_TIMEOUT_S: Final = 60.0
_NOT_LOADED: Final = 5  # systemctl's exit status for a unit to stop that is not there
_INTERFACE: Final = "org.freedesktop.systemd1."
# Properties that are not every unit's.
_SERVICE: Final = (
    *("ControlGroup", "ExecMain", "FileDescriptor", "MainPID", "NFileDescriptor", "NRestarts"),
    *("Memory", "Result", "StatusText", "Watchdog"),
)
_TIMER: Final = ("NextElapse", "LastTrigger")
_GONE: Final = (
    *("org.freedesktop.DBus.Error.UnknownInterface", "org.freedesktop.DBus.Error.UnknownProperty"),
    "org.freedesktop.DBus.Error.UnknownObject",
)
_REPLACE_TRIES: Final = 100


class ManagerError(NomarrError):
    """systemd refused or could not be reached."""

    code = "systemd"


class NotLoaded(ManagerError):
    """systemd knows of no such unit now."""


class AlreadyThere(ManagerError):
    """A unit of that name is loaded."""


_ERRORS: Final[Mapping[str, type[ManagerError]]] = {
    "org.freedesktop.systemd1.NoSuchUnit": NotLoaded,
    "org.freedesktop.systemd1.UnitExists": AlreadyThere,
}


class Manager:
    """One service manager. Every method may raise ManagerError."""

    def __init__(self, *, user: bool = False) -> None:
        self._scope = ("--user",) if user else ()
        self._bus = Bus(user=user, timeout_s=_TIMEOUT_S)
        self._started_us: int | None = None

    def show(self, units: Sequence[str], properties: Sequence[str]) -> dict[str, dict[str, str]]:
        """The properties of each unit as texts, by the name it was asked by; one trip for all.

        What a unit of its kind does not have is empty.
        """
        calls = [
            Call("Get", "ss", (_interface_of(name), name), unit_path(unit), PROPERTIES)
            for unit in units
            for name in properties
        ]
        answers = iter(self._ask_all(calls))
        return {unit: {name: _as_text(next(answers)) for name in properties} for unit in units}

    def show_manager(self, *properties: str) -> dict[str, str]:
        """Properties of the manager itself."""
        calls = [Call("Get", "ss", (MANAGER, name), interface=PROPERTIES) for name in properties]
        return dict(zip(properties, map(_as_text, self._ask_all(calls)), strict=True))

    def list_failed(self, pattern: str) -> list[str]:
        """The loaded units of this pattern that are ``failed``."""
        found = self._ask(Call("ListUnitsByPatterns", "asas", (["failed"], [pattern])))
        return [row[0] for row in found[0]]

    def start(self, unit: str) -> None:
        """Queue a start and do not wait for it."""
        self._ask(Call("StartUnit", "ss", (unit, "replace")))

    def begin_stop(self, unit: str) -> None:
        """Queue a stop and do not wait for it; one that is not there is stopped."""
        with contextlib.suppress(NotLoaded):
            self._ask(Call("StopUnit", "ss", (unit, "replace")))

    def cancel_timer(self, component: Component) -> None:
        """Take the timer of a restart away."""
        self.begin_stop(timer_of(component))

    def stop(self, units: Iterable[str]) -> None:
        """Stop what is there; a unit that is not loaded is stopped already."""
        self._call("systemctl", "stop", *units, fine=(0, _NOT_LOADED))

    def mask(self, units: Iterable[str]) -> None:
        """Mask them all with one reload, and see that it is so."""
        names = list(units)
        self._call("systemctl", "mask", "--quiet", *names)
        for name, shown in self.show(names, ["LoadState"]).items():
            if shown["LoadState"] != "masked":
                raise ManagerError(
                    f"{name} cannot be masked: a file of that name is in the way",
                    hint=f"systemctl cat {name} shows it; move it away",
                )

    def unmask(self, units: Iterable[str]) -> None:
        self._call("systemctl", "unmask", "--quiet", *units)

    def reset_failed(self, units: Iterable[str]) -> None:
        """Forget that they failed; one that nobody has loaded has not."""
        for unit in units:
            with contextlib.suppress(NotLoaded):
                self._call("systemctl", "reset-failed", unit)

    def reload(self) -> None:
        self._call("systemctl", "daemon-reload")

    def reload_or_start(self, unit: str) -> None:
        """Have it read its configuration again, or begin; waits until it is ready."""
        self._call("systemctl", "reload-or-restart", unit)

    def try_restart(self, units: Sequence[str]) -> None:
        """Restart those that run."""
        if units:
            self._call("systemctl", "try-restart", *units)

    def schedule_restart(self, component: Component, due_ms: int) -> None:
        """A timer that starts ``nomarr-restart@`` once, at this CLOCK_MONOTONIC time.

        By OnStartupSec=, an absolute time: OnActiveSec= begins again at every daemon-reload. It
        stays when it has elapsed, so that one that is gone was cancelled. One that is there
        already is replaced.
        """
        if self._started_us is None:
            shown = self.show_manager("UserspaceTimestampMonotonic")
            self._started_us = int(shown["UserspaceTimestampMonotonic"])
        # Whole milliseconds, or a daemon-reload would round it.
        since_start_us = max(0, due_ms - self._started_us // 1000) * 1000
        settings = [
            ("Description", ("s", f"Nomarr backoff of worker {component.instance}")),
            ("TimersMonotonic", ("a(st)", [("OnStartupSec", since_start_us)])),
            ("AccuracyUSec", ("t", 10_000)),
            ("RemainAfterElapse", ("b", True)),
            ("PartOf", ("as", [component.unit, TARGET])),
        ]
        arguments: tuple[Any, ...] = (timer_of(component), "replace", settings, [])
        for _ in range(_REPLACE_TRIES):
            try:
                self._ask(Call("StartTransientUnit", "ssa(sv)a(sa(sv))", arguments))
                return
            except AlreadyThere:
                self.cancel_timer(component)  # unloaded as soon as the manager comes round to it
                time.sleep(0.002)
        raise ManagerError(f"{timer_of(component)} is there and cannot be replaced")

    def timer_state(self, component: Component) -> str:
        """``waiting``, ``running`` (its service too), ``elapsed``, or ``dead``: there is none."""
        timer = timer_of(component)
        shown = self.show([timer], ["SubState", "Job"])[timer]
        # A manager with much to do has answered before it got round to start it.
        return "waiting" if shown["SubState"] == "dead" and shown["Job"] else shown["SubState"]

    def close(self) -> None:
        self._bus.close()

    def _ask(self, call: Call) -> list[Any]:
        return self._ask_all([call])[0]

    def _ask_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        try:
            answers = self._bus.call_all(calls)
        except BusError as error:
            raise ManagerError(str(error)) from error
        found = []
        for call, answer in zip(calls, answers, strict=True):
            if not isinstance(answer, BusError):
                found.append(answer)
            elif call.interface == PROPERTIES and answer.name in _GONE:
                found.append([""])
            else:
                kind = _ERRORS.get(answer.name, ManagerError)
                what = " ".join(str(word) for word in call.arguments[:1])
                raise kind(f"{call.member} {what}: {answer}")
        return found

    def _call(self, program: str, *arguments: str, fine: Sequence[int] = (0,)) -> None:
        import subprocess  # slow to import, and no restart needs it

        command = [program, *self._scope, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ManagerError(f"{program} {arguments[0]}: {error}") from error
        if done.returncode not in fine:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            kind = NotLoaded if "not loaded" in said else ManagerError
            raise kind(f"{program} {' '.join(arguments)[:200]}: {said}")


def timer_of(component: Component) -> str:
    return f"nomarr-restart@{component.instance}.timer"


def monotonic_ms() -> int:
    """The clock that systemd's timers go by."""
    return time.monotonic_ns() // 1_000_000


def _interface_of(name: str) -> str:
    if name.startswith(_SERVICE):
        return f"{_INTERFACE}Service"
    return f"{_INTERFACE}Timer" if name.startswith(_TIMER) else f"{_INTERFACE}Unit"


def _as_text(answer: Sequence[Any]) -> str:
    """A property as ``systemctl show`` writes it."""
    match answer[0]:
        case bool(value):
            return "yes" if value else "no"
        case bytes(value):
            return value.hex()
        case (int(number), str()):  # a job
            return str(number) if number else ""
        case list(values):
            return " ".join(map(str, values))
        case value:
            return str(value)
