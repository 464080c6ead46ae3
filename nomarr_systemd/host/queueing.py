"""Jobs that are queued and not waited for: stopping a worker lasts as long as its job, which may
be longer than anybody should wait for one answer of systemctl.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Final, Literal

from nomarr_systemd.host.manager import ManagerError

_TIMEOUT_S: Final = 60.0
_NOT_LOADED: Final = 5


def queue(
    verb: Literal["start", "stop", "restart", "try-restart"], units: Iterable[str], *, user: bool
) -> None:
    """Have systemd do it, in its own time; ManagerError if it refuses."""
    names = list(units)
    if not names:
        return
    scope = ["--user"] if user else []
    command = ["systemctl", *scope, "--no-block", verb, *names]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ManagerError(f"systemctl {verb}: {error}") from error
    if done.returncode not in ((0, _NOT_LOADED) if verb == "stop" else (0,)):
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise ManagerError(f"systemctl {verb}: {said[:500]}")
