"""The workers' pipes: made, opened, kept in systemd's store of file descriptors, taken back.

A stored pipe outlives the supervisor: what workers write meanwhile waits in it, and they notice
nothing. Who reads and what it means is decided elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from typing import Final

from systemd import daemon

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.supervisor.log import WARNING, log

MODE: Final = 0o620


def take_stored() -> dict[str, list[int]]:
    """The file descriptors that systemd kept for us, by name."""
    stored: dict[str, list[int]] = {}
    for fd, name in daemon.listen_fds_with_names().items():
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        stored.setdefault(name, []).append(fd)
    return stored


def tell(message: str, *fds: int) -> None:
    """Say something to systemd. It may be away for a moment: no reason to leave."""
    try:
        daemon.notify(message, False, os.getpid(), list(fds))
    except OSError as error:
        log(WARNING, "systemd could not be told", message=message, error=error)


def store(name: str, fd: int) -> None:
    """Have systemd keep ``fd``. Without FDPOLL=0 it would drop a pipe without a writer."""
    tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)


def unstore(name: str) -> None:
    tell(f"FDSTOREREMOVE=1\nFDNAME={name}")


class Pipes:
    """The directory of FIFOs, one per instance."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            os.makedirs(directory, 0o755, exist_ok=True)
        except OSError as error:
            raise NomarrError(
                f"cannot make {directory}: {error.strerror}", hint="check the owner of its parent"
            ) from error

    def open(self, instance: str, stored: list[int]) -> int:
        """The reading end of an instance's FIFO: a stored one that is still in its place, or a
        new one, stored before it is used."""
        path = os.path.join(self.directory, instance)
        good = [fd for fd in stored if _is_at(fd, path)]
        for fd in stored:
            if fd not in good[:1]:
                os.close(fd)
        if len(stored) > 1 or (stored and not good):
            unstore(instance)  # by name, so all of them
        if good:
            if len(stored) > 1:
                store(instance, good[0])
            return good[0]
        try:
            fd = _make(path)
        except OSError as error:
            raise NomarrError(
                f"cannot make the pipe {path}: {error.strerror}",
                hint=f"what is there? ls -l {self.directory}",
            ) from error
        store(instance, fd)
        return fd

    def tidy(self, wanted: Container[str]) -> None:
        """Remove the pipes of instances that went while nobody was here."""
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if name not in wanted and _is_fifo(path):
                os.unlink(path)

    def discard(self, instance: str, fds: list[int]) -> None:
        """Give up an instance's pipe for good: its writers get EPIPE."""
        unstore(instance)
        for fd in fds:
            os.close(fd)
        path = os.path.join(self.directory, os.path.basename(instance))
        if _is_fifo(path):
            os.unlink(path)


def _make(path: str) -> int:
    """A FIFO of the right mode, opened for reading. One that is there is used again: a worker
    may have it open. (Opened for writing too, it would never end.)"""
    try:
        os.mkfifo(path, MODE)
    except FileExistsError:
        if not _is_fifo(path):
            os.unlink(path)
            os.mkfifo(path, MODE)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    os.fchmod(fd, MODE)  # whatever the umask took away
    return fd


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_at(fd: int, path: str) -> bool:
    opened = os.fstat(fd)
    try:
        placed = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISFIFO(opened.st_mode) and os.path.samestat(opened, placed)
