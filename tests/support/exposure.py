"""How exposed systemd calls services of a booted machine, as they are packaged."""

from __future__ import annotations

import re

from tests.support.machine import Machine


def read_exposure(machine: Machine, unit: str) -> float:
    """What ``systemd-analyze security`` says of the unit, from 0 to 10."""
    said = machine.run("systemd-analyze", "security", "--no-pager", unit).stdout
    overall = re.search(r"Overall exposure level for .*: ([0-9.]+) ", said)
    assert overall, said
    print(f"exposure of {unit}: {overall[1]}")
    return float(overall[1])
