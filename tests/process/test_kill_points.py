"""SIGKILL at every system call that changes a file: nothing lost, nothing doubled, nothing torn.

strace kills the program at its n-th call of a kind. One good run says how many calls there are;
then each of them is the last one once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.past_records import read_rows
from nomarr_systemd.ledger.public import read_incidents, read_whole
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.ledger.spool import Spool
from nomarr_systemd.store.protocol import PAST_RECORDS
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.incidents import close_first, open_second
from tests.support.kill_points import kill, kill_points
from tests.support.moments import death
from tests.support.spooled import entry, replay

RULES = Rules(backoff_jitter=0)
RUN = f"{7:032x}"


def ledger_at(directory: Path) -> tuple[SqliteStore, Ledger]:
    store = SqliteStore(str(directory), "policy", publisher=Publisher(str(directory / "public")))
    return store, Ledger(store)


def book(directory: Path) -> None:
    store, ledger = ledger_at(directory)
    ledger.record_failure(death(RUN, "signal", -9), RULES)
    ledger.set_effect("tag-0", RUN, "started")
    store.close()


def spool(directory: Path) -> None:
    Spool(str(directory)).write(entry(7))


def book_spooled(directory: Path) -> None:
    store = SqliteStore(str(directory / "state"), "policy")
    replay(Spool(str(directory / "spool")), Ledger(store))
    store.close()


def replace_incident(directory: Path) -> None:
    open_second(str(directory))


def check_each(
    tmp_path: Path,
    prepare: Callable[[Path], object],
    act: Callable[[Path], None],
    check: Callable[[Path], None],
    at_least: int,
) -> None:
    """Kill ``act`` in turn at each of its calls, each time in a directory of its own."""

    def begin(name: str) -> tuple[Callable[[], None], Path]:
        directory = tmp_path / name
        prepare(directory)
        return functools.partial(act, directory), directory

    doing, directory = begin("good")
    points = kill_points(doing, directory.with_suffix(".strace"))
    print(f"{len(points)} kill points")
    assert len(points) >= at_least
    for name, number in points:
        doing, directory = begin(f"{name}-{number}")
        kill(doing, directory.with_suffix(".strace"), name, number)
        check(directory)


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [0, 100], ids=["new-file", "full-ring"])
def test_a_booking_killed_anywhere(tmp_path: Path, earlier: int) -> None:
    def prepare(directory: Path) -> None:
        if not earlier:
            return
        store, ledger = ledger_at(directory)
        with store.batch():
            for number in range(1000, 1000 + earlier):
                ledger.record_failure(death(f"{number:032x}", held="paused"), RULES)
        store.close()

    def check(directory: Path) -> None:
        store, ledger = ledger_at(directory)
        before = ledger.account("tag-0")
        assert before.restart_count in (0, 1)
        booked = ledger.record_failure(death(RUN, "signal", -9), RULES)
        assert booked.fresh == (before.restart_count == 0)
        after = ledger.account("tag-0")
        assert after.restart_count == 1
        assert [record.invocation for record in after.records].count(RUN) == 1
        assert booked.record.effect in ("scheduled", "started")
        past = [row for doc in store.find(PAST_RECORDS) for row in read_rows(doc)]
        kept = [Record.read(row).attempt for row in past]
        kept += [record.attempt for record in after.records]
        assert kept == list(range(1, earlier + 2)), "each record once: in the ring or before it"
        store.publish_all()
        shown = json.loads((directory / "public" / "tag-0.json").read_text())
        assert shown["restart_count"] == 1
        whole = read_whole(str(directory / "public"), Component("tag", 0)).account.records
        assert [record.attempt for record in whole] == kept
        store.close()
        assert not [path for path in os.listdir(directory) if "corrupt" in path]

    check_each(tmp_path, prepare, book, check, at_least=16)


@pytest.mark.slow
def test_spooling_killed_anywhere(tmp_path: Path) -> None:
    def check(directory: Path) -> None:
        found, bad = Spool(str(directory)).read()
        assert (found, bad) in (([entry(7)], []), ([], []))
        spool(directory)
        assert Spool(str(directory)).read() == ([entry(7)], [])

    check_each(tmp_path, lambda _: None, spool, check, at_least=4)


@pytest.mark.slow
def test_a_replay_killed_anywhere(tmp_path: Path) -> None:
    def prepare(directory: Path) -> None:
        for number in (1, 2):
            Spool(str(directory / "spool")).write(entry(number, number))

    def check(directory: Path) -> None:
        store = SqliteStore(str(directory / "state"), "policy")
        replay(Spool(str(directory / "spool")), Ledger(store))
        account = Ledger(store).account("tag-0")
        assert account.restart_count == 2
        assert [record.invocation for record in account.records] == [f"{1:032x}", f"{2:032x}"]
        assert os.listdir(directory / "spool") == []
        store.close()

    check_each(tmp_path, prepare, book_spooled, check, at_least=16)


@pytest.mark.slow
def test_an_incident_that_replaces_another_killed_anywhere(tmp_path: Path) -> None:
    """The one before it is kept, once, and both are shown."""
    first: dict[Path, str] = {}

    def prepare(directory: Path) -> None:
        first[directory] = close_first(str(directory)).key

    def check(directory: Path) -> None:
        store = SqliteStore(str(directory), "policy")
        found = [each.key for each in IncidentStore(store).history(10)]
        assert found[0] == first[directory]
        assert len(found) == len(set(found)) <= 2
        store.close()
        second = open_second(str(directory))
        shown, problem = read_incidents(str(directory / "public"))
        assert ([each.key for each in shown], problem) == ([first[directory], second.key], "")

    check_each(tmp_path, prepare, replace_incident, check, at_least=11)
