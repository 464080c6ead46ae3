"""A database's file and those beside it, on the file system: made, read and checked, without
SQLite.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.host.files import share
from nomarr_systemd.host.ownership import find_exposed, find_exposed_file

COMPANIONS: Final = ("-shm", "-wal", "")  # the database last
_BESIDE: Final = (".lock", ".setting-aside")


def check_private(path: str) -> None:
    """Raise StoreRefused if others may change the database at ``path``, the files beside it, its
    directory or a parent of that. Nothing is created or changed."""
    directory = os.path.dirname(path)
    exposed = find_exposed(directory)
    for suffix in (*COMPANIONS, *_BESIDE):
        exposed = exposed or find_exposed_file(path + suffix)
    if exposed is not None:
        raise StoreRefused(
            f"{path} could be replaced by others: {exposed.why}",
            hint=f"{exposed.mend}, or point [store] url at a directory of its own",
        )


def create(path: str) -> None:
    """Make an empty file of the right mode, if there is none.

    An existing file must not be opened and closed: by the rules of POSIX, that would drop every
    lock that this process has on it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            share(fd, os.path.dirname(path))
        finally:
            os.close(fd)
    except FileExistsError:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link") from None


def read_note(path: str) -> str:
    """The first bytes of a plain file; empty if it is no plain file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return ""
        raise
    try:
        is_plain = stat.S_ISREG(os.fstat(fd).st_mode)
        return os.read(fd, 64).decode("ascii", "replace") if is_plain else ""
    finally:
        os.close(fd)
