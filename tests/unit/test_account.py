"""Bookings: exactly once, refunds, holds, manual starts, resets, start jobs, and the ring."""

from __future__ import annotations

import json

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import MOVED, RING, Account
from nomarr_systemd.core.ids import next_start_job
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.policy import Decision, Evidence, Rules
from tests.support.moments import PLAIN, at, death, run

EMPTY = Account("worker:tag:0")


def crash(account: Account, number: int, second: float, rules: Rules = PLAIN) -> Account:
    return book.record_failure(account, death(run(number)), rules, at(second))[0]


def reopen(account: Account) -> Account:
    return book.from_doc(json.loads(json.dumps(book.to_doc(account))))


def test_a_second_booking_changes_nothing() -> None:
    account = crash(EMPTY, 1, 0)
    again, record = book.record_failure(account, death(run(1), code=78), PLAIN, at(50))
    assert again is account
    assert (record.attempt, record.delay_ms) == (1, 1000)
    decision = Decision("fail", 0, "x", Evidence(0, 0, 0, 0, 0, None))
    assert book.book(account, death(run(1)), decision, PLAIN, at(60))[0] is account


def test_a_failure_is_booked_with_all_its_facts() -> None:
    failure = death(run(1), "core-dump", -11, run_ms=192_000)
    account, record = book.record_failure(EMPTY, failure, PLAIN, at(5))
    assert record == Record(
        1, run(1), "restart", "core-dump", -11, 1000, *at(5), "scheduled", 192_000,
        0, 5, 0, 20, 0, 0, "restart 1/5 within 5 min, 1/20 in all, after 1 s",
    )  # fmt: skip
    assert record.reason == "failure"
    assert reopen(account).records == [record]
    assert account.restart_count == 1
    assert account.last_restart_wall_ms == account.updated_at_wall_ms == at(5).wall_ms


def test_a_document_survives_json() -> None:
    account = EMPTY
    for number in range(5):
        account = crash(account, number, number * 100)
    account = book.mark_failed(account, "by | hand\nand so", at(900))
    assert reopen(account) == account
    assert account.records[-1].text == "by / hand and so"
    assert account.failure_reason == "by | hand\nand so"


def test_fields_and_columns_of_a_newer_version_are_left_alone() -> None:
    doc = book.to_doc(crash(EMPTY, 1, 0))
    doc["colour"] = "blue"
    doc["records"] = [row + "|new" for row in doc["records"]]
    account = book.from_doc(doc)
    assert account.records[0].invocation == run(1)
    assert crash(account, 2, 1).rows[0].endswith("|new")
    account = book.set_effect(account, run(1), "started", at(1))
    assert account.rows[0].endswith("|new")
    assert account.records[0].effect == "started"


def test_a_newer_failure_settles_what_was_owed_before() -> None:
    account = crash(crash(EMPTY, 1, 0), 2, 5)
    assert [record.effect for record in account.records] == ["done", "scheduled"]
    masked = book.record_failure(account, death(run(3), code=78), PLAIN, at(9))[0]
    assert [r.effect for r in crash(masked, 4, 10).records] == [
        "done",
        "done",
        "pending",
        "scheduled",
    ]


def test_an_older_death_that_is_booked_later_undoes_nothing() -> None:
    """The unit has moved on: its death counts, owes nothing, and the newer one's restart stays."""
    account = crash(EMPTY, 2, 5)
    account, record = book.record_failure(account, death(run(1)), PLAIN, at(6), current=False)
    assert [(each.invocation, each.effect) for each in account.records] == [
        (run(2), "scheduled"),
        (run(1), "done"),
    ]
    assert (record.action, account.restart_count) == ("restart", 2)
    final = Rules(max_restarts=2, backoff_jitter=0)
    account, record = book.record_failure(account, death(run(3)), final, at(7), current=False)
    assert (record.action, record.effect, account.failed_at_wall_ms) == ("fail", "done", None)


def test_effects_only_go_forward() -> None:
    account = crash(EMPTY, 1, 0)
    assert account.records[0].effect == "scheduled"
    account = book.set_effect(account, run(1), "started", at(1))
    assert account.records[0].effect == "started"
    account = book.set_effect(account, run(1), "done", at(2))
    assert book.set_effect(account, run(1), "started", at(3)) is account
    assert book.set_effect(account, run(9), "done", at(3)) is account


def test_an_ignored_failure_owes_nothing() -> None:
    account, record = book.record_failure(EMPTY, death(run(1), stop_asked=True), PLAIN, at(0))
    assert (record.action, record.effect) == ("ignore", "done")
    assert account.restart_count == 0


def test_holds_are_not_counted_and_their_release_begins_the_run() -> None:
    account = crash(EMPTY, 1, 0)
    held = death(run(2), code=75, supervisor_away=True)
    account, record = book.record_failure(account, held, PLAIN, at(10))
    assert (record.action, record.effect) == ("hold", "pending")
    assert account.restart_count == 1
    account = book.set_effect(account, run(2), "done", at(2000))
    # Ten seconds after its release it dies: that was no stable run.
    assert crash(account, 3, 2010).records[-1].delay_ms == 2000


def test_a_manual_start_is_recorded_never_counted_and_settles_what_is_owed() -> None:
    account, record = book.record_manual(crash(EMPTY, 1, 0), run(2), at(1), "uid 1000")
    assert (record.action, record.reason, record.by) == ("manual", "manual", "uid 1000")
    assert [row.effect for row in account.records] == ["done", "done"]
    assert account.restart_count == 1
    assert book.record_manual(account, run(2), at(5), "uid 1000")[0] is account
    # The run that a person began can fail like any other, and is no stable one at once.
    account = crash(account, 2, 1200)
    assert account.records[-1].action == "restart"
    account, _ = book.record_manual(account, run(3), at(1300), "uid 0")
    assert crash(account, 3, 1310).records[-1].k == 1


def test_a_manual_start_begins_a_run_for_the_backoff() -> None:
    """Ten seconds after a person started it, it dies: that was no stable run, however long ago
    the last restart was."""
    account, _ = book.record_manual(crash(EMPTY, 1, 0), run(2), at(700), "uid 0")
    account = crash(account, 2, 710)
    assert (account.records[-1].k, account.records[-1].delay_ms) == (1, 2000)
    assert account.recoveries == 0


def test_start_jobs_are_failures_of_their_own() -> None:
    account = crash(EMPTY, 1, 0)
    failed_job = death(next_start_job(run(1)), kind="start-job")
    for _ in range(2):  # the hook and the reconciler both see it
        account, record = book.record_failure(account, failed_job, PLAIN, at(12))
    assert (account.restart_count, record.invocation) == (2, f"{run(1)}#1")
    assert record.kind == "start-job"


def test_refunds_give_back_window_and_lifetime_but_not_the_backoff() -> None:
    account = crash(crash(EMPTY, 1, 0), 2, 1)
    account, record = book.refund(account, run(1), at(2), "job 7 is quarantined")
    assert record is not None
    assert (record.action, record.invocation, record.text) == (
        "refund", run(1), "job 7 is quarantined",
    )  # fmt: skip
    again, nothing = book.refund(account, run(1), at(3), "again")
    assert again is account
    assert nothing is None
    assert (account.restart_count, account.total_restarts) == (1, 2)
    account = crash(account, 3, 4)
    assert account.records[-1][11:16] == (1, 5, 1, 20, 2)  # window 1, lifetime 1, k 2
    assert book.refund(account, run(77), at(3), "unknown")[1] is None


def test_refunds_have_no_bound() -> None:
    rules = PLAIN._replace(max_restarts=2, max_lifetime_restarts=2)
    account = EMPTY
    for number in range(300):
        account = crash(account, number, number, rules)
        account, record = book.refund(account, run(number), at(number), "poison")
        assert record is not None
    assert (account.restart_count, account.window, account.failed_at_wall_ms) == (0, {}, None)
    assert account.records[-2].delay_ms == rules.backoff_max_s * 1000


def test_refunds_end_with_a_reset() -> None:
    account = book.reset(crash(EMPTY, 1, 0), at(1), "uid 0")
    account = crash(account, 2, 2)
    assert book.refund(account, run(1), at(3), "poison")[1] is None
    assert account.restart_count == 1


def test_reset_clears_the_counts_and_keeps_the_history() -> None:
    account = EMPTY
    for number in range(6):
        account = crash(account, number, number)
    assert account.failed_at_wall_ms == at(5).wall_ms
    assert account.failure_reason == "5 restarts within 5 min, the limit is 5"
    account = book.reset(account, at(10), "uid 0")
    assert account[2:6] == (0, None, None, None)
    assert (account.k, dict(account.window), account.last_due) == (0, {}, None)
    assert [record.action for record in account.records] == ["restart"] * 5 + ["fail", "reset"]
    assert account.records[-1].by == "uid 0"
    assert account.total_restarts == 5
    account = crash(account, 9, 11)
    assert account.records[-1][11:16] == (0, 5, 0, 20, 0)


def test_a_worker_that_runs_again_is_no_longer_failed() -> None:
    account = book.mark_failed(EMPTY, "by hand", at(0))
    assert (account.failed_at_wall_ms, account.failure_reason) == (at(0).wall_ms, "by hand")
    assert crash(account, 1, 5).failed_at_wall_ms is None


def test_statistics() -> None:
    account = EMPTY
    for number, second in enumerate((0, 1, 700, 1400, 1401)):
        account = crash(account, number, second)
    stats = book.statistics(account, 300, at(1401))
    assert stats == (5, 5, 2, 2 / 300, 2)  # two runs were stable: up to 700 and up to 1400


def test_a_stable_run_that_ends_in_a_hold_is_one_recovery() -> None:
    account = crash(EMPTY, 1, 0)
    for number in (2, 3):
        held = death(run(number), held="paused")
        account, _ = book.record_failure(account, held, PLAIN, at(700 + number))
    assert account.recoveries == 1


def test_holds_cannot_push_restarts_out_of_the_window() -> None:
    """More history than the ring holds: the window has a memory of its own."""
    account = EMPTY
    for number in range(5):
        account = crash(account, number, number)
    for number in range(100, 300):
        held = death(run(number), held="paused")
        account, _ = book.record_failure(account, held, PLAIN, at(10))
    assert RING - MOVED < len(account.rows) <= RING
    numbers = [int(row.partition("|")[0]) for row in (*account.moved, *account.rows)]
    assert numbers == list(range(1, 206)), "what has left the ring is told, in order"
    doc = book.to_doc(account)
    assert "moved" not in doc
    assert book.from_doc(doc | {"moved": ["x"]}).moved == ()
    assert crash(account, 999, 20).records[-1].action == "fail"


def test_a_hundred_restarts_in_the_window() -> None:
    rules = PLAIN._replace(max_restarts=100, max_lifetime_restarts=0, window_s=10_000)
    account = EMPTY
    for number in range(250):
        account = crash(account, number, number, rules)
    assert account.restart_count == 100
    assert account.records[-1].action == "fail"
    assert sum(map(len, account.window.values())) == 3 * 100
    assert (account.attempts, account.records[0].attempt) == (250, 151)
    assert len(account.moved) == 150


def test_the_window_forgets_the_oldest_first() -> None:
    rules = PLAIN._replace(max_restarts=100, max_lifetime_restarts=0, window_s=50)
    account = EMPTY
    for number in range(60):
        account, _ = book.record_failure(account, death(run(number)), rules, at(number, "a" * 32))
    for number in range(60, 130):
        account = crash(account, number, number, rules)
    kept = [name for row in account.window.values() for name in row[0::3]]
    assert kept == [run(number) for number in range(30, 130)]


def test_a_late_booking_owes_nothing_and_takes_nothing_back() -> None:
    blind = Decision("restart", 60_000, "the store was away", Evidence(0, 5, 0, 20, 0, None))
    account, record = book.book(crash(EMPTY, 2, 1000), death(run(1)), blind, PLAIN, at(900))
    assert record.effect == "done"
    assert [each.effect for each in account.records] == ["scheduled", "done"]
    failed = book.mark_failed(account, "for good", at(2000))
    again, _ = book.book(failed, death(run(3)), blind, PLAIN, at(950))
    assert (again.failure_reason, again.restart_count) == ("for good", 3)
    # One that comes in its turn owes its restart as usual.
    account, record = book.book(EMPTY, death(run(1)), blind, PLAIN, at(900))
    assert record.effect == "scheduled"


def test_a_person_cancels_an_owed_mask() -> None:
    owed = book.record_failure(EMPTY, death(run(1), code=78), PLAIN, at(0))[0]
    assert owed.records[0].effect == "pending"
    assert book.reset(owed, at(1), "uid 0").records[0].effect == "done"
    started, _ = book.record_manual(owed, run(2), at(1), "uid 0")
    assert started.records[0].effect == "done"
    assert started.failed_at_wall_ms is None


def test_a_failure_that_the_ring_has_forgotten_is_not_counted_again() -> None:
    account = crash(EMPTY, 1, 0)
    for number in range(100, 250):
        held = death(run(number), held="paused")
        account, _ = book.record_failure(account, held, PLAIN, at(1))
    again, record = book.record_failure(account, death(run(1)), PLAIN, at(2))
    assert again is account
    assert (record.invocation, record.action, record.effect) == (run(1), "restart", "done")


def test_no_text_can_break_a_row() -> None:
    failure = death(run(1), kind="a|b\nc", held="x|" * 5000)
    account, _ = book.record_failure(EMPTY, failure, PLAIN, at(0))
    (record,) = reopen(account).records
    assert record.kind == "a/b c"
    assert len(record.text) == 500
    assert book.reset(account, at(1), "u|0").records[-1].by == "u/0"


def test_an_increment_is_no_ones_failure() -> None:
    account = book.increment(EMPTY, at(0))
    assert account.find("") is None


def test_the_clock_may_go_back() -> None:
    account = crash(EMPTY, 1, 1000)
    account = crash(account, 2, 500)
    assert account.last_restart_wall_ms == at(500).wall_ms


def test_bookings_that_come_late_are_counted_where_they_belong() -> None:
    account = crash(EMPTY, 5, 1000)
    blind = Decision("restart", 60_000, "the store was away", Evidence(0, 5, 0, 20, 0, None))
    account, record = book.book(account, death(run(1)), blind, PLAIN, at(900))
    assert record.wall_ms == at(900).wall_ms
    assert account.restart_count == 2
    assert account.last_restart_wall_ms == at(1000).wall_ms
    assert account.last_due == at(1001)
    assert crash(account, 6, 1100).records[-1].window_used == 2
