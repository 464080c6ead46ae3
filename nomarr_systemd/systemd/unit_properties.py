"""Properties of units on D-Bus: which interface has them, and their values as ``systemctl show``
writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

_NO_LIMIT: Final = 2**64 - 1
_INTERFACE: Final = "org.freedesktop.systemd1."
# Properties that every unit has; others are those of its kind.
_EVERY_UNITS: Final = frozenset(
    (
        *("ActiveEnterTimestampMonotonic", "ActiveExitTimestampMonotonic", "ActiveState"),
        *("BindsTo", "ConditionResult"),
        *("ConditionTimestampMonotonic", "InactiveEnterTimestampMonotonic"),
        *("DropInPaths", "FragmentPath", "InactiveExitTimestampMonotonic"),
        *("InvocationID", "Job", "LoadError", "LoadState", "NeedDaemonReload", "Requires"),
        *("Requisite", "SubState", "UnitFileState"),
    )
)
# Properties in the answer of ListUnitsByNames, and how to take each from a row of it.
LISTED: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "LoadState": itemgetter(2),
    "ActiveState": itemgetter(3),
    "SubState": itemgetter(4),
    "Job": itemgetter(7, 9),
}

# What systemd shows of a unit that has not run since it was loaded; timestamps are 0.
_NEVER_RAN: Final = {
    "InvocationID": "",
    "MainPID": "0",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "Result": "success",
    "ConditionResult": "no",
}


def show_unloaded(names: Sequence[str]) -> dict[str, str]:
    """Return those of these properties of a unit that is not loaded that no file decides."""
    times = {name: "0" for name in names if name.endswith("TimestampMonotonic")}
    return times | {name: _NEVER_RAN[name] for name in names if name in _NEVER_RAN}


def interface_of(unit: str, name: str) -> str:
    """Return the interface that has this property of the unit."""
    kind = "Unit" if name in _EVERY_UNITS else unit.rpartition(".")[2].capitalize()
    return f"{_INTERFACE}{kind}"


def as_text(name: str, answer: Sequence[Any]) -> str:
    """Convert a property to the text that ``systemctl show`` writes."""
    match answer[0]:
        case bool(value):
            return "yes" if value else "no"
        case bytes(value):
            return value.hex()
        case list(values):
            return " ".join(map(str, values))
        case (int(number), str()):  # a job
            return str(number) if number else ""
        case (str(code), str(text)):  # an error
            return f'{code} "{text}"' if code else ""
        case int(number) if number == _NO_LIMIT:
            return "[not set]" if name.endswith(("Current", "Peak")) else "infinity"
        case value:
            return str(value)
