"""Spooled deaths for tests."""

from __future__ import annotations

from typing import NamedTuple

from nomarr_systemd.core.policy import Rules, decide_blind
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import Spooled
from nomarr_systemd.ledger.ledger import Booked, Ledger
from nomarr_systemd.ledger.spool import Spool
from tests.support.moments import death

RULES = Rules(backoff_jitter=0)


class Replay(NamedTuple):
    booked: list[tuple[Spooled, Booked]]
    bad: list[str]


def entry(number: int, second: int = 0, instance: str = "tag-0") -> Spooled:
    component = f"worker:{instance.replace('-', ':')}"
    died = death(f"{number:032x}", "core-dump", -11, run_ms=5, component=component)
    at = Moment(1_700_000_000_000 + second * 1000, "b" * 32, second * 1000)
    return Spooled(died, decide_blind(died, RULES), at)


def replay(spool: Spool, ledger: Ledger) -> Replay:
    """Book all entries and clear them away, in the order of controller.act."""
    entries, bad = spool.read()
    booked = [(each, ledger.book(each.death, each.decision, RULES, each.at)) for each in entries]
    spool.remove(each.death.invocation for each in entries)
    for name in bad:
        spool.set_aside(name)
    return Replay(booked, bad)
