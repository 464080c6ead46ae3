"""Keeps the log and the index of a SQLite file (``-wal``, ``-shm``) where they are when the last
process closes it. Then neither an open nor a commit needs room on the disk, as long as the log and
the file are large enough (``SqliteFile.keep_room``).

SQLite removes them at the last close, unless it was told SQLITE_FCNTL_PERSIST_WAL, which Python
cannot do; and whoever opens the file first truncates the index, which frees its blocks. It does
neither while another process has locked the file. So this process takes these locks for a second
owner: an open file description (fcntl(2), F_OFD_SETLK). Other programs that use the file notice
nothing: the locks are SQLite's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final

# Bytes that SQLite locks (os_unix.c): all that use the file share the first, in the file itself;
# all that use the index share the second, in the index.
_SHARED: Final = (0x40000002, 510)
_INDEX_USERS: Final = (128, 1)
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of Linux with 64 bits
# The index begins with its header, the same again, and how many frames were copied from the log to
# the file; the header has the number of all frames (walformat.html).
_INDEX: Final = struct.Struct("=48s48sI")
_FRAMES: Final = struct.Struct("=I")
_FRAMES_AT: Final = 16
_LOG_HEADER: Final = 32  # bytes
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
Identity = tuple[int, int]  # device and inode


class _Descriptors:
    """What this process has open of one file. To close one of them would release the locks that
    SQLite has on it (fcntl(2)), so they stay open until its last connection is closed."""

    def __init__(self) -> None:
        self.users = 0
        self.file = -1
        self.index = -1
        self.log = -1

    def close(self) -> None:
        for fd in (self.file, self.index, self.log):
            if fd != -1:
                os.close(fd)


_open: Final[dict[Identity, _Descriptors]] = {}


def begin(path: str, identity: Identity) -> None:
    """Call it before SQLite opens the file, and ``end`` after it has closed it."""
    ours = _open.setdefault(identity, _Descriptors())
    ours.users += 1
    if ours.index == -1:
        ours.index = _take(f"{path}-shm", _INDEX_USERS, clear=True)


def hold(path: str, identity: Identity) -> None:
    """Call it when SQLite has opened the file in WAL mode."""
    ours = _open[identity]
    if ours.file == -1:
        ours.file = _take(path, _SHARED)
    if ours.index == -1:
        ours.index = _take(f"{path}-shm", _INDEX_USERS)
    if ours.log == -1:
        with contextlib.suppress(OSError):
            ours.log = os.open(f"{path}-wal", _FLAGS)


def end(identity: Identity) -> None:
    ours = _open[identity]
    ours.users -= 1
    if not ours.users:
        del _open[identity]
        with contextlib.suppress(OSError):
            _empty_log(ours)
        ours.close()


def _empty_log(ours: _Descriptors) -> None:
    """Make the log one without content, as SQLite leaves none after the last close, if no process
    uses it and all of it is in the file. Else it would be applied to a file that is restored from a
    backup."""
    if -1 in (ours.index, ours.log):
        return
    _lock(ours.index, fcntl.F_WRLCK, _INDEX_USERS)
    header, copy, copied = _INDEX.unpack(os.pread(ours.index, _INDEX.size, 0))
    (frames,) = _FRAMES.unpack_from(header, _FRAMES_AT)
    if header == copy and frames == copied:
        os.pwrite(ours.log, bytes(_LOG_HEADER), 0)


@contextlib.contextmanager
def index_kept(path: str) -> Iterator[None]:
    """Inside, SQLite may open the file at ``path`` for reading: the blocks of its index stay."""
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    begin(path, identity)
    try:
        yield
    finally:
        end(identity)


def _take(path: str, place: tuple[int, int], *, clear: bool = False) -> int:
    """Open a file and share a lock on it; -1 if there is no such file, or SQLite is to do what it
    usually does. ``clear``: if no process has locked it, make its content zeros: to SQLite this is
    an index that has to be made again, as after a truncation."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return -1
    try:
        if clear:
            with contextlib.suppress(BlockingIOError):
                _lock(fd, fcntl.F_WRLCK, place)
                left = os.fstat(fd).st_size
                if os.pwrite(fd, bytes(left), 0) != left:
                    raise OSError
        _lock(fd, fcntl.F_RDLCK, place)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _lock(fd: int, kind: int, place: tuple[int, int]) -> None:
    """Take a lock or change its kind, without waiting: BlockingIOError if another owner has it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, *place, 0))
