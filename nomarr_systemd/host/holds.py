"""Holds: one file for each instance that must not start; the unit's condition looks for it, so a
hold survives a reboot. A hold made by a person is a pause; the controller makes the others.

A pause of a pool, or of all pools, also makes a switch: a file that says that workers which are
added later begin paused, too. A pause may have an end, by the wall clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import clean, one_line
from nomarr_systemd.host.files import remove, sync_directory, write_durably

PAUSED: Final = "paused by "
UNREADABLE: Final = "its hold cannot be read: "
# The unit's condition ignores this name; the file records that a start is still to follow.
_RESUMING: Final = ".resuming"
_MAX_TEXT: Final = 500
_UNTIL: Final = "until="
# Switches; no instance has such a name.
ALL: Final = "all"
_POOL: Final = "pool."


class Pause(NamedTuple):
    """A person's pause: the reason of the hold, and its end."""

    why: str
    until_ms: int | None = None  # wall-clock time; None: until a person resumes

    def is_over(self, now_ms: int) -> bool:
        return self.until_ms is not None and self.until_ms <= now_ms


def make_pause(by: str, reason: str = "", until_ms: int | None = None) -> Pause:
    """Return the pause that a person asks for."""
    why = f"{PAUSED}{by}" + (f": {reason}" if reason else "")
    if until_ms is not None:
        end = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(until_ms // 1000))
        why += f" (until {end})"
    return Pause(clean(why, _MAX_TEXT), until_ms)


class Holds:
    """The directory ``<state>/hold``."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self, worker: Component) -> str:
        """Return why the worker may not start, in one printable line; empty if it may.

        Never raises: systemd refuses the start of a worker whose hold exists, readable or not.
        """
        found = self._read(worker.instance)
        return found.why if found else ""

    def read_all(self, workers: Iterable[Component]) -> dict[Component, str]:
        """Return why workers may not start, as ``read`` does; only those that may not."""
        try:
            names = set(self._names())
        except OSError:  # systemd may still find what this user may not list
            return {each: why for each in workers if (why := self.read(each))}
        return {each: self.read(each) for each in workers if each.instance in names}

    def read_pause(self, worker: Component) -> Pause | None:
        """Return the person's pause of the worker; None if there is none."""
        found = self._read(worker.instance)
        return found if found and found.why.startswith(PAUSED) else None

    def hold(self, worker: Component, why: str) -> None:
        """Hold the worker for a reason that the controller gives."""
        self._write(worker.instance, Pause(clean(why, _MAX_TEXT)))

    def pause(self, worker: Component, pause: Pause) -> bool:
        """Hold the worker for a person; False if it is paused already. A pause with an end replaces
        another, and so does one without an end if the other has one."""
        known = self.read_pause(worker)
        if known and known.until_ms is None and pause.until_ms is None:
            return False
        self._write(worker.instance, pause)
        remove(self._path(worker) + _RESUMING)
        return True

    def is_over(self, worker: Component, now_ms: int) -> bool:
        """Return True if the end of its pause has come, or a resume of it was cut off and nothing
        else holds it since."""
        found = self._read(worker.instance)
        if found is None:
            return os.path.exists(self._path(worker) + _RESUMING)
        return found.why.startswith(PAUSED) and found.is_over(now_ms)

    def next_end_ms(self, workers: Iterable[Component]) -> int | None:
        """Return when the next pause of one of these workers ends, by the wall clock."""
        there = set(self.instances())
        found = (self._read(each.instance) for each in workers if each.instance in there)
        ends = [each.until_ms for each in found if each and each.until_ms is not None]
        return min(ends, default=None)

    # Switches

    def switch(self, pool: str, pause: Pause) -> None:
        """Have workers of the pool that are added later begin paused; ALL: those of every pool."""
        self._write(pool if pool == ALL else _POOL + pool, pause)

    def read_switch(self, pool: str, now_ms: int) -> Pause | None:
        """Return the pause that a new worker of the pool begins with; None if it may run."""
        for name in (ALL, _POOL + pool):
            found = self._read(name)
            if found and not found.is_over(now_ms):
                return found
        return None

    def unswitch(self, pools: Iterable[str], others: Iterable[str]) -> None:
        """Let new workers of these pools run. A switch for everything is made one for each of
        the other pools."""
        everything = self._read(ALL)
        if everything:
            for other in others:
                self.switch(other, everything)
            remove(os.path.join(self._directory, ALL))
        for pool in pools:
            remove(os.path.join(self._directory, _POOL + pool))

    # Resumes

    def is_paused(self, worker: Component) -> bool:
        """Return True if a person paused it, or a resume of it was cut off before the start."""
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
        """Return all instances that have a hold, configured or not."""
        names = (name for name in self._names() if name != ALL and not name.startswith(_POOL))
        return sorted({name.removesuffix(_RESUMING) for name in names})

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._directory) if ".new" not in name]
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> Pause | None:
        path = os.path.join(self._directory, name)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MAX_TEXT + 100).strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            return Pause(f"{UNREADABLE}{error.strerror} ({path})")
        why, _, until = text.rpartition(f"\n{_UNTIL}")
        if why and until.isascii() and until.isdigit():
            return Pause(one_line(why[:_MAX_TEXT]), int(until[:15]))
        return Pause(one_line(text[:_MAX_TEXT]) or "held")

    def _write(self, name: str, pause: Pause) -> None:
        os.makedirs(self._directory, 0o755, exist_ok=True)
        text = f"{pause.why}\n"
        if pause.until_ms is not None:
            text += f"{_UNTIL}{pause.until_ms}\n"
        path = os.path.join(self._directory, name)
        write_durably(path, text.encode("utf-8", "replace"), mode=0o644)

    def _path(self, worker: Component) -> str:
        return os.path.join(self._directory, worker.instance)
