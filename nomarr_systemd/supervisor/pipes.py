"""The workers' pipes: made, opened, read. That systemd keeps them is in pipe_store.py, decoding in
core/frames.
"""

from __future__ import annotations

import os
import pwd
import stat
import struct
from collections.abc import Container
from typing import Final

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.host.log import WARNING, log
from nomarr_systemd.supervisor.pipe_store import PipeStore

_MODE: Final = 0o600
_ACL: Final = "system.posix_acl_access"
_ACL_VERSION, _ANY_ID = 2, 0xFFFF_FFFF
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20  # kinds of its entries
_READ, _WRITE = 4, 2
PIPE_BYTES: Final = 65_536  # a pipe's size: a read of all of it ends at the end of a line


def read(fd: int) -> bytes | None:
    """What is in a pipe, up to PIPE_BYTES; None if it is empty, b"" if it has no writer."""
    try:
        return os.read(fd, PIPE_BYTES)
    except BlockingIOError:
        return None


def grant(fd: int, user: str) -> None:
    """Let one user and the owner write to a pipe, and no other user: by an ACL, since only root can
    give a file to another group."""
    try:
        uid = pwd.getpwnam(user).pw_uid
        entries = (
            (_OWNER, _READ | _WRITE, _ANY_ID),
            (_USER, _WRITE, uid),
            (_GROUP, 0, _ANY_ID),
            (_MASK, _WRITE, _ANY_ID),
            (_OTHERS, 0, _ANY_ID),
        )
        packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(fd, _ACL, struct.pack("<I", _ACL_VERSION) + packed)
    except (KeyError, OSError) as error:
        log(WARNING, f"{user} cannot be allowed to write a pipe: its frames are lost", error=error)


class Pipes:
    """The directory of FIFOs, one per instance. ``store`` is told of changes, and filled later."""

    def __init__(self, directory: str, store: PipeStore) -> None:
        self.directory = directory
        self._store = store
        try:
            os.makedirs(directory, exist_ok=True)
            os.chmod(directory, 0o711)  # noqa: S103 (a worker finds its own by name)
        except OSError as error:
            raise NomarrError(
                f"cannot make {directory}: {error.strerror}", hint="check the owner of its parent"
            ) from error

    def open(self, instance: str) -> int:
        """The reading end of an instance's FIFO: the stored one if it is still in its place, else
        a new one."""
        path = os.path.join(self.directory, instance)
        stored = self._store.taken.pop(instance, [])
        good = next((fd for fd in stored if _is_at(fd, path)), -1)
        for fd in stored:
            if fd != good:
                os.close(fd)
        if good >= 0:
            return good
        self._store.is_whole = False
        try:
            return _make(path)
        except OSError as error:
            raise NomarrError(
                f"cannot make the pipe {path}: {error.strerror}",
                hint=f"ls -l {self.directory} shows what is there",
            ) from error

    def give_up_stored(self) -> None:
        """Discard the stored pipes that were not opened."""
        for instance, fds in self._store.taken.items():
            self.discard(instance, fds)
        self._store.taken.clear()

    def tidy(self, wanted: Container[str]) -> None:
        """Remove the pipes of instances that are no longer configured."""
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if name not in wanted and _is_fifo(path):
                os.unlink(path)

    def discard(self, instance: str, fds: list[int]) -> None:
        """Close and remove an instance's pipe: its writers get EPIPE when it is not stored."""
        self._store.is_whole = False
        for fd in fds:
            os.close(fd)
        path = os.path.join(self.directory, os.path.basename(instance))
        if _is_fifo(path):
            os.unlink(path)


def _make(path: str) -> int:
    """Make a FIFO and open it for reading. An existing one is used again: a worker may have it
    open. (If it were opened for writing, too, its end would never be seen.)"""
    try:
        os.mkfifo(path, _MODE)
    except FileExistsError:
        if not _is_fifo(path) or os.lstat(path).st_uid != os.geteuid():
            os.unlink(path)
            os.mkfifo(path, _MODE)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    os.fchmod(fd, _MODE)  # independent of the umask
    return fd


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_at(fd: int, path: str) -> bool:
    """Whether it is the FIFO at this path, and ours."""
    opened = os.fstat(fd)
    try:
        placed = os.lstat(path)
    except FileNotFoundError:
        return False
    is_ours = stat.S_ISFIFO(opened.st_mode) and opened.st_uid == os.geteuid()
    return is_ours and os.path.samestat(opened, placed)
