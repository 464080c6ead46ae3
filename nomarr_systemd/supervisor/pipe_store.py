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
from nomarr_systemd.host.log import WARNING, RateLimit, log
from nomarr_systemd.systemd.notify import notify

PARCEL: Final = 253  # descriptors in one message: the kernel takes no more
_PREFIX: Final = "pipes."  # of a parcel's name; the number of its generation follows
_NAMES_BYTES: Final = 65_536
notify_failures = 0  # of this process
_rate = RateLimit(burst=5, every_s=60)  # what fails is tried again and again


def tell(message: str, *fds: int) -> bool:
    """Send a notification to systemd. If that fails, it is counted, and False is returned."""
    global notify_failures
    try:
        notify(message, fds=fds)
    except OSError as error:
        notify_failures += 1
        _rate.log(WARNING, "a notification to systemd failed", message=message, error=error)
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
        # Else it was changed halfway, never filled, or filled by version 0.1. The caller sets it to
        # False when what systemd keeps is no longer what it is to keep.
        self.is_whole = len(given) == 1 and all(name.startswith(_PREFIX) for name in given)
        self.count = len(self.taken) if self.is_whole else 0  # so many pipes are kept for certain

    def _take(self, name: str, fd: int) -> None:
        if name.startswith(_PREFIX):
            for instance, pipe in _open_parcel(fd):
                self.taken.setdefault(instance, []).append(pipe)
        elif find_instance(name):  # as version 0.1 kept it: each by itself
            os.set_blocking(fd, False)  # systemd changes it when it passes it
            self.taken.setdefault(name, []).append(fd)
        else:
            os.close(fd)

    def keep(self, pipes: Mapping[str, int]) -> None:
        """Have systemd keep these pipes and no others. If that fails, what it has kept until now
        stays, and ``is_whole`` is False: call this again."""
        self.is_whole = False
        generations = [name.removeprefix(_PREFIX) for name in self._names]
        last = max((int(each) for each in generations if each.isdecimal()), default=0)
        name = f"{_PREFIX}{last + 1}"
        rest = iter(pipes.items())
        while portion := dict(islice(rest, PARCEL)):
            if not _store_parcel(name, portion):
                self._names.append(name)  # its number is not used again
                unstore(name)
                return
        for old in self._names:
            unstore(old)
        self._names, self.is_whole, self.count = [name], True, len(pipes)


def _store_parcel(name: str, pipes: Mapping[str, int]) -> bool:
    try:
        sender, parcel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with parcel:
            with sender:
                socket.send_fds(sender, ["\n".join(pipes).encode()], list(pipes.values()))
            # Without FDPOLL=0 it would drop the parcel, whose sender is gone.
            return tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", parcel.fileno())
    except OSError as error:
        _rate.log(WARNING, "pipes cannot be put into a parcel for systemd", error=error)
        return False


def _open_parcel(fd: int) -> list[tuple[str, int]]:
    """Return the pipes in a parcel, by instance. systemd has it still, so it is closed here."""
    with socket.socket(fileno=fd) as parcel:
        # Not by recv_fds, which ignores flags before Python 3.13.
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        size = socket.CMSG_LEN(4 * PARCEL)
        try:
            names, control, found, _ = parcel.recvmsg(_NAMES_BYTES, size, flags)
        except OSError as error:
            log(WARNING, "a parcel of pipes that systemd kept cannot be opened", error=error)
            return []
    if found & socket.MSG_CTRUNC:  # the limit of open files
        log(WARNING, "a parcel of pipes that systemd kept cannot be opened completely")
    pipes = [pipe for *_, packed in control for (pipe,) in struct.iter_unpack("=i", packed)]
    return list(zip(names.decode().split("\n"), pipes, strict=False))
