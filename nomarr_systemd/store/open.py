"""``open_store(url, domain)``: the store that a configuration names.

The backend's module is imported when it is needed: importing ArangoDB's driver takes longer than
everything else together.
"""

from __future__ import annotations

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.store.protocol import Domain, Publisher, Store


def open_work_store(settings: StoreSettings) -> Store:
    """The work domain's store; on a server it is opened as ``work_user``, never as the ledger's
    user, whose password workers must not hold."""
    if not settings.work_user and not isinstance(parse_store_url(settings.url), SqliteUrl):
        raise StoreRefused(
            "the jobs have no user of their own in ArangoDB",
            hint="set work_user and work_password_file under [store], then run nomarrctl apply",
        )
    return open_store(
        settings.url,
        "work",
        user=settings.work_user,
        password_file=settings.work_password_file,
        ca_file=settings.ca_file,
    )


def open_store(
    url: str,
    domain: Domain,
    *,
    user: str = "",
    password_file: str = "",
    ca_file: str = "",
    publisher: Publisher | None = None,
) -> Store:
    """The store of one domain. ``user`` replaces the URL's user; ``publisher`` is called for
    every committed document of the ledger."""
    parsed = parse_store_url(url)
    if isinstance(parsed, SqliteUrl):
        from nomarr_systemd.store.sqlite.store import SqliteStore

        return SqliteStore(parsed.directory, domain, publisher=publisher)
    import_arango()
    from nomarr_systemd.store.arango.store import ArangoStore
    from nomarr_systemd.store.secret import read_password

    return ArangoStore(
        parsed._replace(user=user or parsed.user),
        domain,
        password=read_password(domain, password_file=password_file or None),
        ca_file=ca_file or None,
        publisher=publisher,
    )


def import_arango() -> None:
    """Import the backend for ArangoDB; StoreRefused if its driver is missing."""
    try:
        import nomarr_systemd.store.arango.store  # noqa: F401
    except ImportError as error:
        raise StoreRefused(
            f"ArangoDB's driver is missing: {error}",
            hint="install the package python3-arango (with pip: nomarr-systemd[arango])",
        ) from error
