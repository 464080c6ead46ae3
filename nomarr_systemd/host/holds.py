"""Holds: a file for each worker that must not start, with the reason in it. The unit's condition
looks for it, so it survives a reboot.
"""

from __future__ import annotations

import os

from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.files import remove, write_durably
from nomarr_systemd.host.paths import Paths


def read_hold(paths: Paths, component: Component) -> str:
    """Why the worker may not start; empty if it may."""
    try:
        with open(_file(paths, component), encoding="utf-8", errors="replace") as file:
            return file.read(200).strip() or "held"
    except FileNotFoundError:
        return ""


def write_hold(paths: Paths, component: Component, why: str) -> None:
    os.makedirs(paths.hold, 0o755, exist_ok=True)
    write_durably(_file(paths, component), f"{why}\n".encode(), mode=0o644)


def remove_hold(paths: Paths, component: Component) -> bool:
    """False if there was none."""
    return remove(_file(paths, component))


def held_instances(paths: Paths) -> list[str]:
    """The names of all files there."""
    try:
        return sorted(os.listdir(paths.hold))
    except FileNotFoundError:
        return []


def _file(paths: Paths, component: Component) -> str:
    return os.path.join(paths.hold, component.instance)
