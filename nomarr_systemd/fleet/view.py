"""Hosts as people are shown them: typed, clean and cut, the worst first.

Every worker may write the work store, so its documents are not trusted; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, Literal

from nomarr_systemd.core.json import get_objects
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import one_line
from nomarr_systemd.store.protocol import Doc

State = Literal["up", "stale", "lost"]
MAX_HOSTS: Final = 2000  # in one answer
WELL: Final = ("healthy", "starting", "stopping")
DOWN: Final = frozenset(("failed", "crashed", "stopped"))
_MAX_TEXT: Final = 200
_MAX_LIST: Final = 20
_MAX_POOLS: Final = 100
_LATEST_MS: Final = 1 << 50
_STATES: Final = ("lost", "stale", "up")
_SYSTEMS: Final = ("error", "degraded", "", "healthy")
_FIELDS: Final = (
    *("name", "state", "renewed_ms", "lease_ms", "version", "system", "pools", "trouble"),
    "crashes",
)


class CrashView(NamedTuple):
    """The last known death of one worker."""

    worker: str  # its instance
    wall_ms: int
    invocation: str
    cause: str
    decision: str


class HostView(NamedTuple):
    """One host: ``stale`` if its lease is over, ``lost`` if other hosts have settled its jobs."""

    host: str
    name: str
    state: State
    age_ms: int  # since its lease was renewed, by the store's clock
    lease_ms: int
    version: str
    system: str  # healthy, degraded, error; as it was then
    pools: Mapping[str, Mapping[str, int]]  # workers by status, by pool
    trouble: tuple[tuple[str, str], ...]  # workers that are not well, and their status
    crashes: tuple[CrashView, ...]  # newest first

    def statuses(self) -> dict[str, int]:
        """Return its workers by status."""
        found: dict[str, int] = {}
        for states in self.pools.values():
            for status, number in states.items():
                found[status] = found.get(status, 0) + number
        return found

    @property
    def is_well(self) -> bool:
        return self.state == "up" and all(status in WELL for status in self.statuses())

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "trouble": [{"worker": worker, "status": status} for worker, status in self.trouble],
            "crashes": [each._asdict() for each in self.crashes],
        }


def view_hosts(docs: Iterable[Doc], now_ms: int) -> list[HostView]:
    """Return the hosts of these documents, the worst first; ``now_ms`` is the store's clock."""
    return sorted((_view(doc, now_ms) for doc in docs), key=_rank)


def trim(doc: Doc) -> Doc:
    """Return the part of a host's document that is shown, for the live socket."""
    return {"_key": doc["_key"], **{name: doc[name] for name in _FIELDS if name in doc}}


def _rank(host: HostView) -> tuple[int, int, str, str]:
    return _STATES.index(host.state), _SYSTEMS.index(host.system), host.name, host.host


def _view(doc: Doc, now_ms: int) -> HostView:
    lease_ms, system = _number(doc.get("lease_ms")), _text(doc.get("system"))
    age_ms = max(0, now_ms - _number(doc.get("renewed_ms")))
    state: State = "stale" if age_ms > lease_ms else "up"
    host = _text(doc.get("_key"))
    return HostView(
        host,
        _text(doc.get("name")) or host,
        "lost" if doc.get("state") == "lost" else state,
        age_ms,
        lease_ms,
        _text(doc.get("version")),
        system if system in _SYSTEMS else "",
        dict(_read_pools(doc.get("pools"))),
        tuple(
            (_text(each.get("worker")), _text(each.get("status")))
            for each in get_objects(doc, "trouble")[:_MAX_LIST]
        ),
        tuple(
            CrashView(
                _text(each.get("worker")),
                _number(each.get("wall_ms")),
                *(_text(each.get(name)) for name in ("invocation", "cause", "decision")),
            )
            for each in get_objects(doc, "crashes")[:_MAX_LIST]
        ),
    )


def _read_pools(given: object) -> Iterable[tuple[str, dict[str, int]]]:
    for pool, states in islice(given.items(), _MAX_POOLS) if isinstance(given, dict) else ():
        if isinstance(states, dict):
            known = islice(states.items(), _MAX_LIST)
            yield _text(pool), {_text(word): _number(number) for word, number in known}


def _text(value: object) -> str:
    return one_line(value, _MAX_TEXT) if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < _LATEST_MS else 0
