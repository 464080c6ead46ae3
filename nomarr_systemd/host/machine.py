"""The machine under the installation, as far as a worker's record depends on it: whether the
clock is right, whether files and the journal outlast a reboot, how much room is left.
"""

from __future__ import annotations

import os
from typing import Final

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings

_TIME_ERROR: Final = 5  # adjtimex: the kernel calls its clock not synchronised
_TIMEX_BYTES: Final = 512  # larger than struct timex of any architecture
_VOLATILE: Final = ("tmpfs", "ramfs")
_TIMEOUT_S: Final = 10.0
_NEXT_TO_NOTHING: Final = 1 << 20
_ID_BYTES: Final = 16
APPLICATION_ID: Final = bytes.fromhex("b1c6e0f7a3d94d0f8e5b27c49a60d318")
UNKNOWN: Final = "unknown"  # the name of a host that has no machine-id


def is_clock_synchronised() -> bool | None:
    """Return True if the kernel's clock is synchronised, by any program; None if that is not
    known."""
    import ctypes  # imported here: the controller does not need it

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def filesystem_of(path: str) -> str:
    """Return the kind of filesystem that a path is on; empty if it is not known."""
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                place = left.split()[4].replace("\\040", " ")
                inside = path == place or path.startswith(place.rstrip("/") + "/")
                if inside and len(place) >= len(best):
                    best, kind = place, right.split()[0]
    except (OSError, IndexError):
        return ""
    return kind


def is_volatile(path: str) -> bool:
    """Return True if a reboot deletes what is in the path."""
    return filesystem_of(path) in _VOLATILE


def free_bytes(path: str) -> int:
    shown = os.statvfs(path)
    return shown.f_bavail * shown.f_frsize


def is_full(path: str) -> bool:
    """True if the path's filesystem has next to no room, or none for a file. Some have no number of
    files: they say 0 of 0."""
    try:
        shown = os.statvfs(path)
    except OSError:
        return False
    return shown.f_bavail * shown.f_frsize < _NEXT_TO_NOTHING or shown.f_favail == 0 < shown.f_files


def share_disk(path: str, other: str) -> bool:
    """Return True if both paths are on one filesystem and share its free space."""
    try:
        return os.stat(path).st_dev == os.stat(other).st_dev
    except OSError:
        return False


def is_journal_persistent() -> bool:
    """Return True if journald writes to the disk: Storage=auto does so if the directory exists."""
    return os.path.isdir("/var/log/journal") and bool(os.listdir("/var/log/journal"))


def systemd_version() -> int:
    """Return the number of systemd's version; 0 if it is not known."""
    import subprocess  # imported here: the controller does not need it

    try:
        done = subprocess.run(
            ["systemctl", "--version"],  # noqa: S607 (any PATH's)
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        return int(done.stdout.split()[1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def host_of(settings: StoreSettings) -> str:
    """Return this host's id in a store that several share; empty for a store of one host.

    It is ``[fleet] host``, or made from the machine-id, which is to stay on its host
    (machine-id(5)), as systemd makes ids for an application: it never changes, and the machine-id
    cannot be computed from it.
    """
    if isinstance(parse_store_url(settings.url), SqliteUrl):
        return ""
    if settings.host:
        return settings.host
    import hmac  # imported here: a store of one host does not need it

    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = bytes.fromhex(file.read(64).strip())
    except (OSError, ValueError):
        return UNKNOWN
    if len(machine) != _ID_BYTES:
        return UNKNOWN
    digest = bytearray(hmac.digest(machine, APPLICATION_ID, "sha256")[:_ID_BYTES])
    digest[6] = digest[6] & 0x0F | 0x40  # a UUID of version 4
    digest[8] = digest[8] & 0x3F | 0x80
    return digest.hex()


def name_of(settings: StoreSettings) -> str:
    """Return this host's name for people: ``[fleet] host``, or host name and part of its id."""
    host = host_of(settings)
    if not host or settings.host:
        return host
    import socket  # imported here: a store of one host does not need it

    first = socket.gethostname().partition(".")[0]
    plain = "".join(each if each.isascii() and each.isalnum() else "-" for each in first)
    return f"{plain[:50] or 'host'}-{host[:8]}"
