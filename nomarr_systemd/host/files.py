"""Files that are written whole or not at all, also after a power cut; and locks on files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Final

_RETRY_S: Final = 0.002
_MAX_RETRY_S: Final = 0.02


def write_durably(path: str, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file: write a temporary one, fsync, rename it into place, fsync the directory."""
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


def write_all_durably(directory: str, files: Mapping[str, bytes], *, mode: int) -> None:
    """Write many files below a directory, each whole or not at all. The file system is synced as a
    whole, before and after they are renamed: to sync thousands of files one by one takes long."""
    if not files:
        return
    temporary = {path: f"{path}.{os.getpid()}.new" for path in files}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        for path, content in files.items():
            with open(os.open(temporary[path], flags, mode), "wb") as file:
                file.write(content)
        sync_file_system(directory)
        for path, written in temporary.items():
            os.rename(written, path)
    except OSError:
        for written in temporary.values():
            remove(written)
        raise
    sync_file_system(directory)


def sync_file_system(directory: str) -> None:
    """Make all that was written to the directory's file system durable."""
    import ctypes  # slow to import, and only apply needs it

    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), directory)
    finally:
        os.close(fd)


def share(fd: int, directory: str) -> None:
    """Make a file of ours writable for the group if its directory is (2770). The directory of
    the jobs is: workers of several users and the supervisor share it."""
    shared = stat.S_ISGID | stat.S_IWGRP
    facts = os.fstat(fd)
    is_shared = os.stat(directory).st_mode & shared == shared
    if is_shared and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) != 0o660:
        os.fchmod(fd, 0o660)


def remove(path: str) -> bool:
    """Remove a file; return False if it was not there."""
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
def locked(path: str, patience_s: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on this file, which is created if missing; a kill releases it.

    Waits without end, or ``patience_s`` at most: then TimeoutError, an OSError that names the
    file. A symbolic link in its place is refused.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        share(fd, os.path.dirname(path))
        if patience_s is None:
            fcntl.flock(fd, fcntl.LOCK_EX)
        else:
            _lock_within(fd, path, patience_s)
        yield
    finally:
        os.close(fd)


def _lock_within(fd: int, path: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    retry_s = _RETRY_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                why = f"it stayed locked for {patience_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, path) from error
        time.sleep(retry_s)
        retry_s = min(retry_s * 1.2, _MAX_RETRY_S)
