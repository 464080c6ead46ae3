"""When a host's lease has lapsed: by the store's clock, unless that clock has jumped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core.json import JsonError
from nomarr_systemd.core.lease import (
    RENEWALS,
    Lease,
    LeaseWatch,
    PoolRules,
    read_lease,
    write_rules,
)

LEASE_MS = 30_000
DOC = {
    "_key": "b",
    "_rev": "1",
    "name": "beta",
    "holder": "boot/0",
    "state": "held",
    "renewed_ms": 1_000_000,
    "lease_ms": LEASE_MS,
    "rules": {"tag": ["fail-pool", None, 2], "odd": ["none", 1, 1], "short": []},
}


def lease(renewed_ms: int, rev: str) -> Lease:
    return read_lease(DOC | {"renewed_ms": renewed_ms, "_rev": rev})


def test_a_lease_is_read_and_its_rules_checked() -> None:
    found = read_lease(DOC)
    assert found.rules_of("tag") == PoolRules("tag", "fail-pool", None, 2)
    assert found.rules_of("odd") == PoolRules("odd")
    assert write_rules(found.rules.values()) == {"tag": ["fail-pool", None, 2]}


@pytest.mark.parametrize(
    ("field", "value"),
    [("state", "gone"), ("state", 1), ("renewed_ms", "1"), ("lease_ms", 0), ("lease_ms", 1 << 40)],
)
def test_a_damaged_lease_is_refused(field: str, value: object) -> None:
    with pytest.raises(JsonError):
        read_lease(DOC | {field: value})


def test_a_lease_that_is_not_renewed_lapses_after_its_time() -> None:
    watch, there = LeaseWatch(), lease(0, "1")
    assert [
        now_s
        for now_s in range(0, 61, 5)
        if watch.judge([there] if now_s > 15 else [], now_s * 1000, now_s)
    ] == [35, 40, 45, 50, 55, 60]


@given(
    jumps=st.lists(st.integers(-10_000_000, 10_000_000), min_size=1, max_size=40),
    start=st.integers(0, 10**12),
)
def test_a_host_that_renews_is_never_lost_however_the_clock_jumps(
    jumps: list[int], start: int
) -> None:
    watch, now_ms = LeaseWatch(), start
    for turn, jump in enumerate(jumps):
        there = lease(now_ms, str(turn))
        for part in range(3):  # looks between two renewals
            now_s = (turn + part / 3) * LEASE_MS / 1000 / RENEWALS
            now_ms += jump
            assert watch.judge([there], now_ms, now_s) == []


@given(st.lists(st.integers(1, 30), max_size=30))
def test_a_host_is_not_lost_before_its_time_is_over_on_both_clocks(pauses_s: list[int]) -> None:
    """Nor just after a pause in which the store may have been away for all hosts."""
    watch, there, now_s, since_s = LeaseWatch(), lease(0, "1"), 0, 0
    for pause_s in pauses_s:
        if since_s == 0 or pause_s * 2000 > LEASE_MS:
            since_s = now_s + pause_s
        now_s += pause_s
        lapsed = watch.judge([there], now_s * 1000, now_s)
        is_over = now_s * 1000 > LEASE_MS and (now_s - since_s) * 2000 >= LEASE_MS
        assert bool(lapsed) == is_over
