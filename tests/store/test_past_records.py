"""Records that leave the ring of an account, on all backends: each is kept, once, and shown."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nomarr_systemd.core.account import MOVED, RING
from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.ledger import past_records
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.past_records import read_rows
from nomarr_systemd.ledger.public import RECORDS, list_past, read_whole
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.ledger.shared_archive import (
    Archivist,
    get_host,
    parse_host,
    read_records,
)
from nomarr_systemd.store.protocol import PAST_RECORDS, POLICY_LEDGER, Doc, Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.broken_store import Broken
from tests.support.incidents import make
from tests.support.moments import PLAIN, at, death, run

TAG = Component("tag", 0)
MANY = 3 * RING + 7
FOREVER_MS = 1 << 50


def book(ledger: Ledger, numbers: range, component: Component = TAG) -> None:
    """Have failures that are not counted, each a second after the one before."""
    for number in numbers:
        died = death(run(number), held="paused", component=component.component_id)
        ledger.record_failure(died, PLAIN, at=at(number))


def fill(store: Store, count: int = RING, host: str = "") -> Ledger:
    ledger = Ledger(store, host=host)
    with store.batch():
        book(ledger, range(1, count + 1))
    return ledger


@functools.cache
def make_full() -> Doc:
    """The account of a worker whose ring is full, booked once."""
    with TemporaryDirectory() as place, closing(SqliteStore(place, "policy")) as store:
        fill(store)
        (doc,) = store.find(POLICY_LEDGER)
    del doc["_rev"]
    return doc


def find_kept(store: Store, host: str = "") -> list[int]:
    """The numbers of all records that the ledger has of the worker, oldest first."""
    docs = store.find(PAST_RECORDS, {"host": host, "component_id": TAG.component_id})
    rows = [row for doc in docs for row in read_rows(doc)]
    account = Ledger(store, host=host).account(TAG.component_id)
    return [Record.read(row).attempt for row in [*rows, *account.rows]]


@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
def test_each_is_kept_once(store: Store, is_batch: bool) -> None:
    if is_batch:
        fill(store, MANY)
    else:
        book(Ledger(store), range(1, MANY + 1))
    assert find_kept(store) == list(range(1, MANY + 1))
    account = Ledger(store).account(TAG.component_id)
    assert RING - MOVED < len(account.rows) <= RING
    sizes = [len(doc["rows"]) for doc in store.find(PAST_RECORDS)]
    assert set(sizes) == {MOVED}


def test_those_of_another_program_are_in_its_order(open_store: Callable[..., Store]) -> None:
    """Two programs that book by turns, each with its own handle on the store."""
    ledgers = [Ledger(open_store("policy")) for _ in range(2)]
    for number in range(1, 2 * RING):
        book(ledgers[number % 2], range(number, number + 1))
    assert find_kept(open_store("policy")) == list(range(1, 2 * RING))


def test_a_failure_known_from_the_ring_is_not_booked_again(store: Store) -> None:
    ledger = fill(store, MANY)
    book(ledger, range(MANY - RING + MOVED + 1, MANY + 1))
    assert find_kept(store) == list(range(1, MANY + 1))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at_write", [1, 2])
def test_a_kill_in_the_middle_loses_and_doubles_none(
    store: Store, at_write: int, after: bool
) -> None:
    """A failure that pushes records out of the ring is two writes."""
    store.insert(POLICY_LEDGER, make_full())
    with pytest.raises(StoreUnavailable, match="killed"):
        book(Ledger(Broken(store, at_write, after=after)), range(RING + 1, RING + 2))
    kept = set(find_kept(store))
    assert kept in (set(range(1, RING + 1)), set(range(1, RING + 2))), "none is lost"
    book(Ledger(store), range(RING + 1, RING + 2))
    assert find_kept(store) == list(range(1, RING + 2)), "it is done again, and none is double"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at_write", range(1, RING // MOVED + 1))
def test_an_account_is_removed_and_its_records_are_kept(
    store: Store, at_write: int, after: bool
) -> None:
    store.insert(POLICY_LEDGER, make_full())
    with pytest.raises(StoreUnavailable, match="killed"):
        Ledger(Broken(store, at_write, after=after)).remove_restart_state(TAG.component_id)
    ledger = Ledger(store)
    ledger.remove_restart_state(TAG.component_id)
    assert store.find(POLICY_LEDGER) == []
    assert find_kept(store) == list(range(1, RING + 1))
    # The worker comes back, and its records begin again: at another moment.
    book(ledger, range(1001, 1001 + RING + 1))
    assert find_kept(store) == [*range(1, RING + 1), *range(1, RING + 2)]


def test_hosts_keep_their_own(store: Store) -> None:
    fill(store, MANY, "one")
    fill(store, RING + 1, "two")
    assert find_kept(store, "one") == list(range(1, MANY + 1))
    assert find_kept(store, "two") == list(range(1, RING + 2))


def test_the_oldest_go_when_there_are_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_records, "KEPT", 3)
    fill(store, MANY)
    assert len(store.find(PAST_RECORDS)) == 3
    found = find_kept(store)
    assert found == list(range(found[0], MANY + 1))
    assert len(found) > 3 * MOVED + RING - MOVED


def test_a_damaged_document_does_not_stop_the_ledger(store: Store) -> None:
    ledger = fill(store, 2 * RING)
    for doc, rows in zip(store.find(PAST_RECORDS), ["x", [1, None, "a|b", ""]], strict=False):
        store.replace(PAST_RECORDS, {**doc, "rows": rows})
    book(ledger, range(2 * RING + 1, MANY + 1))
    assert find_kept(store)[-200:] == list(range(MANY - 199, MANY + 1))


def test_the_most_that_is_kept_is_small(tmp_path: Path) -> None:
    """200 workers that have died 5,000 times and more, with their history of health, which is
    160 MB in a year (docs/security.md), stay under 1 GB."""
    publisher = Publisher(str(tmp_path / "public"))
    rules = PLAIN._replace(max_restarts=100, max_lifetime_restarts=0)
    with closing(SqliteStore(str(tmp_path), "policy", publisher=publisher)) as store:
        ledger = Ledger(store)
        for start in range(1, (past_records.KEPT + 6) * MOVED, 500):
            with store.batch():
                for number in range(start, start + 500):
                    died = death(run(number), "signal", -11, 60_000)
                    ledger.record_failure(died, rules, at=at(number * 70))
        assert len(store.find(PAST_RECORDS)) == past_records.KEPT
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "db-" not in path.name]
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    print(f"a worker: {size / 1e6:.2f} MB")
    assert 200 * size + 160e6 < 1e9
    begun = time.process_time()
    account, problem = read_whole(str(tmp_path / "public"), TAG)
    assert (len(account.records), problem) == (
        past_records.KEPT * MOVED + len(account.rows[5000:]),
        "",
    )
    print(f"read in {(time.process_time() - begun) * 1e3:.0f} ms of CPU")


def list_whole(public: Path) -> list[int]:
    account, problem = read_whole(str(public), TAG)
    assert problem == ""
    return [record.attempt for record in account.records]


@pytest.fixture
def published(open_store: Callable[..., Store], tmp_path: Path) -> Store:
    return open_store("policy", publisher=Publisher(str(tmp_path / "public")))


def test_they_are_published(published: Store, tmp_path: Path) -> None:
    public = tmp_path / "public"
    assert list_whole(public) == []
    ledger = fill(published, MANY)
    assert list_whole(public) == list(range(1, MANY + 1))
    files = sorted((public / RECORDS / "tag-0").iterdir())
    assert len(files) == 1 + (MANY - RING - 1) // MOVED
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    assert (public / RECORDS / "tag-0").stat().st_mode & 0o777 == 0o750
    ledger.remove_restart_state(TAG.component_id)
    assert list_whole(public) == list(range(1, MANY + 1))


def test_what_a_kill_left_out_is_published_later(published: Store, tmp_path: Path) -> None:
    public = tmp_path / "public"
    fill(published, MANY)
    places = [public / RECORDS / "tag-0" / str(n) for n in list_past(str(public), TAG)]
    for path in places[-3:]:
        path.unlink()
    assert list_whole(public) != list(range(1, MANY + 1))
    published.publish_all()
    assert list_whole(public) == list(range(1, MANY + 1))
    # A full disk left some out, and later ones were written.
    for path in places[3:5]:
        path.unlink()
    published.publish_all()
    assert list_whole(public) == list(range(1, MANY + 1))


def test_a_file_goes_with_its_document(
    published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_records, "KEPT", 3)
    fill(published, MANY)
    found = list_whole(tmp_path / "public")
    assert found == find_kept(published)
    assert len(list_past(str(tmp_path / "public"), TAG)) == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"1|2|3", b"\x1b[31m\n\n" * 9])
def test_a_damaged_file_hides_no_other(published: Store, tmp_path: Path, content: bytes) -> None:
    fill(published, MANY)
    (tmp_path / "public" / RECORDS / "tag-0" / "2").write_bytes(content)
    found = list_whole(tmp_path / "public")
    assert found == [*range(1, MOVED + 1), *range(2 * MOVED + 1, MANY + 1)]


def test_other_hosts_see_all_though_the_supervisor_was_away(
    open_store: Callable[..., Store], tmp_path: Path
) -> None:
    """More records than a ring, and nobody to copy them meanwhile."""
    public = str(tmp_path / "public")
    publisher = Publisher(public, host="one")
    ledger = fill(open_store("policy", publisher=publisher), MANY, "one")
    work = open_store("work")
    assert Archivist(public, "one").run(work) == 1

    def find(since_ms: int = 0) -> list[int]:
        records = read_records(work, TAG, since_ms, FOREVER_MS, "one")
        return [each.attempt for each in records]

    assert find() == list(range(1, MANY + 1))
    assert find(at(MANY - 150).wall_ms) == list(range(MANY - 150, MANY + 1))
    assert read_records(work, TAG, 0, FOREVER_MS, "two") == []
    # Another supervisor goes on where the last one was killed.
    book(ledger, range(MANY + 1, 2 * MANY))
    archivist = Archivist(public, "one")
    assert archivist.run(work) == 1
    assert archivist.run(work) == 0, "nothing has changed"
    assert find() == list(range(1, 2 * MANY))
    assert parse_host(get_host(work, "one", 10)) == ([TAG], [])


def test_incidents_of_a_host_are_copied(open_store: Callable[..., Store], tmp_path: Path) -> None:
    public = str(tmp_path / "public")
    publisher, work = Publisher(public, host="one"), open_store("work")
    archivist = Archivist(public, "one")
    incidents = [make(opened=at(number))._replace(refunds=()) for number in range(5)]
    for number in (3, 5):
        publisher.publish_incidents(incidents[:number])
        assert archivist.run(work) == 1
        assert parse_host(get_host(work, "one", 10)).incidents == incidents[:number]
    assert parse_host(get_host(work, "one", 2)).incidents == incidents[3:], "the newest"
    assert parse_host(get_host(work, "two", 2)) == ([], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": "x", "past": "y"},
        {"rows": [None, 5, "a|b"], "past": -3},
        {"rows": {}, "past": 10**12},
        {"workers": [5, None, "x y", "tag-0"], "incidents": [{}, 5, {"pool": "\x1b[31m"}]},
        {"workers": {"a": 1}, "incidents": "x"},
    ],
)
def test_hostile_documents_are_read_as_nothing(
    open_store: Callable[..., Store], fields: dict[str, object]
) -> None:
    work = open_store("work")
    for key in ("archive:worker:tag:0@one", "archive@one"):
        work.insert("stats", {"_key": key, **fields})
    assert read_records(work, TAG, 0, FOREVER_MS, "one") == []
    assert parse_host(get_host(work, "one", 10)).incidents == []
