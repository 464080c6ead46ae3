"""What workers leave outside the configuration: files in systemd's directory, masks, links of
enabled units, accounts, loaded units and timers. By this, apply finds what an interrupted
apply did not remove.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import UNIT_PREFIX, UNIT_SUFFIX, Component, parse_component
from nomarr_systemd.host.files import remove
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.public import list_published

_RESTART: Final = "nomarr-restart@"
UNITS: Final = (f"{UNIT_PREFIX}*{UNIT_SUFFIX}", f"{_RESTART}*")  # loaded units of workers


def find_workers(
    directory: str, paths: Paths, loaded: Mapping[str, Mapping[str, str]]
) -> set[Component]:
    """Return every worker that left something anywhere, configured or not. ``loaded``: systemd's
    units of UNITS; inactive ones are skipped."""
    # Not from the pipes: a process that may write there could add any number of names.
    names = [*_unit_files(directory), *Holds(paths.hold).instances()]
    names += [name for name, facts in loaded.items() if facts["ActiveState"] != "inactive"]
    published, _ = list_published(paths.public)
    return published | {worker for name in names if (worker := _worker_of(name))}


def find_masks(directory: str) -> set[Component]:
    """Workers whose unit is masked."""
    return {
        worker
        for name in _listed(directory)
        if not name.endswith(".d")
        and os.path.islink(path := os.path.join(directory, name))
        and os.readlink(path) == "/dev/null"
        and (worker := _worker_of(name))
    }


def remove_files(directory: str, workers: Iterable[Component]) -> None:
    """Remove masks and links of enabled units. Drop-ins that we did not write stay."""
    units = {worker.unit for worker in workers}
    for place in (directory, *_wants(directory)):
        for name in _listed(place):
            path = os.path.join(place, name)
            if name in units and os.path.islink(path):
                remove(path)
        if place != directory and not _listed(place):
            os.rmdir(place)  # as systemctl disable does


def _unit_files(directory: str) -> Iterator[str]:
    for place in (directory, *_wants(directory)):
        for name in _listed(place):
            # A drop-in directory without our file in it is not ours.
            if name.endswith(".d") and not os.path.exists(f"{place}/{name}/20-nomarr.conf"):
                continue
            yield name.removesuffix(".d")


def _wants(directory: str) -> list[str]:
    suffixes = (".wants", ".requires")
    return [f"{directory}/{name}" for name in _listed(directory) if name.endswith(suffixes)]


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _worker_of(name: str) -> Component | None:
    """Return the worker of a unit, a timer or a file."""
    if name.startswith(_RESTART):
        name = name.removeprefix(_RESTART).removesuffix(".timer").removesuffix(UNIT_SUFFIX)
    elif "@" in name and not name.startswith(UNIT_PREFIX):
        return None
    try:
        return parse_component(name)
    except BadName:
        return None
