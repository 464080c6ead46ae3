"""The replay of a record under a policy, and the look ahead, held against the ledger's books."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import RING, Account
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.simulate import NOT_RUN, look_ahead, simulate, window_ages
from nomarr_systemd.core.time import Moment
from tests.support.moments import death

START = Moment(1_700_000_000_000, "a" * 32, 5_000_000)
RULES = Rules(backoff_jitter=0.0)

rules = st.builds(
    Rules,
    max_restarts=st.integers(0, 6),
    window_s=st.sampled_from([1.0, 30.0, 300.0]),
    max_lifetime_restarts=st.sampled_from([0, 3, 20]),
    backoff_base_s=st.sampled_from([0.0, 1.0, 5.0]),
    stable_after_s=st.sampled_from([0.0, 20.0, 600.0]),
    on_exhausted=st.sampled_from(["mask", "cooldown"]),
    backoff_multiplier=st.sampled_from([1.0, 2.0]),
    backoff_max_s=st.just(60.0),
    backoff_jitter=st.sampled_from([0.0, 0.1]),
    never_restart=st.just((78,)),
    lifetime_days=st.sampled_from([0.0, 0.0, 0.005, 30.0]),
)
events = st.lists(
    st.tuples(
        st.sampled_from(["die"] * 6 + ["config", "stop", "reset", "manual", "pause", "refund"]),
        st.integers(0, 700_000),
        st.booleans(),
    ),
    max_size=40,
)


def play(script: list[tuple[str, int, bool]], policy: Rules) -> tuple[Account, Moment]:
    """A worker's life on the books: each event so long after the last restart was due."""
    account = Account("worker:tag:0")
    now = START
    last = ""
    for number, (what, gap_ms, reboots) in enumerate(script):
        now = now.later(gap_ms)
        if reboots and gap_ms > 1000:
            now = Moment(now.wall_ms, f"{number:032x}", 1000)
        if what in ("die", "config", "stop"):
            if account.failed_at_wall_ms is not None:
                continue  # masked: nothing runs
            last = f"{number:032x}"
            code = 78 if what == "config" else 1
            failure = death(last, code=code, run_ms=gap_ms, stop_asked=what == "stop")
            account, record = book.record_failure(account, failure, policy, now)
            now = now.later(record.delay_ms)
        elif what == "reset":
            account = book.reset(account, now, "me")
        elif what == "refund" and last:
            account, _ = book.refund(account, last, now, "quarantined")
        elif what in ("manual", "pause") and account.failed_at_wall_ms is None:
            account = book.note(account, what, now, "me")
    return account, now


@given(events, rules)
def test_the_same_rules_give_what_is_on_record(
    script: list[tuple[str, int, bool]], policy: Rules
) -> None:
    account, now = play(script, policy)
    result = simulate(account, policy, now)
    for step in result.steps:
        assert (step.action, step.delay_ms) == (step.record.action, step.record.delay_ms)
        assert (step.down_ms, step.unknown_ms) == (step.would_be_down_ms, 0)
    assert result.recorded == result.simulated


@given(events, rules, rules)
def test_another_policy_keeps_to_its_own_limits(
    script: list[tuple[str, int, bool]], policy: Rules, other: Rules
) -> None:
    account, now = play(script, policy)
    result = simulate(account, other, now)
    deaths = [each for each in account.records if each.kind]
    assert [step.record for step in result.steps] == deaths
    assert sum(result.simulated[:3]) + sum(
        step.action in ("ignore", "hold") for step in result.steps
    ) == len(deaths)
    if not other.max_restarts:
        assert result.simulated.restarts == 0
    if all(each.action != "reset" for each in account.records) and (
        other.max_lifetime_restarts and not other.lifetime_days
    ):
        assert result.simulated.restarts <= other.max_lifetime_restarts


@given(events, rules, st.integers(0, 45))
def test_a_later_beginning_gives_the_end_of_the_same(
    script: list[tuple[str, int, bool]], policy: Rules, place: int
) -> None:
    account, now = play(script, policy)
    records = account.records
    since = records[place].wall_ms if place < len(records) else now.wall_ms + 1
    result = simulate(account, policy, now, since_wall_ms=since)
    assert all(step.record.wall_ms >= since or since == 0 for step in result.steps)
    for step in result.steps:
        assert (step.action, step.delay_ms) == (step.record.action, step.record.delay_ms)


def test_a_ring_that_is_full_begins_where_it_begins() -> None:
    policy = RULES._replace(max_lifetime_restarts=0, backoff_base_s=0.0)
    script = [("die", 70_000, False)] * (RING + 30)
    account, now = play(script, policy)
    result = simulate(account, policy, now)
    assert not result.whole
    assert len(result.steps) == len(account.rows) < RING + 30
    assert result.recorded == result.simulated


def test_records_from_before_the_ring_are_replayed_as_far_as_none_is_missing() -> None:
    policy = RULES._replace(max_lifetime_restarts=0, backoff_base_s=0.0)
    account, now = play([("die", 70_000, False)] * (3 * RING), policy)
    whole = account._replace(rows=(*account.moved, *account.rows))
    result = simulate(whole, policy, now)
    assert result.whole
    assert len(result.steps) == 3 * RING
    assert result.recorded == result.simulated
    torn = account._replace(rows=(*account.moved[:40], *account.moved[41:], *account.rows))
    result = simulate(torn, policy, now)
    assert (result.whole, len(result.steps)) == (False, 3 * RING - 41)


def test_a_stricter_policy_masks_and_spares_what_follows() -> None:
    account, now = play([("die", 100, False)] * 5, RULES)
    later = now.later(60_000)
    result = simulate(account, RULES._replace(max_restarts=2), later)
    assert [step.action for step in result.steps] == ["restart"] * 2 + ["fail", NOT_RUN, NOT_RUN]
    assert result.recorded[:3] == (5, 0, 0)
    assert result.simulated[:3] == (2, 1, 2)
    assert result.recorded.down_ms == 31_000
    # Two backoffs, and from the mask until now.
    died = result.steps[2].record.boottime_ms
    assert result.simulated.down_ms == 3_000 + later.boottime_ms - died


def test_a_milder_policy_would_have_gone_on() -> None:
    account, now = play([("die", 100, False)] * 6, RULES)
    account = book.reset(account, now.later(3_600_000), "me")
    result = simulate(account, RULES._replace(max_restarts=10), now.later(4_000_000))
    assert result.recorded[:2] == (5, 1)
    assert result.simulated[:2] == (6, 0)
    assert result.recorded.down_ms == 31_000 + 3_600_000 + 0
    assert result.simulated.down_ms == 31_000 + 32_000
    # It was masked for an hour: nothing says whether it would have run then.
    assert result.simulated.unknown_ms == 3_600_000 - 32_000
    assert result.recorded.unknown_ms == 0


def test_a_looser_policy_is_not_flattered() -> None:
    """It died at once each time, and is masked until now: that it would have run is not known."""
    account, now = play([("die", 100, False)] * 6, RULES)
    later = now.later(600_000)
    result = simulate(account, RULES._replace(max_restarts=10), later)
    saved_ms = result.recorded.down_ms - result.simulated.down_ms
    assert saved_ms == result.simulated.unknown_ms == 600_000 - 32_000


def test_longer_delays_move_what_follows() -> None:
    """Runs fail after the same time, so the window empties earlier than the record says."""
    account, now = play([("die", 100, False)] * 5, RULES)
    slow = RULES._replace(backoff_base_s=60.0, backoff_multiplier=1.0, max_restarts=4, window_s=200)
    result = simulate(account, slow, now)
    assert [step.action for step in result.steps] == ["restart"] * 5


def test_nothing_on_record() -> None:
    result = simulate(Account("worker:tag:0"), RULES, START)
    assert result.steps == ()
    assert result.whole


def test_looking_ahead_of_a_fresh_worker() -> None:
    ahead = look_ahead(Account("worker:tag:0"), RULES, START)
    assert [each.decision.delay_ms for each in ahead] == [1000, 2000, 4000, 8000, 16000, 0]
    assert ahead[-1].decision.action == "fail"
    assert ahead[-1].at_ms == 31_000


@given(events, rules)
def test_looking_ahead_begins_with_what_the_next_failure_gets(
    script: list[tuple[str, int, bool]], policy: Rules
) -> None:
    policy = policy._replace(backoff_jitter=0.0)
    account, now = play(script, policy)
    account = account._replace(failed_at_wall_ms=None)
    ahead = look_ahead(account, policy, now)
    _, record = book.record_failure(account, death("f" * 32, code=1), policy, now)
    assert ahead[0].decision == record.decision
    assert len(window_ages(account, now)) == sum(len(row) // 3 for row in account.window.values())
