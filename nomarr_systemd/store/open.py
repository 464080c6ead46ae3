"""``open_store(url, domain)``: the store that a configuration names.

The backend's module is imported when it is needed: importing a server's driver takes longer than
everything else together.
"""

from __future__ import annotations

from typing import Final

from nomarr_systemd.config.store_url import (
    ArangoUrl,
    PostgresUrl,
    ServerUrl,
    SqliteUrl,
    engine_of,
    parse_store_url,
)
from nomarr_systemd.config.values import Copies, StoreSettings
from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.store.protocol import MOST_FOUND, Domain, Publisher, Store

NO_COPIES: Final = Copies()
# The Debian package of a server's driver, and our extra for pip.
_DRIVERS: Final[dict[type[ServerUrl], tuple[str, str]]] = {
    ArangoUrl: ("python3-arango", "arango"),
    PostgresUrl: ("python3-psycopg2", "postgresql"),
}


def open_policy_store(settings: StoreSettings, publisher: Publisher) -> Store:
    """Return the policy domain's store, which has its ledger published."""
    return open_store(
        settings.url,
        "policy",
        password_file=settings.password_file,
        ca_file=settings.ca_file,
        copies=settings.copies,
        publisher=publisher,
    )


def open_work_store(settings: StoreSettings, *, most: int = MOST_FOUND) -> Store:
    """Return the work domain's store; on a server it is opened as ``work_user``, never as the
    ledger's user, whose password workers must not hold. ``most`` bytes are read at once."""
    parsed = parse_store_url(settings.url)
    if not settings.work_user and not isinstance(parsed, SqliteUrl):
        raise StoreRefused(
            f"the jobs have no user of their own in {engine_of(parsed).title}",
            hint="set work_user and work_password_file under [store], then run nomarrctl apply",
        )
    return open_store(
        settings.url,
        "work",
        user=settings.work_user,
        password_file=settings.work_password_file,
        ca_file=settings.ca_file,
        copies=settings.copies,
        most=most,
    )


def open_store(
    url: str,
    domain: Domain,
    *,
    user: str = "",
    password_file: str = "",
    ca_file: str = "",
    copies: Copies = NO_COPIES,
    publisher: Publisher | None = None,
    most: int = MOST_FOUND,
) -> Store:
    """Return the store of one domain. ``user`` replaces the URL's user; ``publisher`` is called for
    every committed document of the ledger; find() returns ``most`` bytes at most."""
    parsed = parse_store_url(url)
    if isinstance(parsed, SqliteUrl):
        from nomarr_systemd.store.sqlite.store import SqliteStore

        return SqliteStore(parsed.directory, domain, publisher=publisher, most=most)
    import_driver(parsed)
    from nomarr_systemd.store.secret import read_password

    engine = engine_of(parsed)
    password = read_password(domain, engine=engine.scheme, password_file=password_file or None)
    parsed = parsed._replace(user=user or parsed.user)
    if isinstance(parsed, PostgresUrl):
        from nomarr_systemd.store.postgresql.store import PostgresStore

        return PostgresStore(
            parsed,
            domain,
            password=password,
            ca_file=ca_file or None,
            publisher=publisher,
            most=most,
        )
    from nomarr_systemd.store.arango.store import ArangoStore

    return ArangoStore(
        parsed,
        domain,
        password=password,
        ca_file=ca_file or None,
        copies=copies,
        publisher=publisher,
        most=most,
    )


def import_driver(url: ServerUrl) -> None:
    """Import the backend for a server; StoreRefused if its driver is missing."""
    package, extra = _DRIVERS[type(url)]
    try:
        if isinstance(url, PostgresUrl):
            import nomarr_systemd.store.postgresql.store
        else:
            import nomarr_systemd.store.arango.store  # noqa: F401
    except ImportError as error:
        raise StoreRefused(
            f"{engine_of(url).title}'s driver is missing: {error}",
            hint=f"install the package {package} (with pip: nomarr-systemd[{extra}])",
        ) from error
