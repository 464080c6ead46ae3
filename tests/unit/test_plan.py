"""Single worlds and what is planned about them: the cases that once went wrong, by name."""

from __future__ import annotations

from typing import Literal

import pytest

from nomarr_systemd.core import account as book
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import INCIDENT, Incident
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.job import describe_failed
from nomarr_systemd.core.plan import plan
from nomarr_systemd.core.world import Outcome, Pool, Turns, Unit, Worker, World
from tests.support.moments import PLAIN, at, death, run

TAG = Component("tag", 0)
EMPTY = Account(TAG.component_id)
FAILED = Unit("failed", run(1))


def kinds(intents: list[Intent]) -> list[str]:
    return [type(each).__name__ for each in intents]


def world(worker: Worker, **fields: object) -> World:
    return World((worker,), {"tag": Pool(1)})._replace(**fields)  # type: ignore[arg-type]


def test_a_death_gets_its_timer_its_record_and_is_told() -> None:
    planned = plan(world(Worker(TAG, PLAIN, FAILED, EMPTY, deaths=(death(run(1)),))), at(0))
    assert kinds(planned) == ["Schedule", "Book", "Tell", "Clear"]


def test_a_worker_whose_mask_is_owed_is_not_started() -> None:
    """Refused, the mask left it to a hold that was over at once: restarted for ever, uncounted."""
    account = book.mark_failed(EMPTY, "its pool failed", at(0), invocation=run(9))
    planned = plan(world(Worker(TAG, PLAIN, FAILED, account, deaths=(death(run(1)),))), at(1))
    assert "Start" not in kinds(planned)
    assert "Mask" in kinds(planned)
    [booked] = [each for each in planned if isinstance(each, do.Book)]
    assert booked.record.action == "hold"


def test_an_incident_whose_canary_is_no_longer_configured_goes_on_or_ends() -> None:
    incident = Incident(
        "tag", "exit", 1, at(0), "worker:tag:9", ("worker:tag:9", "worker:tag:0"), ()
    )
    held = book.record_failure(EMPTY, death(run(1), code=1, incident="x"), PLAIN, at(0))[0]
    member = Worker(TAG, PLAIN, FAILED, held, hold=f"{INCIDENT} x")
    planned = plan(world(member, incidents={"tag": incident}), at(5))
    assert do.Elect("tag", "worker:tag:0") in planned
    running = Worker(TAG, PLAIN, Unit("active", run(2)), EMPTY)
    planned = plan(world(running, incidents={"tag": incident}), at(5))
    assert kinds(planned) == ["Close"]


def test_deaths_of_an_incident_are_counted_when_it_closes() -> None:
    """Those of its members since those that opened it; a member without an account died once."""
    names = ("worker:tag:0", "worker:tag:1", "worker:tag:9")
    incident = Incident("tag", "exit", 1, at(100), "worker:tag:0", names, ())
    account = EMPTY
    for number, second in enumerate((10, 95, 110, 120)):  # the first one long before
        account = book.record_failure(account, death(run(number)), PLAIN, at(second))[0]
    account = book.refund(account, run(1), at(101), "x")[0]
    account = book.record_failure(account, death(run(7), stop_asked=True), PLAIN, at(125))[0]
    canary = Worker(TAG, PLAIN, Unit("active", run(8)), account)
    planned = plan(world(canary, incidents={"tag": incident}, healthy=frozenset(names)), at(130))
    assert do.Close("tag", "worker:tag:0 is healthy", 3 + 1 + 1) in planned


def test_a_start_after_a_hold_that_fails_is_a_failure_of_its_own() -> None:
    """It was called done at once, and then forgotten for ever."""
    held = death(run(1), code=75, supervisor_away=True)
    account = book.record_failure(EMPTY, held, PLAIN, at(0))[0]
    planned = plan(world(Worker(TAG, PLAIN, FAILED, account)), at(60))
    assert kinds(planned) == ["Start", "Note"]
    account = book.set_effect(account, run(1), "started", at(60))
    reported = Worker(TAG, PLAIN, FAILED, account, deaths=(death(run(1), code=75),))
    [booked] = [each for each in plan(world(reported), at(61)) if isinstance(each, do.Book)]
    assert (booked.death.invocation, booked.death.kind) == (f"{run(1)}#1", "start-job")


def test_a_start_that_failed_unreported_is_carried_out_at_once() -> None:
    """Its decision was booked, and nothing done about it for an hour."""
    once = PLAIN._replace(max_restarts=1)
    account = book.record_failure(EMPTY, death(run(1)), once, at(0))[0]
    account = book.set_effect(account, run(1), "started", at(1))
    planned = plan(world(Worker(TAG, once, FAILED, account)), at(60))
    assert [kind for kind in kinds(planned) if kind != "Tell"] == ["Book", "Clear", "Mask", "Note"]
    at_once = PLAIN._replace(backoff_base_s=0)
    planned = plan(world(Worker(TAG, at_once, FAILED, account)), at(60))
    assert "Start" in kinds(planned)


def test_an_outcome_stays_reported_until_it_is_carried_out() -> None:
    account = book.record_failure(EMPTY, death(run(1)), PLAIN, at(0))[0]
    outcome = Outcome(TAG.component_id, run(1), ("job",), (run(1),))
    worker = Worker(TAG, PLAIN, Unit("active", run(2)), account)
    planned = plan(world(worker, outcomes=(outcome,)), at(1))
    assert kinds(planned)[:3] == ["Refund", "BlameJobs", "Clear"]
    assert not plan(world(worker, outcomes=(outcome,), ledger="read-only"), at(1))


def test_a_job_that_failed_costs_its_pool_a_crash_and_its_worker_nothing() -> None:
    """With crash_max_retries the pool fails after so many, although each was refunded."""
    account = EMPTY
    for number in (1, 2, 3):
        account = book.record_failure(account, death(run(number)), PLAIN, at(number))[0]
        why = describe_failed(f"tag:a:{number:024x}")
        account, _ = book.refund(account, run(number), at(number), why)
    assert account.restart_count == 0
    key = f"tag:a:{4:024x}"
    account = book.record_failure(account, death(run(4)), PLAIN, at(4))[0]
    outcome = Outcome(TAG.component_id, run(4), (), (run(4),), fail_pool=True, failed=(key,))
    worker = Worker(TAG, PLAIN, Unit("active", run(5)), account)
    for most, fails in ((4, False), (3, True)):
        pools = {"tag": Pool(1, fails_after=most, fails_by=f"crash_max_retries is {most}")}
        planned = plan(world(worker, outcomes=(outcome,), pools=pools), at(5))
        assert kinds(planned)[:2] == ["Refund", "BlameJobs"]
        assert ("FailPool" in kinds(planned)) == fails
    # A reset begins the count anew.
    account = book.record_failure(book.reset(account, at(5), "me"), death(run(5)), PLAIN, at(6))[0]
    outcome = outcome._replace(invocation=run(5), refund=(run(5),))
    worker = worker._replace(account=account)
    assert "FailPool" not in kinds(plan(world(worker, outcomes=(outcome,), pools=pools), at(7)))


def test_a_backoff_of_its_own_is_not_cut_short_by_an_incident_that_ends() -> None:
    account = book.record_failure(EMPTY, death(run(1), code=2), PLAIN, at(0))[0]
    waiting = Worker(TAG, PLAIN, FAILED._replace(timer="waiting"), account)
    members = ("worker:tag:0", "worker:tag:1")
    incident = Incident("tag", "exit", 1, at(0), "worker:tag:1", members, ())
    planned = plan(world(waiting, incidents={"tag": incident}, resumed={"tag": "by hand"}), at(0.5))
    assert kinds(planned) == ["Close"]


def test_the_supervisors_absence_excuses_one_death_in_a_window() -> None:
    """A worker that kills the supervisor and leaves with 75 restarted for ever, uncounted."""
    unit, account = FAILED, EMPTY
    decided = []
    for number, when in ((1, 0), (2, 10), (3, PLAIN.window_s - 1), (4, 2 * PLAIN.window_s)):
        died = death(run(number), code=75, supervisor_away=True)
        unit = Unit("failed", run(number))
        planned = plan(world(Worker(TAG, PLAIN, unit, account, deaths=(died,))), at(when))
        [booked] = [each for each in planned if isinstance(each, do.Book)]
        decided.append(booked.record.action)
        account = book.record_failure(account, booked.death, PLAIN, at(when))[0]
    assert decided == ["hold", "restart", "restart", "hold"]


def test_a_counted_exit_75_waits_for_the_supervisor_too() -> None:
    account = book.record_failure(EMPTY, death(run(1), code=75), PLAIN, at(0))[0]
    worker = Worker(TAG, PLAIN, FAILED, account)
    assert "Start" not in kinds(plan(world(worker, supervisor_active=False), at(3600)))
    assert "Start" in kinds(plan(world(worker), at(3600)))


def test_a_pool_fails_by_the_crashes_on_record_not_by_the_supervisors_word() -> None:
    account = book.record_failure(EMPTY, death(run(1)), PLAIN, at(0))[0]
    worker = Worker(TAG, PLAIN, Unit("active", run(2)), account)
    outcome = Outcome(TAG.component_id, run(1), fail_pool=True)

    def fails(pool: Pool, outcome: Outcome) -> bool:
        planned = plan(world(worker, outcomes=(outcome,), pools={"tag": pool}), at(1))
        assert ("Mask" in kinds(planned)) == ("FailPool" in kinds(planned))
        return "Mask" in kinds(planned)

    assert fails(Pool(1, fails_after=0, fails_by="crash_policy is fail-pool"), outcome)
    assert not fails(Pool(1, fails_after=1), outcome)
    assert not fails(Pool(1), outcome)
    assert not fails(Pool(1, fails_after=0), outcome._replace(invocation=run(7)))
    assert not fails(Pool(1, fails_after=0), outcome._replace(fail_pool=False))


def test_a_start_that_fails_while_the_ledger_is_read_only_is_restarted_blind() -> None:
    """Its second report was taken for the first: nothing was owed until the hourly look."""
    account = book.record_failure(EMPTY, death(run(1)), PLAIN, at(0))[0]
    account = book.set_effect(account, run(1), "started", at(1))
    worker = Worker(TAG, PLAIN, FAILED, account, deaths=(death(run(1)),))
    planned = plan(world(worker, ledger="read-only"), at(2))
    assert kinds(planned) == ["Spool", "Clear", "Schedule"]
    [spool] = [each for each in planned if isinstance(each, do.Spool)]
    assert spool.entry.death.invocation == f"{run(1)}#1"
    waiting = worker._replace(deaths=(), unit=FAILED._replace(timer="waiting"))
    for when in (3, 20):
        again = world(waiting, ledger="read-only", spooled=(spool.entry,))
        assert not plan(again, at(when))


def test_a_death_that_is_booked_and_untold_is_not_decided_again_without_the_ledger() -> None:
    """Its backoff was over, and it waited for the longest one."""
    worker = Worker(TAG, PLAIN, FAILED, None, deaths=(death(run(1)),), rang=True)
    untold = frozenset({run(1)})
    assert kinds(plan(world(worker, ledger="away", untold=untold), at(1))) == ["Start"]
    assert "Spool" in kinds(plan(world(worker, ledger="away"), at(1)))


def test_the_supervisor_is_asked_before_a_mask_and_a_job_at_fault_is_no_reason_for_one() -> None:
    rules = PLAIN._replace(max_restarts=1, max_lifetime_restarts=1)
    account = book.record_failure(EMPTY, death(run(1)), rules, at(0))[0]
    account = book.set_effect(account, run(1), "done", at(1))
    worker = Worker(TAG, rules, Unit("failed", run(2)), account, deaths=(death(run(2)),))
    first = plan(world(worker), at(5))
    assert kinds(first) == ["Consult"]
    # Without an answer, or if no job is to blame, the policy decides.
    asked = frozenset((run(2),))
    second = plan(world(worker, asked=asked), at(5))
    assert kinds(second) == ["Book", "Tell", "Clear", "Mask", "Note"]
    assert plan(world(worker, supervisor_active=False), at(5)) == second
    # With a job to blame it is restarted after its backoff, and both restarts are refunded.
    outcome = Outcome(TAG.component_id, run(2), ("tag:a:0",), (run(1), run(2)))
    third = plan(world(worker, asked=asked, outcomes=(outcome,)), at(5))
    assert [each.invocation for each in third if isinstance(each, do.Refund)] == [run(1), run(2)]
    [booked] = [each for each in third if isinstance(each, do.Book)]
    assert (booked.record.action, booked.record.delay_ms) == ("restart", 2000)
    assert "Mask" not in kinds(third)
    # A mistake in the configuration is none of a job.
    wrong = worker._replace(deaths=(death(run(2), code=78),))
    planned = plan(world(wrong, asked=asked, outcomes=(outcome,)), at(5))
    assert "Mask" in kinds(planned)


@pytest.mark.parametrize(
    ("kind", "hold", "timer", "is_kept"),
    [
        ("exit", "", "none", True),
        ("exit", "paused by anna", "none", False),
        ("dependency", "", "waiting", False),
    ],
)
def test_a_turn_is_kept_by_workers_that_start_and_by_no_others(
    kind: str, hold: str, timer: Literal["none", "waiting"], is_kept: bool
) -> None:
    """Paused as it was started, or without what it needs, it kept others from their restarts."""
    account = book.record_failure(EMPTY, death(run(1), kind), PLAIN, at(0))[0]
    account = book.set_effect(account, run(1), "started", at(1))
    unit = FAILED._replace(timer=timer)
    turns = {"tag": Turns(0, frozenset({TAG.component_id}))}
    planned = plan(world(Worker(TAG, PLAIN, unit, account, hold), turns=turns), at(1))
    assert (do.GiveTurn(TAG) not in planned) == is_kept
