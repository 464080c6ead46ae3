"""Holds: a file for each instance that must not start, which the unit's condition looks for; so
it survives a reboot. A person's hold is a pause; the others are the controller's.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.files import remove, sync_directory, write_durably

PAUSED: Final = "paused by "
# Out of the condition's sight, but not forgotten: the start that follows may be cut off.
_RESUMING: Final = ".resuming"
_MAX_TEXT: Final = 500


class Holds:
    """The directory ``<state>/hold``."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self, worker: Component) -> str:
        """Why the worker may not start; empty if it may."""
        try:
            with open(self._path(worker), encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_TEXT).strip() or "held"
        except FileNotFoundError:
            return ""

    def hold(self, worker: Component, why: str) -> None:
        """Hold it for a reason that is no person's."""
        os.makedirs(self._directory, 0o755, exist_ok=True)
        write_durably(self._path(worker), f"{why}\n".encode(), mode=0o644)

    def pause(self, worker: Component, by: str) -> bool:
        """Hold it for a person; False if somebody did already."""
        if self.read(worker).startswith(PAUSED):
            return False
        self.hold(worker, f"{PAUSED}{by}")
        remove(self._path(worker) + _RESUMING)
        return True

    def is_paused(self, worker: Component) -> bool:
        """Whether a person holds it, or began to resume it and was cut off."""
        resuming = os.path.exists(self._path(worker) + _RESUMING)
        return resuming or self.read(worker).startswith(PAUSED)

    def begin_resume(self, worker: Component) -> None:
        """From here on it may start."""
        path = self._path(worker)
        if os.path.exists(path):
            os.rename(path, path + _RESUMING)
            sync_directory(self._directory)

    def end_resume(self, worker: Component) -> None:
        """It was started."""
        remove(self._path(worker) + _RESUMING)

    def release(self, worker: Component) -> None:
        """End a hold that no person asked for; a pause stays."""
        why = self.read(worker)
        if why and not why.startswith(PAUSED):
            remove(self._path(worker))

    def forget(self, instance: str) -> bool:
        """Whatever there is for an instance that is no longer configured."""
        path = os.path.join(self._directory, instance)
        found = [remove(path), remove(path + _RESUMING)]
        return any(found)

    def instances(self) -> list[str]:
        """All that have a hold, configured or not."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        return sorted({name.removesuffix(_RESUMING) for name in names if ".new" not in name})

    def _path(self, worker: Component) -> str:
        return os.path.join(self._directory, worker.instance)
