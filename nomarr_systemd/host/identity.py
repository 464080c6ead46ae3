"""Which host's documents are which, where several hosts share a store."""

from __future__ import annotations

from nomarr_systemd.core.storeurl import SqliteUrl, parse_store_url


def host_of(url: str) -> str:
    """This host's name among those that share the store; empty where none do."""
    if isinstance(parse_store_url(url), SqliteUrl):
        return ""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
