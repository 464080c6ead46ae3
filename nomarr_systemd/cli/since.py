"""``--since``: a moment in the past, as a person says it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.text import quote

_UNITS: Final = {
    "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hour": 3600, "hours": 3600,
    "d": 86_400, "day": 86_400, "days": 86_400, "w": 604_800, "week": 604_800, "weeks": 604_800,
}  # fmt: skip
_AGE = re.compile(r"-?([0-9]{1,6}) ?([a-z]+)(?: ago)?")


def parse_since(text: str, now_ms: int) -> int:
    """The wall time in ms that is meant by ``2h``, ``yesterday`` or ``2026-11-16 12:00``."""
    now = datetime.fromtimestamp(now_ms / 1000).astimezone()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    match = _AGE.fullmatch(text.strip().lower())
    try:
        if match and match[2] in _UNITS:
            then = now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
        elif text in ("today", "yesterday"):
            then = midnight - timedelta(days=text == "yesterday")
        else:
            then = datetime.fromisoformat(text.strip())
            then = then if then.tzinfo else then.astimezone()
        return int(then.timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise BadName(
            f"{quote(text)} is no moment",
            hint='write 30min, 2h, 3d, today, yesterday, or "2026-11-16 12:00"',
        ) from error
