"""How exposed systemd calls services of a booted machine, as they are packaged."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from tests.support.installed import READERS_OF_THE_BOOT_ID
from tests.support.machine import Machine


@contextlib.contextmanager
def as_packaged(machine: Machine) -> Iterator[None]:
    """The units without what the tests add to them."""
    places = [
        machine.path(f"/usr/local/lib/systemd/system/{unit}.d/90-nspawn.conf")
        for unit in READERS_OF_THE_BOOT_ID
    ]
    texts = [place.read_text() for place in places]
    try:
        for place in places:
            place.unlink()
        machine.systemctl("daemon-reload")
        yield
    finally:
        for place, text in zip(places, texts, strict=True):
            place.write_text(text)
        machine.systemctl("daemon-reload")


def read_exposure(machine: Machine, unit: str) -> float:
    """What ``systemd-analyze security`` says of the unit, from 0 to 10."""
    said = machine.run("systemd-analyze", "security", "--no-pager", unit).stdout
    overall = re.search(r"Overall exposure level for .*: ([0-9.]+) ", said)
    assert overall, said
    print(f"exposure of {unit}: {overall[1]}")
    return float(overall[1])
