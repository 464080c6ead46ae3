"""Turns of restarts in the store: a limited number of workers of a pool may restart at once, on all
hosts. A turn is a lease: it ends by itself, by the store's clock, if its host is lost.

One document for each pool, changed only by compare-and-swap. When a worker waits for its turn is
decided in ``core.start_table``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.world import Turns
from nomarr_systemd.store.protocol import Doc, Store, hosted

_META: Final = "meta"
_TRIES: Final = 1000  # in each try one of the writers succeeds

Holders = dict[str, int]  # until when, by the store's clock; by worker and host


class TurnStore:
    """The turns of one host's workers; ``at_once`` is how many a pool has on all hosts."""

    def __init__(self, store: Store, host: str, at_once: int) -> None:
        self._store = store
        self._host = host
        self._at_once = at_once

    def read(self, pools: Iterable[str]) -> dict[str, Turns]:
        """Return the turns of these pools; none if there is no limit."""
        if not self._at_once:
            return {}
        now_ms = self._store.now_ms()
        found = {}
        for pool in pools:
            held = _held(self._store.get(_META, _key(pool)) or {}, now_ms)
            mine = (name.partition("@") for name in held)
            names = frozenset(name for name, _, host in mine if host == self._host)
            found[pool] = Turns(max(0, self._at_once - len(held)), names)
        return found

    def take(self, component: Component, for_ms: int) -> bool:
        """Take a turn for a while, or keep the one that the worker has; False if none is free."""
        name = hosted(component.component_id, self._host)

        def change(held: Holders, now_ms: int) -> Holders:
            if name not in held and len(held) >= self._at_once:
                return held
            return held | {name: now_ms + for_ms}

        return name in self._change(component.pool, change)

    def give(self, component: Component) -> None:
        """End the turn of the worker, if it has one."""
        name = hosted(component.component_id, self._host)

        def change(held: Holders, _now_ms: int) -> Holders:
            return {each: until_ms for each, until_ms in held.items() if each != name}

        self._change(component.pool, change)

    def _change(self, pool: str, change: Callable[[Holders, int], Holders]) -> Holders:
        for _ in range(_TRIES):
            now_ms = self._store.now_ms()
            doc = self._store.get(_META, _key(pool))
            held = _held(doc or {}, now_ms)
            after = change(held, now_ms)
            if after == held:
                return after
            fields: dict[str, Any] = {"what": "turns", "pool": pool, "holders": after}
            try:
                if doc is None:
                    self._store.insert(_META, {"_key": _key(pool), **fields})
                else:
                    self._store.replace(_META, {**doc, **fields})
            except (KeyExists, StaleRevision):
                continue
            return after
        raise StoreUnavailable(f"{_META}/{_key(pool)} changed again and again")


def _key(pool: str) -> str:
    return f"turns_{pool}"


def _held(doc: Doc, now_ms: int) -> Holders:
    """Return the turns that are not over. What is damaged counts as over: then restarts do not
    wait."""
    holders = doc.get("holders")
    return {
        name: until_ms
        for name, until_ms in (holders.items() if isinstance(holders, dict) else ())
        if type(until_ms) is int and until_ms > now_ms
    }
