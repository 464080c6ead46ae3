"""The program ``systemctl``, and the errors of systemd's manager, by whatever way it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nomarr_systemd.core.errors import NomarrError, NotPermitted
from nomarr_systemd.systemd.dbus.connection import WAIT_S

TIMEOUT_S: Final = 60.0


class ManagerError(NomarrError):
    """systemd refused or could not be reached."""

    code = "systemd"


class Refused(ManagerError):
    """systemd answered and refused this one request."""


class NotLoaded(Refused):
    """systemd knows of no such unit now."""


class AlreadyThere(Refused):
    """A unit of that name is loaded."""


class Masked(Refused):
    """The unit is masked."""


class NotAllowed(Refused, NotPermitted):
    """systemd does not let this user do that."""

    code = NotPermitted.code
    exit_status = NotPermitted.exit_status


def run_systemctl(
    arguments: Sequence[str], *, fine: Sequence[int], on_wait: Callable[[], None] | None
) -> None:
    """Run it; ManagerError unless its exit status is in ``fine``. With ``on_wait``, which is called
    every WAIT_S, there is no time limit."""
    import subprocess  # slow to import, and no restart needs it

    command = ["systemctl", *arguments]
    verb = next((word for word in arguments if not word.startswith("-")), "")
    try:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            while True:
                try:
                    _, output = run.communicate(timeout=WAIT_S if on_wait else TIMEOUT_S)
                    break
                except subprocess.TimeoutExpired as error:
                    if on_wait is None:
                        run.kill()
                        why = f"it did not end in {TIMEOUT_S:g} s"
                        raise ManagerError(f"systemctl {verb}: {why}") from error
                    on_wait()
    except OSError as error:
        raise ManagerError(f"systemctl {verb}: {error}") from error
    if run.returncode not in fine:
        text = output.decode(errors="replace").strip()
        said = _shorten(text) or f"exit status {run.returncode}"
        kind = NotLoaded if "not loaded" in said else _kind_of(said, Refused)
        raise kind(f"{' '.join(command)[:200]}: {said}")


def _kind_of(said: str, other: type[ManagerError]) -> type[ManagerError]:
    """Return the error for what systemctl said."""
    words = ("Access denied", "uthentication required", "Permission denied")
    return NotAllowed if any(each in said for each in words) else other


def _shorten(text: str) -> str:
    """Return the first lines of what systemctl said: it says the same of each of thousands of
    units."""
    first, *more = text.split("\n")
    return f"{first[:300]} (and {len(more)} lines more)" if more else first[:300]
