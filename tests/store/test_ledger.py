"""The ledger on both backends: once per invocation, whole or not at all, named as in the seeds."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.policy import Decision, Evidence, Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.protocol import POLICY_LEDGER, Store
from tests.support.moments import death
from tests.support.places import Place
from tests.support.racers import DEATHS, RACERS, book, run_race

RULES = Rules(backoff_jitter=0)
TAG = "worker:tag:0"


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.second = 0.0

    def __call__(self) -> Moment:
        ms = round(self.second * 1000)
        return Moment(1_700_000_000_000 + ms, "b" * 32, ms)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(store: Store, clock: Clock) -> Ledger:
    return Ledger(store, clock=clock)


def run(number: int) -> str:
    return f"{number:032x}"


def test_a_failure_is_recorded_once(ledger: Ledger, clock: Clock) -> None:
    first = ledger.record_failure(death(run(1), "signal", -9), RULES)
    clock.second = 40
    again = ledger.record_failure(death(run(1), "exit", 78), RULES)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.record == first.record
    assert ledger.get_restart_state("nomarr-worker@tag-0.service") == (1, 1_700_000_000_000)
    assert len(ledger.account(TAG).records) == 1


def test_the_document_is_the_designs(ledger: Ledger, store: Store) -> None:
    ledger.record_failure(death(run(1)), RULES)
    doc = store.get(POLICY_LEDGER, TAG)
    assert doc is not None
    named = ("component_id", "restart_count", "last_restart_wall_ms", "failed_at_wall_ms",
             "failure_reason", "updated_at_wall_ms")  # fmt: skip
    assert [doc[name] for name in named] == [
        TAG, 1, 1_700_000_000_000, None, None, 1_700_000_000_000,
    ]  # fmt: skip


def test_the_crash_loop_to_its_end_and_back(ledger: Ledger, clock: Clock) -> None:
    actions = []
    for number, second in enumerate((0, 1, 3, 7, 15, 31)):
        clock.second = second
        actions.append(ledger.record_failure(death(run(number)), RULES).record.action)
    assert actions == ["restart"] * 5 + ["fail"]
    assert ledger.account(TAG).failure_reason == "5 restarts within 5 min, the limit is 5"
    ledger.reset(TAG, by="uid 0")
    assert ledger.get_restart_state(TAG) == (0, None)
    assert ledger.account(TAG).records[-1].by == "uid 0"
    assert ledger.record_failure(death(run(9)), RULES).record.delay_ms == 1000
    assert ledger.statistics(TAG, 300) == (6, 1, 1, 1 / 300, 0)


def test_effects_and_what_is_unfinished(ledger: Ledger) -> None:
    for number, instance in enumerate(("tag-0", "tag-1", "library-0")):
        component = parse_component(instance).component_id
        ledger.record_failure(death(run(number), component=component), RULES)
    ledger.record_failure(death(run(7), stop_asked=True, component="worker:tag:2"), RULES)
    ledger.set_effect("tag-0", run(0), "started")
    ledger.set_effect("tag-1", run(1), "done")
    left = [(account.component_id, record.effect) for account, record in ledger.unfinished()]
    assert left == [("worker:library:0", "scheduled"), ("worker:tag:0", "started")]
    ledger.record_manual("tag-0", run(50), "uid 0")
    assert [account.component_id for account, _ in ledger.unfinished()] == ["worker:library:0"]


def test_many_at_once_are_durable_together(ledger: Ledger, store: Store) -> None:
    deaths = [death(run(number), component=f"worker:tag:{number}") for number in range(50)]
    with store.batch():
        assert all(ledger.record_failure(each, RULES).fresh for each in deaths)
    with store.batch():
        again = [ledger.record_failure(each, RULES) for each in [*deaths, death(run(99))]]
    assert [booked.fresh for booked in again] == [False] * 50 + [True]
    assert ledger.get_restart_state("tag-0")[0] == 2


def test_refunds_and_late_bookings(ledger: Ledger, clock: Clock) -> None:
    clock.second = 100
    ledger.record_failure(death(run(1)), RULES)
    record = ledger.refund(TAG, run(1), "job x is quarantined")
    assert record is not None
    assert ledger.refund(TAG, run(1), "job x is quarantined") is None
    blind = Decision("restart", 60_000, "the store was away", Evidence(0, 5, 0, 20, 0, None))
    at = Moment(1_700_000_050_000, "b" * 32, 50_000)
    assert ledger.book(death(run(0)), blind, RULES, at).fresh
    assert not ledger.book(death(run(0)), blind, RULES, at).fresh
    assert not ledger.record_failure(death(run(0), code=78), RULES).fresh
    assert ledger.get_restart_state(TAG) == (1, 1_700_000_100_000)


# The five operations of the seeds


def test_get_restart_state_without_a_record(ledger: Ledger, store: Store) -> None:
    assert ledger.get_restart_state(TAG) == (0, None)
    assert store.get(POLICY_LEDGER, TAG) is None


def test_increment_makes_the_document(ledger: Ledger, clock: Clock) -> None:
    ledger.increment_restart_count(TAG)
    clock.second = 2
    ledger.increment_restart_count(TAG)
    assert ledger.get_restart_state(TAG) == (2, 1_700_000_002_000)
    # They are restarts like any other: the window and the backoff know them.
    record = ledger.record_failure(death(run(1)), RULES).record
    assert (record.window_used, record.delay_ms) == (2, 4000)


def test_reset_restart_count(ledger: Ledger) -> None:
    ledger.increment_restart_count(TAG)
    ledger.reset_restart_count(TAG)
    assert ledger.get_restart_state(TAG) == (0, None)


def test_mark_failed_permanent_keeps_the_count(ledger: Ledger) -> None:
    ledger.increment_restart_count(TAG)
    ledger.mark_failed_permanent(TAG, "Restart limit exceeded")
    account = ledger.account(TAG)
    assert (account.restart_count, account.failure_reason) == (1, "Restart limit exceeded")
    assert account.failed_at_wall_ms == 1_700_000_000_000


def test_remove_restart_state(ledger: Ledger) -> None:
    ledger.increment_restart_count(TAG)
    ledger.remove_restart_state(TAG)
    ledger.remove_restart_state(TAG)
    assert ledger.get_restart_state(TAG) == (0, None)
    assert ledger.account(TAG).rows == ()


def test_a_name_that_is_no_worker_is_refused(ledger: Ledger, store: Store) -> None:
    for call in (ledger.get_restart_state, ledger.increment_restart_count, ledger.reset):
        with pytest.raises(BadName):
            call("worker:tag:x")
    for invocation in ("", "x|y", "A" * 32):
        with pytest.raises(BadName):
            ledger.record_failure(death(invocation), RULES)
    assert store.find(POLICY_LEDGER) == []


def test_hosts_that_share_a_database_are_told_apart(store: Store, clock: Clock) -> None:
    here, there = (Ledger(store, clock=clock, host=host) for host in ("alpha", "beta"))
    here.increment_restart_count(TAG)
    assert there.get_restart_state(TAG) == (0, None)
    there.record_failure(death(run(1)), RULES)
    doc = store.get(POLICY_LEDGER, "worker:tag:0@beta")
    assert doc is not None
    assert doc["host"] == "beta"
    assert [account.host for account in here.accounts()] == ["alpha"]
    assert Ledger(store, clock=clock).accounts() == []


def test_fields_of_a_newer_version_survive(ledger: Ledger, store: Store) -> None:
    store.insert(POLICY_LEDGER, {"_key": TAG, "component_id": TAG, "host": "", "mood": "blue"})
    ledger.increment_restart_count(TAG)
    doc = store.get(POLICY_LEDGER, TAG)
    assert doc is not None
    assert (doc["mood"], doc["restart_count"]) == ("blue", 1)


@pytest.mark.usefixtures("forks")
def test_eight_processes_book_each_failure_once(place: Place, ledger: Ledger) -> None:
    fresh = run_race(book, place)
    assert sum(fresh.values()) == DEATHS
    assert ledger.get_restart_state("tag-0")[0] == DEATHS
    assert len(ledger.account("tag-0").records) == DEATHS
    assert ledger.get_restart_state("tag-1")[0] == RACERS * DEATHS


# What is published


def test_every_commit_is_published(
    open_store: Callable[..., Store], tmp_path: Path, clock: Clock
) -> None:
    publisher = Publisher(str(tmp_path / "public"))
    store = open_store(publisher=publisher)
    ledger = Ledger(store, clock=clock)
    shown = tmp_path / "public" / "tag-0.json"
    ledger.record_failure(death(run(1)), RULES)
    assert json.loads(shown.read_text())["restart_count"] == 1
    assert shown.stat().st_mode & 0o777 == 0o640
    with store.batch():
        ledger.increment_restart_count(TAG)
        ledger.increment_restart_count("tag-1")
    assert json.loads(shown.read_text())["restart_count"] == 2
    assert sorted(path.name for path in shown.parent.iterdir()) == ["tag-0.json", "tag-1.json"]
    ledger.remove_restart_state(TAG)
    assert not shown.exists()
    # A kill between commit and publication leaves a gap, which the next start closes.
    (shown.parent / "tag-1.json").unlink()
    store.publish_all()
    assert json.loads((shown.parent / "tag-1.json").read_text())["restart_count"] == 1


def test_a_reader_cannot_hold_the_writers_up(
    open_store: Callable[..., Store], tmp_path: Path, clock: Clock
) -> None:
    """Whoever may read the directory may lock it: so the lock is not there."""
    publisher = Publisher(str(tmp_path / "public"))
    ledger = Ledger(open_store(publisher=publisher), clock=clock)
    ledger.increment_restart_count(TAG)
    assert (tmp_path / "public.lock").stat().st_mode & 0o777 == 0o600
    fd = os.open(tmp_path / "public", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        ledger.increment_restart_count(TAG)
    finally:
        os.close(fd)
    assert json.loads((tmp_path / "public" / "tag-0.json").read_text())["restart_count"] == 2
    assert publisher.error is None


def test_the_last_writer_shows_the_last_state(tmp_path: Path) -> None:
    """A slow writer that committed first must not show its state over a newer one."""
    publisher = Publisher(str(tmp_path))
    newest = {"text": "old"}
    reading, written = threading.Event(), threading.Event()

    def slow(_keys: list[str]) -> dict[str, str]:
        reading.set()
        text = newest["text"]
        written.wait(0.2)
        return {TAG: text}

    first = threading.Thread(target=publisher.publish, args=([TAG], slow))
    first.start()
    reading.wait()
    newest["text"] = "new"
    second = threading.Thread(
        target=lambda: Publisher(str(tmp_path)).publish([TAG], lambda _: {TAG: newest["text"]})
    )
    second.start()
    first.join()
    second.join()
    assert (tmp_path / "tag-0.json").read_text() == "new"


def test_publish_all_removes_what_nobody_owns(
    open_store: Callable[..., Store], tmp_path: Path, clock: Clock
) -> None:
    publisher = Publisher(str(tmp_path / "public"), host="alpha")
    store = open_store(publisher=publisher)
    for host in ("alpha", "beta"):
        Ledger(store, clock=clock, host=host).record_failure(death(run(1)), RULES)
    for name in ("tag-9.json", "tag-9.json.new"):
        (tmp_path / "public" / name).write_text("left over")
    store.publish_all()
    assert [path.name for path in (tmp_path / "public").iterdir()] == ["tag-0.json"]
    assert json.loads((tmp_path / "public" / "tag-0.json").read_text())["host"] == "alpha"


def test_a_publication_that_fails_undoes_no_commit(
    open_store: Callable[..., Store], tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "public").write_text("in the way")
    publisher = Publisher(str(tmp_path / "public"))
    ledger = Ledger(open_store(publisher=publisher), clock=clock)
    ledger.increment_restart_count(TAG)
    assert ledger.get_restart_state(TAG)[0] == 1
    assert isinstance(publisher.error, OSError)
    (tmp_path / "public").unlink()
    ledger.increment_restart_count(TAG)
    assert publisher.error is None
