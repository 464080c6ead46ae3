"""A host's lease, and when it has lapsed; pure.

A supervisor renews its host's lease by the store's clock, which all hosts share. The lease also
says by which rules the jobs of its workers are settled if the host is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from nomarr_systemd.core.job import CrashPolicy
from nomarr_systemd.core.json import JsonError, get_int, get_str
from nomarr_systemd.core.named_tuple import NamedTuple

State = Literal["held", "lost"]
RENEWALS: Final = 4  # in the time of a lease
_LONGEST_MS: Final = 3_600_000


class PoolRules(NamedTuple):
    """The settings of a pool that decide about the jobs of a dead run."""

    name: str
    crash_policy: CrashPolicy = "restart-fail-in-flight"
    crash_max_retries: int | None = None
    job_max_crashes: int = 2


class Lease(NamedTuple):
    """The part of a host's document that says whether the host is there."""

    host: str
    name: str
    holder: str  # boot id and user id of the supervisor
    state: State
    renewed_ms: int  # by the store's clock
    lease_ms: int
    rules: Mapping[str, PoolRules]
    rev: str = ""

    def age_ms(self, now_ms: int) -> int:
        return max(0, now_ms - self.renewed_ms)

    def is_over(self, now_ms: int) -> bool:
        """Return True if it was not renewed in time, by the store's clock."""
        return self.state == "lost" or self.age_ms(now_ms) > self.lease_ms

    def rules_of(self, pool: str) -> PoolRules:
        return self.rules.get(pool) or PoolRules(pool)


def read_lease(doc: Mapping[str, Any]) -> Lease:
    """Return the lease in a host's document; JsonError if it is damaged: workers can write it."""
    state = get_str(doc, "state")
    if state not in get_args(State):
        raise JsonError(f"attribute 'state' is {state!r:.40}")
    lease_ms = get_int(doc, "lease_ms")
    if not 0 < lease_ms <= _LONGEST_MS:
        raise JsonError("attribute 'lease_ms' is out of range")
    rules = doc.get("rules")
    found = (
        (name, _read_rules(name, each))
        for name, each in (rules.items() if isinstance(rules, dict) else ())
    )
    return Lease(
        str(doc["_key"]),
        get_str(doc, "name"),
        get_str(doc, "holder"),
        "lost" if state == "lost" else "held",
        get_int(doc, "renewed_ms"),
        lease_ms,
        {name: each for name, each in found if each is not None},
        str(doc.get("_rev", "")),
    )


def write_rules(rules: Iterable[PoolRules]) -> dict[str, list[Any]]:
    """Rules in the form of a host's document."""
    return {each.name: list(each[1:]) for each in rules}


def _read_rules(name: str, given: object) -> PoolRules | None:
    if not isinstance(given, list) or len(given) != 3:
        return None
    policy, retries, crashes = given
    if policy not in get_args(CrashPolicy) or type(crashes) is not int or crashes < 1:
        return None
    if retries is not None and type(retries) is not int:
        return None
    return PoolRules(name, policy, retries, crashes)


class _Seen(NamedTuple):
    rev: str
    first_s: float
    last_s: float


class LeaseWatch:
    """Finds leases that have lapsed.

    The store's clock decides. But it may jump, as after a failover to another server; and while the
    store is away, no host can renew its lease. So this process must also have seen the lease
    unchanged for half of its time, by its own monotonic clock and without a longer pause.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def judge(self, leases: Iterable[Lease], now_ms: int, now_s: float) -> list[Lease]:
        """Return those of ``leases``, the ones renewed longest ago, that have lapsed. ``now_ms`` is
        the store's clock, ``now_s`` our own."""
        seen: dict[str, _Seen] = {}
        lapsed = []
        for lease in leases:
            half_s = lease.lease_ms / 2000
            known = self._seen.get(lease.host)
            if known is None or known.rev != lease.rev or now_s - known.last_s > half_s:
                known = _Seen(lease.rev, now_s, now_s)
            seen[lease.host] = known._replace(last_s=now_s)
            if lease.is_over(now_ms) and now_s - known.first_s >= half_s:
                lapsed.append(lease)
        self._seen = seen
        return lapsed
