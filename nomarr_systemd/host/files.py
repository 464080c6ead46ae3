"""Files that are there whole or not at all, also after a power cut; and files to lock by."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


def write_durably(path: str, content: bytes, *, mode: int = 0o600) -> None:
    """Write, fsync, rename into place, fsync the directory."""
    temporary = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except OSError:
        remove(temporary)
        raise
    sync_directory(os.path.dirname(path))


def remove(path: str) -> bool:
    """Unlink; False if it was not there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def sync_directory(directory: str) -> None:
    """Make names that were added or removed in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Wait until nobody else has this file locked, and keep it so; a kill lets go of it."""
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
