"""A store that fails in the middle of several writes, as if the program were killed there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.store.protocol import Store


class Broken:
    """A store that fails at its n-th write, before or after it is made."""

    def __init__(self, store: Store, at: int, *, after: bool) -> None:
        self._store = store
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._fail(found) if name in ("add", "replace", "insert") else found

    def _fail(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            self._left -= 1
            if self._left:
                return method(*args)
            if self._after:
                method(*args)
            raise StoreUnavailable("killed")

        return call
