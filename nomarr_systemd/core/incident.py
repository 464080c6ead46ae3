"""Correlated outages (DESIGN §12), pure: when the deaths of a pool are one incident, and what an
incident is. A store that is away kills every worker alike; none of them is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.time import Moment, age_ms

SPAN_MS: Final = 10_000
LEAST: Final = 3


class Loss(NamedTuple):
    """A death that a worker was blamed for."""

    component_id: str
    invocation: str
    kind: str
    code: int
    moment: Moment


class Incident(NamedTuple):
    """One outage of one pool. While it is open, only the canary is started, and pays for it."""

    pool: str
    kind: str
    code: int
    opened: Moment
    canary: str
    members: tuple[str, ...]  # all that died in it
    refunds: tuple[tuple[str, str], ...]  # component and invocation: what they cost is given back
    closed: str = ""  # why it was closed; empty: it is open
    closed_wall_ms: int | None = None

    @property
    def text(self) -> str:
        """What holds its members."""
        count = len(self.members)
        alike = f"incident: {count} workers of {self.pool} died alike ({self.kind})"
        return f"{alike}; {self.canary} is tried first"

    def to_doc(self) -> dict[str, Any]:
        """As JSON can hold it; JSON makes lists of the tuples."""
        return self._asdict()

    @classmethod
    def from_doc(cls, doc: Mapping[str, Any]) -> Incident:
        known = {name: doc[name] for name in cls._fields if name in doc}
        known["opened"] = Moment(*known["opened"])
        known["members"] = tuple(known["members"])
        known["refunds"] = tuple((one, other) for one, other in known["refunds"])
        return cls(**known)


def find_outage(losses: Iterable[Loss], workers: int, now: Moment) -> list[Loss]:
    """The losses that make an outage of a pool with so many workers; none, if there is none.

    Alike, within the last ten seconds, of at least three and at least half of the workers.
    """
    alike: dict[tuple[str, int], dict[str, Loss]] = {}
    for loss in losses:
        if age_ms(loss.moment, now) < SPAN_MS:
            # Of one that died twice the later death counts.
            alike.setdefault((loss.kind, loss.code), {})[loss.component_id] = loss
    for group in alike.values():
        if len(group) >= LEAST and 2 * len(group) >= workers:
            return sorted(group.values())
    return []
