"""``--since``: the one grammar of moments in the past, for every verb that has the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import click

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.text import quote

GRAMMAR: Final = (
    "30s, 15min, 2h, 3d, 1w or 2 hours ago; today, yesterday; 03:00 (the most recent);"
    " 2026-11-16 or '2026-11-16 03:00'."
)
_UNITS: Final = {
    "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600,
    "d": 86_400, "day": 86_400, "w": 604_800, "week": 604_800,
}  # fmt: skip
_AGE: Final = re.compile(r"-?([0-9]{1,9}) ?([a-z]+)(?: ago)?")
_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?")


def since_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--since", metavar="WHEN", help=f"Only from WHEN on: {GRAMMAR}")(function)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration: 90s, 15min, 2h, 3d, 1w."""
    match = _AGE.fullmatch(text.strip().lower())
    unit = match and (_UNITS.get(match[2]) or _UNITS.get(match[2].removesuffix("s")))
    if not match or not unit or not int(match[1]) or text.strip().startswith("-"):
        raise BadName(f"{quote(text)} is not a duration", hint="write 90s, 15min, 2h, 3d or 1w")
    return float(int(match[1]) * unit)


def parse_since(text: str, now_ms: int) -> int:
    """Return the moment in ms of wall time; times of day are in this machine's time zone."""
    now = datetime.fromtimestamp(now_ms / 1000).astimezone()
    said = text.strip().lower()
    try:
        return int(_find_moment(said, now).timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise BadName(f"--since {quote(text)}: not a time", hint=f"write {GRAMMAR}") from error


def _find_moment(said: str, now: datetime) -> datetime:
    """Return the moment; ValueError if the text names none."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if said in ("now", "today", "yesterday"):
        return now if said == "now" else midnight - timedelta(days=said == "yesterday")
    match = _AGE.fullmatch(said)
    size = match and (_UNITS.get(match[2]) or _UNITS.get(match[2].removesuffix("s")))
    if match and size:
        return now - timedelta(seconds=int(match[1]) * size)
    if match := _CLOCK.fullmatch(said):
        hour, minute, second = (int(part or 0) for part in match.groups())
        then = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return then if then <= now else then - timedelta(days=1)
    moment = datetime.fromisoformat(said.upper())
    return moment if moment.tzinfo else moment.astimezone()
