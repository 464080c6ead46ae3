"""AQL's operators and functions on values and on expressions.

DOCS aql/operators/ and aql/functions/. How they are written is ``aql``'s matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.arango_standin.values import is_true, rank

Row = dict[str, Any]
Expression = Callable[[Row], Any]

COMPARISONS: dict[str, Callable[[int], bool]] = {
    "==": lambda order: order == 0,
    "!=": lambda order: order != 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "IS_NULL": lambda value: rank(value) == 0,
    "IS_BOOL": lambda value: rank(value) == 1,
    "IS_NUMBER": lambda value: rank(value) == 2,
    "IS_STRING": lambda value: rank(value) == 3,
    "IS_ARRAY": lambda value: rank(value) == 4,
    "IS_OBJECT": lambda value: rank(value) == 5,
}

CLOCK: dict[str, Callable[[], int]] = {"DATE_NOW": lambda: time.time_ns() // 1_000_000}


def either(left: Expression, right: Expression) -> Expression:
    return lambda row: left(row) if is_true(left(row)) else right(row)


def both(left: Expression, right: Expression) -> Expression:
    return lambda row: right(row) if is_true(left(row)) else left(row)


def attribute(value: Expression, name: Expression) -> Expression:
    def read(row: Row) -> Any:
        holder, key = value(row), name(row)
        if isinstance(holder, dict) and isinstance(key, str):
            return holder.get(key)
        if isinstance(holder, list) and isinstance(key, int) and -len(holder) <= key < len(holder):
            return holder[key]
        return None  # the attribute of what has none is null

    return read
