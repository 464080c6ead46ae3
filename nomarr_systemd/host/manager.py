"""systemd's manager, asked and told by ``systemctl`` and ``systemd-run``: the system's or a user's.

Only the calls are here; when to make them is decided above. Names of units come from core.ids.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Final

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import Component

TARGET: Final = "nomarr-workers.target"
SUPERVISOR: Final = "nomarr-supervisor.service"
SHUTDOWN: Final = "shutdown.target"  # has a job while the system, or a user's manager, goes down
_TIMEOUT_S: Final = 60.0
_NOT_LOADED: Final = 5  # systemctl's exit status for a unit to stop that is not there


class ManagerError(NomarrError):
    """systemd refused or could not be reached."""

    code = "systemd"


class NotLoaded(ManagerError):
    """systemd knows of no such unit now."""


class Manager:
    """One service manager. Every method may raise ManagerError."""

    def __init__(self, *, user: bool = False) -> None:
        self._scope = ("--user",) if user else ()
        self._started_us: int | None = None

    def show(self, units: Sequence[str], properties: Sequence[str]) -> dict[str, dict[str, str]]:
        """The properties of each unit, by the name it was asked by; one call for all."""
        if not units:
            return {}
        wanted = ",".join(properties)
        text = self._call("systemctl", "show", f"--property={wanted}", *units)
        # One block for each unit, in the order they were asked for.
        blocks = [_parse_block(block) for block in text.rstrip("\n").split("\n\n")]
        return dict(zip(units, blocks, strict=True))

    def show_manager(self, *properties: str) -> dict[str, str]:
        """Properties of the manager itself."""
        return _parse_block(self._call("systemctl", "show", f"--property={','.join(properties)}"))

    def list_failed(self, pattern: str) -> list[str]:
        """The loaded units of this pattern that are ``failed``."""
        text = self._call(
            *("systemctl", "list-units", "--state=failed", "--plain", "--no-legend", "--full"),
            *("--all", pattern),
        )
        return [line.split()[0] for line in text.splitlines() if line.strip()]

    def start(self, unit: str) -> None:
        """Queue a start and do not wait for it."""
        self._call("systemctl", "start", "--no-block", unit)

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

        By --on-startup, an absolute time: --on-active begins again at every daemon-reload. One
        that is there already is replaced.
        """
        timer = timer_of(component)
        if self._started_us is None:
            shown = self.show_manager("UserspaceTimestampMonotonic")
            self._started_us = int(shown["UserspaceTimestampMonotonic"])
        since_start_ms = max(0, due_ms - self._started_us // 1000)
        command = (
            "systemd-run",
            "--quiet",
            f"--on-startup={since_start_ms}ms",
            "--timer-property=AccuracySec=10ms",
            f"--timer-property=PartOf={component.unit} {TARGET}",
            f"--unit=nomarr-restart@{component.instance}.service",
        )
        try:
            self._call(*command)
        except ManagerError:
            self._call("systemctl", "stop", timer)
            self._call(*command)

    def _call(self, program: str, *arguments: str, fine: Sequence[int] = (0,)) -> str:
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
        return done.stdout


def timer_of(component: Component) -> str:
    return f"nomarr-restart@{component.instance}.timer"


def monotonic_ms() -> int:
    """The clock that systemd's timers go by."""
    return time.monotonic_ns() // 1_000_000


def _parse_block(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
