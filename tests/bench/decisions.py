"""What a decision and a health step cost, and that a long history costs nothing more."""

from __future__ import annotations

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.health import REGISTERED, HealthRules, Signal, State, step
from nomarr_systemd.core.policy import History, Rules, decide
from nomarr_systemd.core.time import Moment
from tests.bench.timing import compare, repeat, report
from tests.support.moments import death

TIMES = 2000


def history_of(records: int, rules: Rules, now: Moment) -> History:
    account = Account("worker:tag:0")
    for number in range(records):
        moment = now.later(-1000 * (records - number))
        failure = death(f"{number:032x}", "signal", -11)
        account, _ = book.record_failure(account, failure, rules, moment)
    return book.history_of(account, now)


def measure() -> None:
    now = Moment(1_700_000_000_000, "b" * 32, 9_000_000)
    rules = Rules(max_restarts=100, max_lifetime_restarts=0)
    failure = death("f" * 32, "signal", -11)
    few, many = (history_of(records, rules, now) for records in (10, 99))
    full = history_of(100, rules, now)
    restart, flat, refusal = compare(
        [
            repeat(lambda: decide(few, failure, rules, now), TIMES),
            repeat(lambda: decide(many, failure, rules, now), TIMES),
            repeat(lambda: decide(full, failure, rules, now), TIMES),
        ],
        rounds=15,
    )
    report("decide, 10 records", f"{restart / TIMES * 1e6:.2f} µs", "bar 10 µs")
    report("decide, 99 records, to 10 records", f"{flat / restart:.2f}", "flat: 1.0")
    report("decide, 100 records, window full", f"{refusal / TIMES * 1e6:.2f} µs", "bar 10 µs")

    health, healthy = HealthRules(), Signal("healthy")
    state, _ = step(State(), REGISTERED, 0.0, health)
    state, _ = step(state, healthy, 0.0, health)
    (taken,) = compare([repeat(lambda: step(state, healthy, 2.5, health), TIMES)], 15)
    report("health step", f"{taken / TIMES * 1e6:.2f} µs")
