"""Find paths that other users may change: they must not be able to replace root's files.

Only root and our own user are trusted; that holds for the directory and for every parent of it,
since a user that may write a parent can put another directory in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from nomarr_systemd.core.named_tuple import NamedTuple

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS: Final = 40  # as the kernel's own limit
_ALL_IDS: Final = 2**32 - 1


class Exposed(NamedTuple):
    """A path that others may change, why, and the command that prevents it."""

    path: str
    why: str
    mend: str


def find_exposed(directory: str) -> Exposed | None:
    """Return the first place on the way to ``directory``, itself included, that others may change.

    A parent that everybody may write is fine if it is sticky, as /tmp is: what we own there,
    nobody else can rename or remove. The directory itself must not be: others could make files in
    it under the names that we use. What does not exist yet exposes nothing.
    """
    for path, facts, is_last in _walk(directory):
        exposed = _find_foreign(path, facts)
        if exposed is not None:
            return exposed
        if not stat.S_ISDIR(facts.st_mode):
            continue  # a link counts by its owner only; anything else holds no files
        is_sticky = bool(facts.st_mode & stat.S_ISVTX) and not is_last
        if not is_sticky and _may_be_written(facts):
            return Exposed(path, f"others than its owner may write {path}", f"chmod go-w {path}")
    return None


def find_exposed_file(path: str) -> Exposed | None:
    """Return the file, if others may change it or it is no plain file; a missing one is fine."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no plain file"
        return Exposed(path, f"{path} is {kind}", f"mv {path} {path}.old")
    exposed = _find_foreign(path, facts)
    if exposed is None and facts.st_mode & _OTHERS:
        exposed = Exposed(path, f"others than its owner may write {path}", f"chmod go-w {path}")
    return exposed


def _walk(directory: str) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield each directory and link on the way, and whether it is the last; stop at the first
    part that does not exist."""
    todo = [part for part in reversed(directory.split("/")) if part]
    path, links = "/", 0
    yield path, os.lstat(path), not todo
    while todo:
        part = todo.pop()
        if part in (".", ".."):
            path = os.path.dirname(path) if part == ".." else path
            continue
        here = os.path.join(path, part)
        try:
            facts = os.lstat(here)
        except FileNotFoundError:
            return
        yield here, facts, not todo
        if not stat.S_ISLNK(facts.st_mode):
            path = here
            continue
        links += 1
        target = os.readlink(here)
        if links > _MAX_LINKS:
            raise OSError(f"{directory} has too many symbolic links")
        path = "/" if target.startswith("/") else path
        todo += [each for each in reversed(target.split("/")) if each]


def _find_foreign(path: str, facts: os.stat_result) -> Exposed | None:
    us = os.geteuid()
    if facts.st_uid in (0, us) or _is_outside(facts.st_uid):
        return None
    owner = "root" if us == 0 else str(us)
    why = f"{path} belongs to {_name_user(facts.st_uid)}"
    return Exposed(path, why, f"chown -h {owner} {path}")


def _may_be_written(facts: os.stat_result) -> bool:
    """Return True if others may write it. A group that has only our user in it does not count; an
    access control list shows in the group's bits."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private(facts.st_gid)


def _is_private(gid: int) -> bool:
    """Return True if the group is our user's own: many systems create one for each user."""
    import grp  # rarely needed
    import pwd

    try:
        us, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return us.pw_uid != 0 and us.pw_gid == gid and (group.gr_name, group.gr_mem) == (us.pw_name, [])


def _is_outside(uid: int) -> bool:
    """Return True if the user has no id in our user namespace: such users are left to the creator
    of the namespace. The system's programs run in the first namespace, where every user has an
    id."""
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        if uid != int(file.read()):
            return False
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return sum(int(line.split()[2]) for line in file) < _ALL_IDS


def _name_user(uid: int) -> str:
    import pwd  # rarely needed

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
