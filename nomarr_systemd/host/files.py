"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os


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
