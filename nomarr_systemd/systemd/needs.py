"""Units that a unit requires and that are not active: why it did not start, or was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nomarr_systemd.systemd.manager import Manager

_RELATIONS: Final = ("Requires", "Requisite", "BindsTo")


def find_lacking(manager: Manager, units: Sequence[str]) -> dict[str, str]:
    """Return, for each of these units that requires an inactive one, that one and its state; if
    there are several, a failed one."""
    if not units:
        return {}
    needs = manager.show(units, _RELATIONS)
    names = {name for facts in needs.values() for text in facts.values() for name in text.split()}
    states = manager.show(sorted(names), ("LoadState", "ActiveState"))
    found = {}
    for unit in units:
        lacking = []
        for name in sorted({name for text in needs[unit].values() for name in text.split()}):
            load, active = states[name]["LoadState"], states[name]["ActiveState"]
            # A slice is active while something in it is, and is started with it.
            if active != "active" and not name.endswith(".slice"):
                lacking.append((active != "failed", name, active if load == "loaded" else load))
        if lacking:
            _, name, state = min(lacking)
            found[unit] = f"{name}, which is {state}"
    return found
