"""The part of the kernel's inotify that watches the names in a directory.

Python has no binding of its own; two functions of the C library are enough.
"""

from __future__ import annotations

import os
import struct
from typing import Final

_CREATE, _DELETE, _MOVED_FROM, _MOVED_TO = 0x100, 0x200, 0x40, 0x80
_ONLYDIR: Final = 0x01000000
_OVERFLOW, _IGNORED, _UNMOUNT = 0x4000, 0x8000, 0x2000
_NAMES: Final = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO
_HEADER: Final = struct.Struct("iIII")
_BUFFER: Final = 65536


class DirectoryWatch:
    """Reports which names in a directory were added, removed or replaced. ``fd`` is for poll()."""

    def __init__(self, directory: str) -> None:
        """Watch the directory; OSError if it cannot be watched."""
        import ctypes  # slow to import, and most programs that know of this class never watch

        self._directory = directory
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _failure(directory)
        if libc.inotify_add_watch(self.fd, os.fsencode(directory), _NAMES | _ONLYDIR) < 0:
            error = _failure(directory)
            self.close()
            raise error

    def read(self) -> set[str] | None:
        """Return the names that changed since the last call, or None if some were lost: then check
        all.

        FileNotFoundError when the directory itself is gone.
        """
        names: set[str] = set()
        whole = True
        while True:
            try:
                data = os.read(self.fd, _BUFFER)
            except BlockingIOError:
                return names if whole else None
            place = 0
            while place < len(data):
                _, mask, _, length = _HEADER.unpack_from(data, place)
                place += _HEADER.size
                if mask & (_IGNORED | _UNMOUNT):
                    raise FileNotFoundError(f"{self._directory} was removed")
                if mask & _OVERFLOW:
                    whole = False
                else:
                    names.add(os.fsdecode(data[place : place + length].rstrip(b"\0")))
                place += length

    def close(self) -> None:
        os.close(self.fd)


def _failure(directory: str) -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), directory)
