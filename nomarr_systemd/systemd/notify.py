"""sd_notify, the watchdog, and the descriptors that systemd passes, for controller and supervisor.

libsystemd is not used: loading it would delay the restart that the controller was started for, and
would cost the supervisor 2 MB.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Final

_FIRST_FD: Final = 3
_fed_s = 0.0  # when systemd was last told


def notify(*lines: str, fds: Sequence[int] = ()) -> bool:
    """Send sd_notify lines, and descriptors with them; False if there is no NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.connect(address)
        text = "\n".join(lines).encode()
        if fds:
            socket.send_fds(link, [text], fds)
        else:
            link.send(text)
    return True


def watchdog_s() -> float:
    """Return the period of systemd's watchdog for this process; 0 if there is none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    is_mine = not pid or pid == str(os.getpid())
    return int(usec) / 1e6 if is_mine and usec.isascii() and usec.isdigit() else 0.0


def feed_watchdog() -> None:
    """Tell systemd that this process makes progress, eight times in a period of the watchdog at
    most: each ping is work for systemd while workers wait for it."""
    global _fed_s
    now_s = monotonic()
    if now_s - _fed_s < watchdog_s() / 8:
        return
    with contextlib.suppress(OSError):  # systemd re-executes itself: the next ping reaches it
        notify("WATCHDOG=1")
        _fed_s = now_s


def listen_fds() -> list[int]:
    """Return the file descriptors that socket activation has passed, or that systemd has kept."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    fds = list(range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0"))))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def listen_fds_by_name() -> dict[str, list[int]]:
    """Return the same descriptors by the names that systemd passes with them."""
    found: dict[str, list[int]] = {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    for fd, name in zip(listen_fds(), names, strict=False):
        found.setdefault(name, []).append(fd)
    return found
