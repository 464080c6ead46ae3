"""Holds: one file for each instance that must not start; the unit's condition looks for it, so a
hold survives a reboot. A hold made by a person is a pause; the controller makes the others.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.text import clean, one_line
from nomarr_systemd.host.files import remove, sync_directory, write_durably

PAUSED: Final = "paused by "
UNREADABLE: Final = "its hold cannot be read: "
# The unit's condition ignores this name; the file records that a start is still to follow.
_RESUMING: Final = ".resuming"
_MAX_TEXT: Final = 500


class Holds:
    """The directory ``<state>/hold``."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self, worker: Component) -> str:
        """Why the worker may not start, in one printable line; empty if it may.

        Never raises: systemd refuses the start of a worker whose hold exists, readable or not.
        """
        try:
            with open(self._path(worker), encoding="utf-8", errors="replace") as file:
                return one_line(file.read(_MAX_TEXT).strip()) or "held"
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{UNREADABLE}{error.strerror} ({self._path(worker)})"

    def hold(self, worker: Component, why: str) -> None:
        """Hold the worker for a reason that the controller gives."""
        os.makedirs(self._directory, 0o755, exist_ok=True)
        text = clean(why, _MAX_TEXT)
        write_durably(self._path(worker), f"{text}\n".encode("utf-8", "replace"), mode=0o644)

    def pause(self, worker: Component, by: str) -> bool:
        """Hold the worker for a person; False if it is paused already."""
        if self.read(worker).startswith(PAUSED):
            return False
        self.hold(worker, f"{PAUSED}{by}")
        remove(self._path(worker) + _RESUMING)
        return True

    def is_paused(self, worker: Component) -> bool:
        """True if a person paused it, or a resume of it was cut off before the start."""
        resuming = os.path.exists(self._path(worker) + _RESUMING)
        return resuming or self.read(worker).startswith(PAUSED)

    def begin_resume(self, worker: Component) -> None:
        """Let the worker start, and record that the start is still to follow."""
        path = self._path(worker)
        if os.path.exists(path):
            os.rename(path, path + _RESUMING)
            sync_directory(self._directory)

    def end_resume(self, worker: Component) -> None:
        """Forget the resume: the worker was started."""
        remove(self._path(worker) + _RESUMING)

    def release(self, worker: Component) -> None:
        """Remove a hold made by the controller; pauses and unreadable holds stay."""
        why = self.read(worker)
        if why and not why.startswith((PAUSED, UNREADABLE)):
            remove(self._path(worker))

    def forget(self, instance: str) -> bool:
        """Remove every file of an instance that is no longer configured; False if there is none."""
        path = os.path.join(self._directory, instance)
        found = [remove(path), remove(path + _RESUMING)]
        return any(found)

    def instances(self) -> list[str]:
        """All instances that have a hold, configured or not."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        return sorted({name.removesuffix(_RESUMING) for name in names if ".new" not in name})

    def _path(self, worker: Component) -> str:
        return os.path.join(self._directory, worker.instance)
