"""The restart policy: the table of docs/policy.md, the order of questions, edge cases."""

from __future__ import annotations

import pytest

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Decision, History, Rules, decide, decide_blind
from nomarr_systemd.core.text import describe_ms
from nomarr_systemd.core.time import Moment, age_ms
from tests.support.moments import BOOT, PLAIN, at, death, run


def replay(rules: Rules, deaths: list[float]) -> list[Decision]:
    """What a worker gets that dies at these seconds."""
    account = Account("worker:tag:0")
    decisions = []
    for number, second in enumerate(deaths):
        account, record = book.record_failure(account, death(run(number)), rules, at(second))
        decisions.append(record.decision)
    return decisions


def delays(decisions: list[Decision]) -> list[float]:
    return [decision.delay_ms / 1000 for decision in decisions if decision.action == "restart"]


def actions(decisions: list[Decision]) -> list[str]:
    return [decision.action for decision in decisions]


# The three rows of the table


def test_dies_at_once_again_and_again() -> None:
    decisions = replay(PLAIN, [0, 1, 3, 7, 15, 31])
    assert delays(decisions) == [1, 2, 4, 8, 16]
    assert actions(decisions) == ["restart"] * 5 + ["fail"]
    assert decisions[5].failure_reason == "5 restarts within 5 min, the limit is 5"
    assert decisions[5].evidence.window_used == 5
    assert decisions[5].evidence.next_available_ms == 300_000 - 31_000


def test_dies_every_70_seconds() -> None:
    decisions = replay(PLAIN, [70 * number for number in range(21)])
    assert delays(decisions) == [1, 2, 4, 8, 16, 32] + [60] * 14
    assert actions(decisions) == ["restart"] * 20 + ["fail"]
    assert decisions[20].failure_reason == "20 restarts in all, the limit is 20"
    assert decisions[20].evidence.next_available_ms is None


def test_dies_every_11_minutes() -> None:
    decisions = replay(PLAIN, [660 * number for number in range(21)])
    assert delays(decisions) == [1] * 20
    assert actions(decisions)[20] == "fail"


# The order of the questions


def test_the_same_invocation_gets_the_same_answer() -> None:
    first = decide(History(), death(run(1)), Rules(), at(0))
    again = History(decided={run(1): first}, lifetime=99)
    assert decide(again, death(run(1), stop_asked=True), Rules(), at(9)) is first


EXCUSES = [
    (death(run(1), code=78, stop_asked=True, held="paused"), "ignore", "a stop was asked for"),
    (death(run(1), shutting_down=True, held="paused"), "ignore", "the system is shutting down"),
    (death(run(1), code=78, held="paused by uid 0"), "hold", "paused by uid 0"),
    (death(run(1), code=75, supervisor_away=True), "hold", "its supervisor was away"),
    (death(run(1), code=78, incident="tag-7"), "hold", "part of an incident: tag-7"),
]


@pytest.mark.parametrize(("failure", "action", "reason"), EXCUSES)
def test_not_the_workers_fault(failure: Death, action: str, reason: str) -> None:
    spent = History(lifetime=20, this_boot_ms=[0] * 5)
    decision = decide(spent, failure, Rules(), at(1))
    assert decision.action == action
    assert decision.reason.startswith(reason)
    assert decision.evidence.lifetime_used == 20  # evidence is in every decision
    assert decide_blind(failure, Rules())[:3] == decision[:3]


def test_75_counts_while_the_supervisor_lives() -> None:
    assert decide(History(), death(run(1), code=75), Rules(), at(0)).action == "restart"
    away = death(run(1), code=1, supervisor_away=True)
    assert decide(History(), away, Rules(), at(0)).action == "restart"


def test_never_restart_comes_before_the_limits() -> None:
    decision = decide(History(lifetime=20), death(run(1), code=78), Rules(), at(0))
    assert decision.failure_reason == "exit status 78 is never restarted"
    assert decision.evidence.next_available_ms is None
    killed = death(run(1), kind="signal", code=-15)
    assert decide(History(), killed, Rules(never_restart=(15,)), at(0)).action == "restart"


def test_lifetime_comes_before_the_window() -> None:
    full = History(lifetime=20, this_boot_ms=[0] * 5)
    assert "in all" in decide(full, death(run(1)), Rules(), at(1)).reason


def test_without_the_store_it_waits_longest_and_never_masks() -> None:
    decision = decide_blind(death(run(1), code=78), Rules())
    assert (decision.action, decision.delay_ms) == ("restart", 60_000)


# Backoff


def test_jitter_is_bounded_and_comes_from_the_invocation() -> None:
    seen = set()
    for number in range(2000):
        failure = death(run(number))
        decision = decide(History(k=3), failure, Rules(), at(0))
        assert decision == decide(History(k=3), failure, Rules(), at(0))
        assert 7200 <= decision.delay_ms <= 8800
        seen.add(decision.delay_ms)
    assert min(seen) < 7250
    assert max(seen) > 8750


def test_jitter_never_passes_the_cap() -> None:
    for number in range(200):
        assert decide(History(k=9), death(run(number)), Rules(), at(0)).delay_ms == 60_000


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (PLAIN._replace(backoff_base_s=0), [0, 0, 0, 0, 0]),
        (PLAIN._replace(backoff_multiplier=1), [1, 1, 1, 1, 1]),
        (PLAIN._replace(backoff_max_s=3), [1, 2, 3, 3, 3]),
        (PLAIN._replace(backoff_base_s=0.1, backoff_max_s=2), [0.1, 0.2, 0.4, 0.8, 1.6]),
        (PLAIN._replace(stable_after_s=0), [1, 1, 1, 1, 1]),
    ],
)
def test_backoff_settings(rules: Rules, expected: list[float]) -> None:
    assert delays(replay(rules, [0, 1, 2, 3, 4])) == expected


def test_an_endless_crasher_overflows_nothing() -> None:
    rules = PLAIN._replace(max_lifetime_restarts=0, window_s=1)
    account = Account("worker:tag:0", k=10**6)
    _, record = book.record_failure(account, death(run(1)), rules, at(0))
    assert record.delay_ms == 60_000
    no_base = rules._replace(backoff_base_s=0)
    assert decide(History(k=10**6), death(run(1)), no_base, at(0)).delay_ms == 0


def test_a_stable_run_is_measured_from_when_its_restart_was_due() -> None:
    # Restarted at 0 with 1 s of backoff: 600 s after it was due is second 601.
    for second, expected in ((600.999, 2000), (601, 1000)):
        assert replay(PLAIN, [0, second])[1].delay_ms == expected


# The window


def test_a_restart_at_the_windows_edge_is_out() -> None:
    rules = PLAIN._replace(max_restarts=1, stable_after_s=10_000)
    assert actions(replay(rules, [0, 299.999])) == ["restart", "fail"]
    assert actions(replay(rules, [0, 300])) == ["restart", "restart"]


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, ["fail"] * 3), (1, ["restart", "fail", "fail"])]
)
def test_small_limits(limit: int, expected: list[str]) -> None:
    assert actions(replay(PLAIN._replace(max_restarts=limit), [0, 1, 2])) == expected
    lifetime = PLAIN._replace(max_lifetime_restarts=limit)
    if limit:
        assert actions(replay(lifetime, [0, 1, 2])) == expected
    else:
        assert actions(replay(lifetime, [0, 1, 2])) == ["restart"] * 3


def test_no_room_ever_means_no_next_time() -> None:
    for rules in (PLAIN, PLAIN._replace(on_exhausted="cooldown")):
        decision = replay(rules._replace(max_restarts=0), [0])[0]
        assert (decision.action, decision.evidence.next_available_ms) == ("fail", None)


def test_cooldown_waits_until_the_window_has_room() -> None:
    rules = PLAIN._replace(on_exhausted="cooldown", max_lifetime_restarts=0)
    decisions = replay(rules, [0, 1, 3, 7, 15, 31])
    assert actions(decisions) == ["restart"] * 6
    assert decisions[5].delay_ms == 300_000 - 31_000
    assert decisions[5].reason.startswith("cooling down: 5 restarts within 5 min")
    # It entered the window when it was due, at second 300: the next one waits for second 301.
    later = replay(rules, [0, 1, 3, 7, 15, 31, 300])
    assert later[6].evidence.window_used == 5
    assert later[6].evidence.next_available_ms == 1000


def test_cooldown_is_never_shorter_than_the_backoff() -> None:
    rules = PLAIN._replace(on_exhausted="cooldown", window_s=10, max_restarts=1, backoff_base_s=30)
    assert delays(replay(rules, [0, 9])) == [30, 60]


# Time


def test_a_wall_clock_step_within_a_boot_changes_nothing() -> None:
    honest = replay(PLAIN, [0, 1, 3, 7, 15, 31])
    account = Account("worker:tag:0")
    for number, second in enumerate([0, 1, 3, 7, 15, 31]):
        jump = 10 * 365 * 86_400_000 * (-1) ** number
        now = Moment(at(second).wall_ms + jump, BOOT, at(second).boottime_ms)
        account, record = book.record_failure(account, death(run(number)), PLAIN, now)
        assert record.decision == honest[number]


def test_across_boots_wall_time_counts_and_a_negative_age_is_zero() -> None:
    before = Moment(1_000_000, "a" * 32, 500_000)
    assert age_ms(before, Moment(1_060_000, BOOT, 3000)) == 60_000
    assert age_ms(before, Moment(400_000, BOOT, 3000)) == 0
    assert age_ms(at(5), at(3)) == 0

    account = Account("worker:tag:0")
    for number in range(5):
        account, _ = book.record_failure(account, death(run(number)), PLAIN, at(number, "a" * 32))
    back = Moment(at(0).wall_ms - 86_400_000, BOOT, 1000)
    _, record = book.record_failure(account, death(run(9)), PLAIN, back)
    assert (record.action, record.next_available_ms) == ("fail", 300_000)
    after = Moment(at(302).wall_ms, BOOT, 1000)
    _, record = book.record_failure(account, death(run(9)), PLAIN, after)
    assert (record.action, record.window_used) == ("restart", 2)


def test_room_is_found_among_restarts_of_two_boots() -> None:
    rules = PLAIN._replace(max_restarts=3)
    account = Account("worker:tag:0")
    for number, moment in enumerate((at(0, "a" * 32), at(100, "a" * 32), at(200))):
        account, _ = book.record_failure(account, death(run(number)), rules, moment)
    _, record = book.record_failure(account, death(run(9)), rules, at(250))
    assert (record.action, record.next_available_ms) == ("fail", 50_000)


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (1500, "1.5 s"),
        (9999, "10 s"),
        (12_000, "12 s"),
        (192_000, "3 min 12 s"),
        (300_000, "5 min"),
        (3_600_000, "1 h"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_durations_in_words(ms: int, words: str) -> None:
    assert describe_ms(ms) == words
