"""Makes the tables of one domain on first use, and the indexes that are missing.

Several hosts may want to at once: an advisory lock admits one at a time. What the tables are is in
``postgresql.statements``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nomarr_systemd.core.errors import SchemaTooNew, StoreRefused, StoreUnavailable
from nomarr_systemd.store.postgresql import failures, statements
from nomarr_systemd.store.postgresql.session import Failed
from nomarr_systemd.store.protocol import DOMAINS

if TYPE_CHECKING:
    from nomarr_systemd.store.postgresql.link import Link
    from nomarr_systemd.store.protocol import Domain

_TIMEOUT_S: Final = 10.0  # for a lock, a table, an index
_PATIENCE: Final = (
    f"SET LOCAL lock_timeout = {int(_TIMEOUT_S * 1000)};"
    f" SET LOCAL statement_timeout = {int(_TIMEOUT_S * 1000)};"
    f" SELECT pg_advisory_xact_lock({statements.LOCK})"
)


def make_ready(link: Link, domain: Domain) -> None:
    """Make what is missing. Unknown indexes are kept: another host may run another version."""
    name = statements.SCHEMAS[domain]
    try:
        there = _look(link, name)
        tables = {collection.name for collection in DOMAINS[domain]}
        if there is None or not tables <= there:
            _make_tables(link, domain)
            there = _look(link, name) or set()
    except Failed as error:
        if error.code == failures.DENIED:
            raise _denied(link, name, error) from error
        raise failures.translate(link.url, link.where, name, error) from error
    for index, sql in statements.make_indexes(domain).items():
        if index not in there:
            _make_index(link, sql)
    link.is_ready = True


def _look(link: Link, name: str) -> set[str] | None:
    """Return the names of the tables and indexes; None if there are no tables yet."""
    sql = (
        f"SELECT (SELECT max(version) FROM {name}.about),"
        " ARRAY(SELECT indexname::text FROM pg_indexes WHERE schemaname = %s"
        " UNION ALL SELECT tablename::text FROM pg_tables WHERE schemaname = %s)"
    )
    try:
        ((version, names),) = link.ask(sql, [name, name], repeatable=True).rows
        found, number = {str(each) for each in names}, int(version)
    except Failed as error:
        if error.code in failures.MISSING:
            return None
        raise
    except (ValueError, TypeError) as error:
        raise StoreUnavailable(f"{name}.about in PostgreSQL at {link.where} is damaged") from error
    if number > statements.VERSION:
        raise SchemaTooNew(
            f"{name} in PostgreSQL at {link.where} has version {number}; this version knows up to"
            f" {statements.VERSION}",
            hint="upgrade nomarr-systemd on this host, too",
        )
    return found


def _make_tables(link: Link, domain: Domain) -> None:
    name = statements.SCHEMAS[domain]
    there = "SELECT count(*) FROM pg_namespace WHERE nspname = %s"
    with link.transaction():
        link.ask(_PATIENCE, timeout_s=_TIMEOUT_S)
        ((has_schema,),) = link.ask(there, [name]).rows
        if not has_schema:
            link.ask(f"CREATE SCHEMA {name}", timeout_s=_TIMEOUT_S)
        link.ask("; ".join(statements.make_schema(domain)), timeout_s=_TIMEOUT_S)


def _make_index(link: Link, sql: str) -> None:
    """Make an index; without it the store works, slowly."""
    try:
        with link.transaction():
            link.ask(_PATIENCE, timeout_s=_TIMEOUT_S)
            link.ask(sql, timeout_s=_TIMEOUT_S)
    except (StoreUnavailable, Failed):
        return


def _denied(link: Link, name: str, error: Failed) -> StoreRefused:
    user, database = link.url.user, link.url.database
    return StoreRefused(
        f"PostgreSQL at {link.where}: {user!r} has no right to {name}: {error}",
        hint=f"in the database {database}, as an administrator:"
        f' CREATE SCHEMA {name} AUTHORIZATION "{user}"',
    )
