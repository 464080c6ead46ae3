"""Cgroups: find them, kill every process in one, remove it. Limits are set by systemd."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator


def find_hierarchies() -> list[str]:
    """Our own cgroup in each hierarchy that systemd itself uses: cgroup2, or name=systemd."""
    own = {}
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            number, names, path = line.rstrip("\n").split(":", 2)
            own["cgroup2" if number == "0" else names] = path
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, right = line.rstrip("\n").split(" - ", 1)
            root, mountpoint = left.split()[3:5]
            kind, _, options = right.split(" ", 2)
            name = "cgroup2" if kind == "cgroup2" else "name=systemd"
            if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
                path = os.path.relpath(own.get(name, root), root)
                place = os.path.normpath(os.path.join(mountpoint, path))
                found.append(place if os.path.isdir(place) else mountpoint)
    return found


def kill(cgroup: str) -> None:
    """Send SIGKILL to every process in the cgroup and below; return when none is left."""
    while pids := set(_find_pids(cgroup)):
        opened = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                opened[pid] = os.pidfd_open(pid)
        # Read again: a pid may have been reused before its descriptor was opened.
        still = set(_find_pids(cgroup))
        for pid, pidfd in opened.items():
            with contextlib.suppress(ProcessLookupError):
                if pid in still:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, pidfd in opened.items():
            if pid in still:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll()
            os.close(pidfd)


def remove(cgroup: str) -> None:
    for directory, _, _ in os.walk(cgroup, topdown=False):
        os.rmdir(directory)


def list_delegated(cgroup: str) -> Iterator[str]:
    """Yield the paths that a user must own to make cgroups in this one."""
    yield cgroup
    for name in ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks"):
        path = os.path.join(cgroup, name)
        if os.path.exists(path):
            yield path


def _find_pids(cgroup: str) -> Iterator[int]:
    for directory, _, _ in os.walk(cgroup):
        try:
            with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as file:
                yield from map(int, file.read().split())
        except OSError:  # removed meanwhile
            continue
