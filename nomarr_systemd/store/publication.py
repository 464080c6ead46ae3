"""When a store publishes: documents of the ledger, after they were committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.store.protocol import PAST_RECORDS, POLICY_LEDGER, Doc, Publisher

_Written = tuple[str, str]  # collection and key


class Publication:
    """Publishes what a store has written. ``read`` returns the JSON of accounts that exist, ``get``
    any document."""

    def __init__(
        self,
        publisher: Publisher | None,
        read: Callable[[list[str]], Mapping[str, str]],
        get: Callable[[str, str], Doc | None],
    ) -> None:
        self._publisher = publisher
        self._read = read
        self._get = get
        self._waiting: set[_Written] | None = None  # in a batch: what to publish at its end

    @property
    def in_batch(self) -> bool:
        return self._waiting is not None

    def written(self, collection: str, key: str) -> None:
        """Publish a document that was written; in a batch, at its end."""
        if collection not in (POLICY_LEDGER, PAST_RECORDS):
            return
        if self._waiting is not None:
            self._waiting.add((collection, key))
        else:
            self._publish((collection, key))

    @contextlib.contextmanager
    def batch(self, *, always: bool = False) -> Iterator[None]:
        """Publish at the end what is written in it; ``always``: also after an exception, because
        each write is durable by itself."""
        if self._waiting is not None:
            raise StoreError("a batch cannot contain another batch")
        self._waiting = waiting = set[_Written]()
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            self._waiting = None
            if is_whole or always:
                self._publish(*sorted(waiting))

    def _publish(self, *written: _Written) -> None:
        if self._publisher is None:
            return
        accounts = [key for collection, key in written if collection == POLICY_LEDGER]
        if len(accounts) < len(written):  # they first: a reader misses none that leave an account
            past = [key for collection, key in written if collection == PAST_RECORDS]
            self._publisher.publish_records(past, self._get)
        self._publisher.publish(accounts, self._read)
