"""sd_notify, and the descriptors that systemd passes, for the controller.

libsystemd is not used: loading it would delay the restart that the controller was started for.
"""

from __future__ import annotations

import os
import socket
from typing import Final

_FIRST_FD: Final = 3


def notify(*lines: str) -> bool:
    """Send sd_notify lines; False if there is no NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.sendto("\n".join(lines).encode(), address)
    return True


def listen_fds() -> list[int]:
    """The file descriptors that socket activation has passed."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    fds = list(range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0"))))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds
