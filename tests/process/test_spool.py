"""The spool: a failure outlives the store's absence, a full disk and a kill, and is booked once."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from nomarr_systemd.config.values import Config, Pool, StoreSettings
from nomarr_systemd.controller.act import act
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.intents import BookSpooled
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.past_records import read_rows
from nomarr_systemd.ledger.spool import Spool
from nomarr_systemd.store.protocol import PAST_RECORDS
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.systemd.manager import Manager
from tests.support.moments import PLAIN, death
from tests.support.spooled import entry, replay


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(str(tmp_path / "spool"))


@pytest.fixture
def ledger(tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator of one Ledger
    store = SqliteStore(str(tmp_path / "state"), "policy")
    yield Ledger(store)
    store.close()


def test_what_was_written_is_read_in_order_of_time(spool: Spool) -> None:
    late, early = entry(1, 50), entry(2, 10)
    start_job = entry(3, 20)
    start_job = start_job._replace(
        death=start_job.death._replace(invocation=start_job.death.invocation + "#1")
    )
    for each in (late, early, start_job):
        spool.write(each)
    assert spool.read() == ([early, start_job, late], [])
    mode = os.stat(spool.directory).st_mode & 0o777
    assert mode == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in Path(spool.directory).iterdir())


def test_an_empty_spool(spool: Spool, ledger: Ledger) -> None:
    assert spool.read() == ([], [])
    assert replay(spool, ledger) == ([], [])


def test_a_replay_books_once_and_cleans_up(spool: Spool, ledger: Ledger) -> None:
    spool.write(entry(1, 10))
    spool.write(entry(2, 20))
    spool.write(entry(3, 20, "library-4"))
    done = replay(spool, ledger)
    assert [result.fresh for _, result in done.booked] == [True, True, True]
    assert os.listdir(spool.directory) == []
    account = ledger.account("tag-0")
    assert account.restart_count == 2
    assert [record.wall_ms for record in account.records] == [1_700_000_010_000, 1_700_000_020_000]
    assert [record.delay_ms for record in account.records] == [60_000, 60_000]
    # Killed between the booking and the unlinking: the file is still there.
    spool.write(entry(2, 20))
    done = replay(spool, ledger)
    assert [result.fresh for _, result in done.booked] == [False]
    assert ledger.account("tag-0").restart_count == 2


def test_a_store_that_is_still_away_keeps_the_files(spool: Spool, tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = SqliteStore(str(state), "policy")
    spool.write(entry(1))
    store.close()
    state.rename(tmp_path / "gone")
    state.write_text("not a directory")
    with pytest.raises(StoreUnavailable):
        replay(spool, Ledger(store))
    assert len(spool.read()[0]) == 1
    state.unlink()
    (tmp_path / "gone").rename(state)
    assert len(replay(spool, Ledger(store)).booked) == 1
    store.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"component_id": "worker:tag:0"}',
        b'{"component_id": "../x", "failure": {}, "decision": {"evidence": {}}, "at": {}}',
    ],
)
def test_a_file_that_is_no_failure_is_set_aside(
    spool: Spool, ledger: Ledger, content: bytes
) -> None:
    spool.write(entry(1))
    name = f"{9:032x}.json"
    Path(spool.directory, name).write_bytes(content)
    done = replay(spool, ledger)
    assert (len(done.booked), done.bad) == (1, [name])
    assert os.listdir(spool.directory) == [f"{9:032x}.bad"]
    assert Path(spool.directory, f"{9:032x}.bad").read_bytes() == content
    assert replay(spool, ledger) == ([], [])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"code": -11', b'"code": "x"'),
        (b'"code": -11', b'"code": true'),
        (b'"run_ms": 5', b'"run_ms": "5"'),
        (b'"kind": "core-dump"', b'"kind": null'),
        (b'"worker:tag:0"', b"5"),
        (b'"worker:tag:0"', b'"../x"'),
        (b'"action": "restart"', b'"action": "dance"'),
        (b'"window_used": 0', b'"window_used": "x"'),
        (b'"wall_ms": 17', b'"wall_ms": "", "x": 17'),
        (b'"boot_id": "', b'"boot_id": [1], "x": "'),
        (b'"boot_id": "b', b'"boot_id": "|'),
        (b'"kind": "core-dump"', b'"kind": "\\ud800"'),
        (b'"decision": {', b'"decision": "x", "y": {'),
    ],
)
def test_types_are_checked(spool: Spool, ledger: Ledger, good: bytes, bad: bytes) -> None:
    spool.write(entry(1))
    spool.write(entry(2))
    path = Path(spool.directory, f"{1:032x}.json")
    assert good in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(good, bad))
    done = replay(spool, ledger)
    assert (len(done.booked), done.bad) == (1, [path.name])


def test_a_newer_versions_fields_are_passed_over(spool: Spool) -> None:
    spool.write(entry(1))
    path = Path(spool.directory, f"{1:032x}.json")
    path.write_bytes(path.read_bytes().replace(b'"code": -11', b'"code": -11, "colour": "blue"'))
    assert spool.read() == ([entry(1)], [])


def test_strange_things_in_the_directory(spool: Spool, ledger: Ledger) -> None:
    spool.write(entry(1))
    Path(spool.directory, "zz.json").mkdir()
    Path(spool.directory, "gone.json").symlink_to("/nonexistent")
    done = replay(spool, ledger)
    assert (len(done.booked), done.bad) == (1, ["zz.json"])


def test_an_entry_is_durable_before_it_has_its_name(spool: Spool, tmp_path: Path) -> None:
    """Only the order of system calls shows it: after a kill the page cache is still there."""
    code = (
        "import sys\n"
        "from nomarr_systemd.ledger.spool import Spool\n"
        "from tests.support.spooled import entry\n"
        "Spool(sys.argv[1]).write(entry(7))"
    )
    log = tmp_path / "log"
    command = ["strace", "-y", "-e", "trace=write,fsync,rename", "-o", str(log)]
    subprocess.run([*command, sys.executable, "-c", code, spool.directory], check=True)
    calls = re.findall(r"^(\w+)\(.*spool", log.read_text(), re.MULTILINE)
    assert calls[-4:] == ["write", "fsync", "rename", "fsync"]


def test_names_are_checked(spool: Spool) -> None:
    spool.write(entry(1))
    path = Path(spool.directory, f"{1:032x}.json")
    good = path.read_bytes()
    path.rename(path.with_name(f"{2:032x}.json"))
    path.with_name(f"{2:032x}.json").write_bytes(good)
    assert spool.read() == ([], [f"{2:032x}.json"])


def test_an_invocation_cannot_leave_the_directory(spool: Spool) -> None:
    bad = entry(1)._replace(death=death("../../etc/passwd"))
    with pytest.raises(BadName):
        spool.write(bad)


def test_no_room_to_spool_says_so(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="cannot spool a failure") as caught:
        Spool(str(tmp_path / "spool")).write(entry(1))
    assert "stays pending" in caught.value.hint


def test_a_write_that_was_killed_halfway_is_passed_over(spool: Spool) -> None:
    spool.write(entry(1))
    Path(spool.directory, f"{2:032x}.json.123.new").write_bytes(b"{half")
    assert spool.read() == ([entry(1)], [])


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
def test_more_than_a_ring_are_booked_once_though_the_controller_is_killed(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of hours: after a kill between a commit and the removal of its files they are
    booked again, and the ledger must know each of them."""
    many = 170
    state = tmp_path / "state"
    state.mkdir()
    paths = Paths(str(tmp_path), str(state), user=True)
    config = Config(store=StoreSettings(f"sqlite://{state}"), pools=(Pool("tag"),))
    worker = Component("tag", 0)
    left = killed_at

    def book_all(site: Site) -> None:
        act(site, [BookSpooled(worker, each, PLAIN) for each in site.spool.read()[0]])

    with contextlib.closing(Site(paths, config, Manager(user=True))) as site:
        for number in range(1, many + 1):
            site.spool.write(entry(number, number))
        removing = site.spool.remove

        def remove(names: Iterable[str]) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise SystemExit
            removing(names)

        monkeypatch.setattr(site.spool, "remove", remove)
        with pytest.raises(SystemExit):
            book_all(site)
    with contextlib.closing(Site(paths, config, Manager(user=True))) as site:
        assert site.spool.count() == many - 50 * (killed_at - 1)
        book_all(site)
        assert site.spool.count() == 0
        account = site.ledger.account(worker.component_id)
        assert (account.restart_count, account.attempts) == (many, many)
        rows = [row for doc in site.store.find(PAST_RECORDS) for row in read_rows(doc)]
        runs = [row.split("|")[1] for row in [*rows, *account.rows]]
        assert runs == [f"{number:032x}" for number in range(1, many + 1)]
