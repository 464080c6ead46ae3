"""The pipes in systemd's store of file descriptors.

A stored pipe outlives the supervisor: what workers write meanwhile stays in it, and they notice
nothing. systemd compares each descriptor that it is to keep with all that it has, which with 4,096
takes eight million system calls; so pipes are stored in parcels. A parcel is a socket, in whose
queue is one message with up to PARCEL descriptors and their names. It is peeked at, so the message
stays where it is, and as long as systemd has the socket the kernel has the pipes.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from itertools import islice
from typing import Final

from nomarr_systemd.core.ids import find_instance
from nomarr_systemd.host.log import WARNING, log
from nomarr_systemd.systemd.notify import notify

PARCEL: Final = 253  # descriptors in one message: the kernel takes no more
_PREFIX: Final = "pipes."  # of a parcel's name; the number of its generation follows
_NAMES_BYTES: Final = 65_536
notify_failures = 0  # of this process


def tell(message: str, *fds: int) -> bool:
    """Send a notification to systemd. If that fails, it is counted, and False is returned."""
    global notify_failures
    try:
        notify(message, fds=fds)
    except OSError as error:
        notify_failures += 1
        log(WARNING, "a notification to systemd failed", message=message, error=error)
        return False
    return True


def unstore(name: str) -> None:
    """Have systemd close all that it has kept by this name."""
    tell(f"FDSTOREREMOVE=1\nFDNAME={name}")


class PipeStore:
    """What systemd keeps of the pipes: parcels of one generation, and until these are replaced
    those of the one before."""

    def __init__(self, given: Mapping[str, list[int]]) -> None:
        """``given`` are the descriptors that systemd has passed, by name."""
        self.taken: dict[str, list[int]] = {}  # the pipes that were kept, by instance
        self._names = list(given)
        for name, fds in given.items():
            for fd in fds:
                self._take(name, fd)
        self._is_whole = len(given) == 1  # else it was changed halfway, or never filled

    def _take(self, name: str, fd: int) -> None:
        if name.startswith(_PREFIX):
            for instance, pipe in _open_parcel(fd):
                self.taken.setdefault(instance, []).append(pipe)
        elif find_instance(name):  # as version 0.1 kept it: each by itself
            os.set_blocking(fd, False)  # systemd changes it when it passes it
            self.taken.setdefault(name, []).append(fd)
        else:
            os.close(fd)

    def note_change(self) -> None:
        """What systemd keeps is no longer what it is to keep."""
        self._is_whole = False

    def keep(self, pipes: Mapping[str, int]) -> None:
        """Have systemd keep these pipes and no others, if there was a change."""
        if self._is_whole:
            return
        generations = [name.removeprefix(_PREFIX) for name in self._names]
        last = max((int(each) for each in generations if each.isdecimal()), default=0)
        name = f"{_PREFIX}{last + 1}"
        rest = iter(pipes.items())
        while portion := dict(islice(rest, PARCEL)):
            if not _store_parcel(name, portion):
                self._names.append(name)
                return  # what was kept before is still there
        for old in self._names:
            unstore(old)
        self._names, self._is_whole = [name], True


def _store_parcel(name: str, pipes: Mapping[str, int]) -> bool:
    sender, parcel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, parcel:
        try:
            socket.send_fds(sender, ["\n".join(pipes).encode()], list(pipes.values()))
        except OSError as error:
            log(WARNING, "pipes cannot be put into a parcel for systemd", error=error)
            return False
        # Without FDPOLL=0 it would drop the parcel, whose sender is gone.
        return tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", parcel.fileno())


def _open_parcel(fd: int) -> list[tuple[str, int]]:
    """Return the pipes in a parcel, by instance. systemd has it still, so it is closed here."""
    with socket.socket(fileno=fd) as parcel:
        # Not by recv_fds, which ignores flags before Python 3.13.
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            names, control, _, _ = parcel.recvmsg(_NAMES_BYTES, socket.CMSG_LEN(4 * PARCEL), flags)
        except OSError as error:
            log(WARNING, "a parcel of pipes that systemd kept cannot be opened", error=error)
            return []
    pipes = [pipe for *_, packed in control for (pipe,) in struct.iter_unpack("=i", packed)]
    return list(zip(names.decode().split("\n"), pipes, strict=False))
