"""Check whether another user may read a file. It is tried as that user, so that modes, groups,
access control lists and parent directories count.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

_TIMEOUT_S: Final = 10.0


def may_read(path: str, user: str, groups: Sequence[str] = ()) -> bool:
    """Return True if ``user``, with these groups besides its own, may read the file, or owns it and
    could permit it. Only root can call this; False if there is no such user."""
    import grp
    import pwd
    import subprocess  # nomarrctl needs these for this alone

    try:
        known = pwd.getpwnam(user)
    except KeyError:
        return False
    gids = set(os.getgrouplist(user, known.pw_gid))
    for name in groups:
        try:
            gids.add(int(name) if name.isdigit() else grp.getgrnam(name).gr_gid)
        except KeyError:
            continue  # systemd does not start such a worker
    try:
        if os.stat(path).st_uid == known.pw_uid:
            return True
        done = subprocess.run(
            ["/usr/bin/test", "-r", path],
            check=False,
            cwd="/",
            env={},
            user=known.pw_uid,
            group=known.pw_gid,
            extra_groups=sorted(gids),
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
