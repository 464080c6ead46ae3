"""The part of the kernel's inotify that watches the names in a directory.

Python has no binding of its own; two functions of the C library are enough. A child process calls
them: ``ctypes`` would stay in the memory of a program that watches for as long as it runs.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Final, NoReturn

_CREATE, _DELETE, _MOVED_FROM, _MOVED_TO = 0x100, 0x200, 0x40, 0x80
_ONLYDIR: Final = 0x01000000
_OVERFLOW, _IGNORED, _UNMOUNT = 0x4000, 0x8000, 0x2000
_NAMES: Final = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO
_HEADER: Final = struct.Struct("iIII")
_BUFFER: Final = 65536


class DirectoryWatch:
    """Reports which names in a directory were added, removed or replaced. ``fd`` is for poll()."""

    def __init__(self, directory: str) -> None:
        """Watch the directory; OSError if it cannot be watched. Call it before any thread is
        started."""
        self._directory = directory
        self.fd = _open_watch(directory)

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


def _open_watch(directory: str) -> int:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = os.fork()
            if child == 0:
                _make_watch(directory, theirs)
        answer, fds, _, _ = socket.recv_fds(ours, 16, 1, socket.MSG_CMSG_CLOEXEC)
    os.waitpid(child, 0)
    if not fds:
        number = int(answer or errno.ECHILD)
        raise OSError(number, os.strerror(number), directory)
    return fds[0]


def _make_watch(directory: str, reply: socket.socket) -> NoReturn:
    """Be the child: reply with the descriptor, or the number of an error."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _NAMES | _ONLYDIR
        if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(directory), flags) < 0:
            reply.send(str(ctypes.get_errno()).encode())
        else:
            socket.send_fds(reply, [b"0"], [fd])
    finally:
        os._exit(0)
