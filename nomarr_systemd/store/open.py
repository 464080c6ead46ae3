"""``open_store(url, domain)``: the store that a configuration names.

The backend's module is imported here and not before: ArangoDB's driver alone costs more start-up
time than everything else together.
"""

from __future__ import annotations

import os

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.store.protocol import Domain, Store
from nomarr_systemd.store.publish import Publisher


def open_work_store(settings: StoreSettings) -> Store:
    """The work domain's store, with the rights that are meant for it."""
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
    public_directory: str = "",
    public_gid: int = -1,
    public_host: str = "",
) -> Store:
    """The store of one domain. ``user`` is another one than the URL's, with rights of its own.

    The policy domain publishes its ledger: next to a SQLite file, or in ``public_directory``;
    where several hosts share it, what is ``public_host``'s.
    """
    parsed = parse_store_url(url)
    if isinstance(parsed, SqliteUrl) and not public_directory:
        public_directory = os.path.join(parsed.directory, "public")
    publisher = None
    if domain == "policy" and public_directory:
        publisher = Publisher(public_directory, gid=public_gid, host=public_host)
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
