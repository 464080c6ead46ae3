"""``open_store(url, domain)``: the store that a configuration names.

The backend's module is imported when it is needed: importing ArangoDB's driver takes longer than
everything else together.
"""

from __future__ import annotations

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.store.protocol import Domain, Publisher, Store


def open_work_store(settings: StoreSettings) -> Store:
    """The work domain's store, opened as ``work_user`` where one is set."""
    return open_store(
        settings.url,
        "work",
        user=settings.work_user,
        password_file=settings.work_password_file or settings.password_file,
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
    """The store of one domain. ``user`` replaces the URL's user; ``publisher`` is told of every
    committed document of the ledger."""
    parsed = parse_store_url(url)
    if isinstance(parsed, SqliteUrl):
        from nomarr_systemd.store.sqlite.store import SqliteStore

        return SqliteStore(parsed.directory, domain, publisher=publisher)
    from nomarr_systemd.store.arango.store import ArangoStore
    from nomarr_systemd.store.secret import read_password

    return ArangoStore(
        parsed._replace(user=user or parsed.user),
        domain,
        password=read_password(domain, password_file=password_file or None),
        ca_file=ca_file or None,
        publisher=publisher,
    )
