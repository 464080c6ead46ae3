"""Opens the jobs' store for nomarrctl, as the owner of its directory: workers could not use files
that root makes there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError, NotPermitted
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.host.ownership import find_exposed
from nomarr_systemd.jobs.settlement import clear_pool
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store


@contextmanager
def open_as_owner(settings: StoreSettings) -> Iterator[Store]:
    """Yield the work store; root takes the uid of its owner while it is open."""
    user, group, groups = os.geteuid(), os.getegid(), os.getgroups()
    parsed = parse_store_url(settings.url)
    try:
        if isinstance(parsed, SqliteUrl) and user == 0:
            # Import now what is used later: the owner may not be able to read these modules.
            import hashlib  # noqa: F401

            import nomarr_systemd.store.sqlite.store  # noqa: F401

            _become_owner(f"{parsed.directory}/work")
        elif isinstance(parsed, SqliteUrl) and not os.access(f"{parsed.directory}/work", os.W_OK):
            _refuse_stranger(f"{parsed.directory}/work")
        with closing(open_work_store(settings)) as store:
            yield store
    finally:
        if os.geteuid() != user:
            os.seteuid(user)
            os.setegid(group)
            os.setgroups(groups)


def forget_pool_failure(settings: StoreSettings, pool: str) -> None:
    """Clear the failure of the pool, and set its count of crashes to zero."""
    with open_as_owner(settings) as store:
        clear_pool(store, pool, host_of(settings))


def _refuse_stranger(directory: str) -> None:
    """Raise NotPermitted if the directory is there: this user may not write it."""
    if os.path.exists(directory):
        raise NotPermitted(f"this user may not change the jobs in {directory}", hint="use sudo")


def _become_owner(directory: str) -> None:
    try:
        owner = os.lstat(directory)
    except FileNotFoundError as error:
        raise NomarrError(
            f"there is no directory {directory} yet", hint="run nomarrctl apply"
        ) from error
    exposed = find_exposed(directory if owner.st_uid == 0 else os.path.dirname(directory))
    if exposed is not None:  # a link, or another directory, could be put in its place
        raise NomarrError(f"{directory} is not safe to use: {exposed.why}", hint=exposed.mend)
    if owner.st_uid:
        os.setgroups([])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
