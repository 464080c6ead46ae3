"""When a store publishes: documents of the ledger, after they were committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.store.protocol import POLICY_LEDGER, Publisher


class Publication:
    """Publishes what a store has written. ``read`` returns the JSON of documents that exist."""

    def __init__(
        self, publisher: Publisher | None, read: Callable[[list[str]], Mapping[str, str]]
    ) -> None:
        self._publisher = publisher
        self._read = read
        self._waiting: set[str] | None = None  # in a batch: keys to publish at its end

    @property
    def in_batch(self) -> bool:
        return self._waiting is not None

    def written(self, collection: str, key: str) -> None:
        """Publish a document that was written; in a batch, at its end."""
        if collection != POLICY_LEDGER:
            return
        if self._waiting is not None:
            self._waiting.add(key)
        else:
            self._publish(key)

    @contextlib.contextmanager
    def batch(self, *, always: bool = False) -> Iterator[None]:
        """Publish at the end what is written in it; ``always``: also after an exception, because
        each write is durable by itself."""
        if self._waiting is not None:
            raise StoreError("a batch cannot contain another batch")
        self._waiting = waiting = set[str]()
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            self._waiting = None
            if is_whole or always:
                self._publish(*sorted(waiting))

    def _publish(self, *keys: str) -> None:
        if self._publisher is not None:
            self._publisher.publish(keys, self._read)
