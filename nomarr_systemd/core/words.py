"""Numbers as people say them."""

from __future__ import annotations

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


def describe_ms(ms: int) -> str:
    """A duration in at most two units: ``3 min 12 s``, ``1.5 s``, ``5 min``, ``250 ms``."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 10_000 and ms % 1000:
        return f"{ms / 1000:.1f} s".replace(".0 s", " s")
    for position, (unit, size) in enumerate(_UNITS):
        if ms >= size:
            text = f"{ms // size} {unit}"
            if position + 1 < len(_UNITS):
                smaller, smaller_size = _UNITS[position + 1]
                rest = ms % size // smaller_size
                return f"{text} {rest} {smaller}" if rest else text
            return text
    raise AssertionError(ms)  # every duration of a second or more has found its unit
