"""Correlated outages, pure: when the deaths of a pool are one incident, and what an incident is.

A database that is away kills every worker alike; no worker is to blame (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ids import MAX_INDEX
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.time import Moment, age_ms

SPAN_MS: Final = 10_000
LEAST: Final = 3
INCIDENT: Final = "incident:"  # prefix of the reason of a hold that an incident made


class Incident(NamedTuple):
    """One outage of one pool. While it is open, only the canary is started, at its own cost."""

    pool: str
    kind: str
    code: int
    opened: Moment
    canary: str
    members: tuple[str, ...]  # all that died in it
    refunds: tuple[tuple[str, str], ...]  # component and invocation: restarts to refund
    closed: str = ""  # why it was closed; empty: it is open
    closed_wall_ms: int | None = None
    tried: tuple[str, ...] = ()  # the canaries before this one, oldest first
    deaths: int | None = None  # of its members while it was open; None: not counted yet

    @property
    def key(self) -> str:
        """An identity that no other incident of the host has. Wall time alone does not do: a clock
        may be set back, also to the same moment at each boot."""
        return f"{self.pool}:{self.opened.wall_ms}:{self.opened.boottime_ms}"

    @property
    def text(self) -> str:
        """The reason of the holds of its members."""
        count = len(self.members)
        alike = f"{INCIDENT} {count} workers of {self.pool} died alike ({self.kind})"
        return f"{alike}; {self.canary} is tried first"

    def to_doc(self) -> dict[str, Any]:
        """Return a dict for JSON, in which tuples become lists."""
        return self._asdict()

    def to_past_doc(self) -> dict[str, Any]:
        """Return a short dict for what is kept: there is nothing to refund any more, and the
        numbers of a thousand members are a few characters."""
        doc = self.to_doc() | {"members": pack(self.members)}
        del doc["refunds"]
        return doc

    @classmethod
    def from_doc(cls, doc: Mapping[str, Any]) -> Incident:
        known = {name: doc[name] for name in cls._fields if name in doc}
        known["opened"] = Moment(*known["opened"])
        known["members"] = tuple(known["members"])
        known["tried"] = tuple(known.get("tried", ()))
        known["refunds"] = tuple((one, other) for one, other in known["refunds"])
        return cls(**known)


def pack(members: Iterable[str]) -> str:
    """Return the numbers of workers of one pool as text: ``0-3,7``."""
    spans: list[list[int]] = []
    for number in sorted({int(name.rpartition(":")[2]) for name in members}):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def unpack(pool: str, numbers: str) -> tuple[str, ...]:
    """Return the workers of a pool that ``pack`` has written; ValueError if it has not."""
    found: list[str] = []
    for span in filter(None, numbers.split(",")):
        first, _, last = span.partition("-")
        members = range(int(first), int(last or first) + 1)
        if len(found) + len(members) > MAX_INDEX + 1:
            raise ValueError("more workers than a pool can have")
        found += (f"worker:{pool}:{number}" for number in members)
    return tuple(found)


def find_outage(deaths: Iterable[Death], workers: int, now: Moment) -> list[Death]:
    """Return the deaths that make an outage of a pool of this size; [] if none do.

    They have the same class and code, are at most ten seconds old, and are of at least three and
    at least half of the workers.
    """
    alike: dict[tuple[str, int], dict[str, Death]] = {}
    for death in deaths:
        if death.at is not None and age_ms(death.at, now) < SPAN_MS:
            # Of a worker that died twice the later death counts.
            alike.setdefault((death.kind, death.code), {})[death.component_id] = death
    for group in alike.values():
        if len(group) >= LEAST and 2 * len(group) >= workers:
            return [group[name] for name in sorted(group)]
    return []


def open_incident(
    booked: Iterable[Death], fresh: Iterable[Death], pool: str, workers: int, now: Moment
) -> Incident | None:
    """Return the incident that these deaths of a pool make, if they make one.

    ``booked`` deaths have cost a restart, which is refunded to all members but the canary.
    """
    booked = list(booked)
    outage = find_outage([*booked, *fresh], workers, now)
    if not outage:
        return None
    first, others = outage[0], {death.component_id for death in outage[1:]}
    refunds = tuple(
        (death.component_id, death.invocation)
        for death in booked
        if death.component_id in others and (death.kind, death.code) == (first.kind, first.code)
    )
    members = tuple(death.component_id for death in outage)
    return Incident(pool, first.kind, first.code, now, first.component_id, members, refunds)
