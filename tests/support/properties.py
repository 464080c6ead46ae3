"""Properties of units in another systemd, asked over D-Bus: that takes both sides two milliseconds,
where ``systemctl show`` takes ten, and a test that waits asks again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Final

from nomarr_systemd.systemd.dbus.connection import Bus
from nomarr_systemd.systemd.manager import Manager

# Those whose text is the same by both ways, for every kind of unit that is asked for them.
ASKED: Final = frozenset(
    (
        *("ActiveEnterTimestampMonotonic", "ActiveState", "ControlGroup"),
        *("InactiveEnterTimestampMonotonic", "InvocationID", "Job", "LoadState", "MainPID"),
        *("NRestarts", "Result", "SubState"),
    )
)


def ask(
    place: tuple[str, bool], units: Sequence[str], names: Sequence[str]
) -> dict[str, dict[str, str]]:
    """The properties of each unit. The connection is closed at once: the manager sends every
    signal to every client of its own socket."""
    with closing(Manager(bus=Bus(place=place))) as manager:
        return manager.show(units, names)
