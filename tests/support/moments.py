"""Moments and runs by number."""

from __future__ import annotations

from typing import Any

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment

BOOT = "b" * 32


PLAIN = Rules(backoff_jitter=0)


def at(seconds: float, boot_id: str = BOOT) -> Moment:
    ms = round(seconds * 1000)
    return Moment(1_700_000_000_000 + ms, boot_id, ms)


def run(number: int) -> str:
    return f"{number:032x}"


def death(
    invocation: str,
    kind: str = "exit",
    code: int = -1,
    run_ms: int | None = None,
    *,
    component: str = "worker:tag:0",
    **excuses: Any,
) -> Death:
    """Make a Death of ``worker:tag:0``, or of another component."""
    return Death(component, invocation, kind, code, run_ms=run_ms, **excuses)
