"""AQL's values: their order across types, equality, truth.

DOCS aql/fundamentals/type-and-value-order/ and aql/operators/. One difference: strings are
compared by code point here, by the server's configured language there.
"""

from __future__ import annotations

from typing import Any, Final

_RANKS: Final = {type(None): 0, bool: 1, int: 2, float: 2, str: 3, list: 4, dict: 5}


def rank(value: Any) -> int:
    """null < bool < number < string < array < object."""
    return _RANKS[type(value)]


def compare(left: Any, right: Any) -> int:
    """Less than zero, zero or more, as ``left`` is less than, equal to or more than ``right``."""
    kind, other = _RANKS[type(left)], _RANKS[type(right)]
    if kind != other:
        return kind - other
    if 0 < kind < 4:
        return int(left > right) - int(left < right)
    if isinstance(left, list):
        longer = max(len(left), len(right))
        return _first(
            (left[n] if n < len(left) else None, right[n] if n < len(right) else None)
            for n in range(longer)
        )
    if isinstance(left, dict):
        return _first((left.get(name), right.get(name)) for name in sorted({*left, *right}))
    return 0


def is_true(value: Any) -> bool:
    """DOCS aql/functions/type-check-and-cast/: null, false, 0 and the empty string are false."""
    return value not in (None, False, 0, "") or isinstance(value, list | dict)


def _first(pairs: Any) -> int:
    for left, right in pairs:
        order = compare(left, right)
        if order:
            return order
    return 0
