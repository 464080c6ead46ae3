"""Spooled failures for tests."""

from __future__ import annotations

from nomarr_systemd.core.death import Failure
from nomarr_systemd.core.policy import Rules, decide_blind
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.spool import Spooled

RULES = Rules(backoff_jitter=0)


def entry(number: int, second: int = 0, instance: str = "tag-0") -> Spooled:
    failure = Failure(f"{number:032x}", "core-dump", -11, run_ms=5)
    at = Moment(1_700_000_000_000 + second * 1000, "b" * 32, second * 1000)
    return Spooled(
        f"worker:{instance.replace('-', ':')}", failure, decide_blind(failure, RULES), at
    )
