"""Checks of the configured store. ``apply`` refuses a store with a bad concern and warns about the
others, ``doctor`` shows all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

from nomarr_systemd.config.store_url import (
    PostgresUrl,
    ServerUrl,
    SqliteUrl,
    engine_of,
    is_local,
    parse_store_url,
)
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import NomarrError, StoreError, StoreRefused, StoreUnavailable
from nomarr_systemd.host.access import may_read
from nomarr_systemd.host.machine import UNKNOWN, host_of
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate import controlling
from nomarr_systemd.operate.job_store import open_as_owner
from nomarr_systemd.store.open import import_driver
from nomarr_systemd.store.protocol import DOMAINS

_USER: Final = "nomarr"  # the user of the workers, unless the pool names another


class Concern(NamedTuple):
    """One thing that is wrong with the store; ``mend`` is what to do about it."""

    level: Literal["warn", "bad"]
    text: str
    mend: str


def find_concerns(scope: Scope, config: Config) -> list[Concern]:
    """Return what is found without opening the store. Nothing is changed."""
    parsed = parse_store_url(config.store.url)
    if isinstance(parsed, SqliteUrl):
        return list(_check_directory(scope, parsed.directory))
    return [*_check_server(config, parsed), *_check_passwords(scope, config, parsed)]


def try_stores(scope: Scope, config: Config) -> Iterator[Concern]:
    """Open the ledger, and on a server the jobs' store too: a driver that is missing, a password
    or a right that is wrong shows here and not in a service that cannot start."""
    parsed = parse_store_url(config.store.url)
    yield from _try("the ledger", lambda: controlling.open_ledger(scope, config))
    if not isinstance(parsed, SqliteUrl):
        readable: list[str] = []  # collections of the ledger
        yield from _try("the jobs' store", lambda: readable.extend(_open_jobs(config)))
        if readable:
            yield _warn_of_rights(config.store.work_user, parsed, readable)


def _warn_of_rights(user: str, url: ServerUrl, readable: list[str]) -> Concern:
    names = ", ".join(readable)
    text = f"in {engine_of(url).title} {user!r} has a right to the ledger's documents ({names})"
    if isinstance(url, PostgresUrl):
        revoke = f'REVOKE ALL ON SCHEMA nomarr_policy FROM PUBLIC, "{user}"'
        return Concern("warn", text, f"{revoke}; it must be no superuser or member of {url.user!r}")
    grant = f'grantCollection("{user}", "{url.database}", each, "none")'
    users = f'each => require("@arangodb/users").{grant}'
    return Concern("warn", text, f"in arangosh: {json.dumps(readable)}.forEach({users})")


def refuse(concerns: list[Concern]) -> None:
    """Raise StoreRefused for the first bad concern."""
    for concern in concerns:
        if concern.level == "bad":
            raise StoreRefused(concern.text, hint=concern.mend)


def _try(what: str, open_it: Callable[[], None]) -> Iterator[Concern]:
    try:
        open_it()
    except StoreUnavailable as error:
        mend = error.hint or "failures are kept in the spool until it answers"
        yield Concern("warn", f"{what} is away: {error}", mend)
    except StoreError as error:
        yield Concern("bad", f"{what} cannot be used: {error}", error.hint)


def _open_jobs(config: Config) -> list[str]:
    """Use the jobs' store; return the collections of the ledger that its user could read, too."""
    with open_as_owner(config.store) as store:
        store.find("stats", limit=1)
        may_read = getattr(store, "may_read", lambda _: False)
        return [each.name for each in DOMAINS["policy"] if may_read(each.name)]


def _check_directory(scope: Scope, directory: str) -> Iterator[Concern]:
    from nomarr_systemd.store.sqlite.beside import check_private  # late: not for nomarrctl --help
    from nomarr_systemd.store.sqlite.store import FILES

    try:
        check_private(os.path.join(directory, FILES["policy"]))
    except StoreRefused as error:
        yield Concern("bad", str(error), error.hint)
    except PermissionError:
        return  # this user may not look; apply and doctor check it as root
    work = os.path.dirname(os.path.join(directory, FILES["work"]))
    if not scope.user and directory != scope.paths.state and not os.path.isdir(work):
        mend = f"install -d -o {_USER} -g {_USER} -m 750 {work}"
        yield Concern("bad", f"there is no directory {work} for the jobs", mend)


def _check_server(config: Config, parsed: ServerUrl) -> Iterator[Concern]:
    try:
        import_driver(parsed)
    except NomarrError as error:
        yield Concern("bad", str(error), error.hint)
    if host_of(config.store) == UNKNOWN:
        text = "this host has no machine-id: its accounts would be mixed with those of others"
        yield Concern("bad", text, "systemd-machine-id-setup")
    far = [host for host, _ in parsed.hosts if not is_local(host)]
    if far and not parsed.tls:
        text = f"the connection to {far[0]} is not encrypted: the password crosses the network"
        yield Concern("warn", text, f"write {engine_of(parsed).scheme}+tls:// in [store] url")


def _check_passwords(scope: Scope, config: Config, parsed: ServerUrl) -> Iterator[Concern]:
    """Only root may read the ledger's password; the users of workers must be able to read that
    of the jobs. In a user's own installation all programs run as that user."""
    store = config.store
    if not store.work_user:
        title = engine_of(parsed).title
        text = f"workers would need the ledger's password: {title} has no user for the jobs"
        yield Concern("bad", text, "set work_user and work_password_file under [store]")
    if scope.user or os.geteuid() != 0:
        return
    for user, groups in sorted(_find_users(config)):
        if store.password_file and may_read(store.password_file, user, groups):
            path = store.password_file
            text = f"{user} may read the ledger's password in {path}"
            yield Concern("bad", text, f"chown root:root {path}; chmod 600 {path}")
        if store.work_password_file and not may_read(store.work_password_file, user, groups):
            path = store.work_password_file
            text = f"{user} may not read {path}, and its workers could not take jobs"
            yield Concern("warn", text, f"chown root:{_USER} {path}; chmod 640 {path}")


def _find_users(config: Config) -> set[tuple[str, tuple[str, ...]]]:
    """Return the users that workers run as, each with the groups that its pool adds."""
    found: set[tuple[str, tuple[str, ...]]] = {(_USER, ())}
    for pool in config.pools:
        added = dict(pool.unit).get("SupplementaryGroups", "")
        words = added if isinstance(added, tuple) else (str(added),)
        groups = tuple(name for word in words for name in word.split())
        found.add((getattr(pool, "user", "") or _USER, groups))
    return found
