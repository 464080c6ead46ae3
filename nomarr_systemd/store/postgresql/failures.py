"""PostgreSQL's errors as our own: what each means for the caller, and what to do about it.

A code is an SQLSTATE. Texts from the server are cleaned before they come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nomarr_systemd.core.errors import (
    BadDocument,
    KeyExists,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.store.postgresql.session import Failed, NotSent, Refused

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import PostgresUrl

MISSING: Final = ("42P01", "3F000")  # no such table, no such schema
DENIED: Final = "42501"
_KEY_TAKEN: Final = "23505"
_CONFLICTS: Final = ("40001", "40P01")  # serialization failure, deadlock
READ_ONLY: Final = "25006"
# Words for what a person can mend, and what to do.
_NAMED: Final = {
    "53100": ("its disk is full", "free space on the server's disk"),
    "53200": ("it is out of memory", "give the server more memory, or lower max_connections"),
    "53300": ("it has no free connection", "raise max_connections on the server, or pool them"),
    "57014": ("the statement took too long", "look for locks and load: pg_stat_activity"),
    "55P03": ("another session holds a lock", "look for locks: pg_locks, pg_stat_activity"),
    READ_ONLY: (
        "it accepts no writes (a failover is under way, or it was set to read-only)",
        "name all hosts of the cluster in [store] url",
    ),
}
_UNAVAILABLE: Final = ("08", "25", "40", "53", "55", "57", "58", "F0", "XX")  # classes of codes
_BAD_DOCUMENT: Final = ("22", "54")


def refuse(url: PostgresUrl, where: str, error: NotSent) -> StoreError:
    """Return the error for a session that could not be begun."""
    said = str(error)
    if not isinstance(error, Refused):
        return StoreUnavailable(f"PostgreSQL at {where} cannot be reached: {said}")
    if "pg_hba.conf" in said:
        hint = "allow this host in the server's pg_hba.conf"
        if "no encryption" in said:
            hint += ", or write postgresql+tls:// in [store] url"
    elif "certificate" in said or "SSL" in said or "host name" in said:
        hint = "set ca_file to the authority that signed the server's certificate"
    elif "database" in said:
        hint = (
            f'as an administrator: createdb --encoding=UTF8 --template=template0 "{url.database}"'
        )
    else:
        hint = f"check the password of {url.user!r}: password_file and work_password_file"
    return StoreRefused(f"PostgreSQL refuses {url.user!r}: {said}", hint=hint)


def translate(url: PostgresUrl, where: str, what: str, error: Failed) -> StoreError:
    """Return the error for a statement about ``what``."""
    code = error.code
    if code == _KEY_TAKEN:
        return KeyExists("a document with this key exists already")
    if code in _CONFLICTS:
        return StaleRevision(f"{what}: another session wrote it at the same time ({code})")
    place = f"PostgreSQL at {where}"
    if code in _NAMED:
        words, hint = _NAMED[code]
        return StoreUnavailable(f"{what} in {place}: {words} ({code}: {error})", hint=hint)
    said = f"{what} in {place}: {error} ({code})"
    if code.startswith(_UNAVAILABLE):
        return StoreUnavailable(said)
    if code.startswith(_BAD_DOCUMENT):
        return BadDocument(said)
    if code in MISSING:
        return StoreUnavailable(said, hint="its tables were removed; they are made again")
    return StoreRefused(said, hint=f"is {url.database!r} the right database?")
