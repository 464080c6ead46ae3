"""A ledger that others could replace is refused, and root renames nothing to where a file says.
Security finding 2, as far as one process can show it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError, StoreRefused
from nomarr_systemd.host.ownership import find_exposed, find_exposed_file
from nomarr_systemd.operate.job_store import open_as_owner
from nomarr_systemd.store.protocol import POLICY_LEDGER
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY, open_to_all, run_as

pytestmark = needs_root
DOC = {"_key": "worker:tag:0", "n": 1}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two levels that are ours, below pytest's own."""
    directory = tmp_path / "srv" / "nomarr"
    directory.mkdir(parents=True)
    return directory


def give(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def open_ledger(directory: Path) -> None:
    SqliteStore(str(directory), "policy").close()


def swap_for_link(directory: Path) -> None:
    directory.rename(directory.parent / "real")
    directory.symlink_to("real")
    give(directory)


@pytest.mark.parametrize(
    ("expose", "why"),
    [
        (lambda d: give(d), "belongs to nobody"),
        (lambda d: give(d.parent), "belongs to nobody"),
        (lambda d: d.chmod(0o777), "others than its owner may write"),
        (lambda d: d.chmod(0o770), "others than its owner may write"),
        (lambda d: d.chmod(0o1777), "others than its owner may write"),
        (lambda d: d.parent.chmod(0o777), "others than its owner may write"),
        (lambda d: d.parent.chmod(0o775), "others than its owner may write"),
        (swap_for_link, "belongs to nobody"),
    ],
)
def test_a_directory_of_others_is_refused(
    directory: Path, expose: Callable[[Path], None], why: str
) -> None:
    expose(directory)
    with pytest.raises(StoreRefused, match=why) as caught:
        open_ledger(directory)
    assert "point [store] url at a directory of its own" in caught.value.hint
    assert list(directory.iterdir()) == []  # and nothing was made there


@pytest.mark.parametrize(
    "arrange",
    [
        lambda _: None,
        lambda d: d.parent.chmod(0o1777),  # as /tmp
        lambda d: (d.rename(d.parent / "real"), d.symlink_to("real")),
        lambda d: d.rmdir(),
        lambda d: d.chmod(0o755),
    ],
)
def test_a_directory_of_our_own_is_fine(directory: Path, arrange: Callable[[Path], object]) -> None:
    arrange(directory)
    open_ledger(directory)


def test_the_mend_that_is_named_mends(directory: Path) -> None:
    directory.chmod(0o777)
    give(directory.parent)
    for _ in range(2):
        exposed = find_exposed(str(directory))
        assert exposed is not None
        assert os.system(exposed.mend) == 0
    assert find_exposed(str(directory)) is None


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "ledger.db.lock"])
@pytest.mark.parametrize("kind", ["foreign", "open", "link", "pipe"])
def test_files_that_were_there_before_the_directory_was_ours(
    directory: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = directory / name
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.touch(0o600)
    if kind == "foreign":
        give(path)
    elif kind == "open":
        path.chmod(0o666)
    with pytest.raises(StoreRefused):
        open_ledger(directory)
    assert find_exposed_file(str(path)) is not None
    assert not (tmp_path / "elsewhere").exists()


def test_a_user_has_a_ledger_of_their_own(tmp_path: Path) -> None:
    """Also with a group of their own that may write; root's group is nobody's own."""
    own = tmp_path / "own"
    own.mkdir()
    give(own)
    open_to_all(tmp_path)
    assert run_as(NOBODY, lambda: open_ledger(own)) is None
    with pytest.raises(StoreRefused, match="belongs to nobody"):
        open_ledger(own)
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots").chmod(0o775)
    assert find_exposed(str(tmp_path / "roots")) is not None


class TestSettingAside:
    """The note that a killed process leaves is read by root."""

    @pytest.fixture
    def note(self, directory: Path) -> Path:
        (directory / "ledger.db").write_text("what the attacker wants there")
        (directory / "ledger.db").chmod(0o600)
        note = directory / "ledger.db.setting-aside"
        note.touch(0o600)
        return note

    @pytest.mark.parametrize(
        "text",
        [
            "{target}\nwhy\n",
            "../{target}\n",
            "20260101T000000Z/../../{target}\n",
            "20260101T000000Z\n{target}\n",
            "20260101T000000Z-{target}\n",
        ],
    )
    def test_no_name_comes_from_it(
        self, directory: Path, tmp_path: Path, note: Path, text: str
    ) -> None:
        target = tmp_path / "ld.so.preload"
        note.write_text(text.replace("{target}", str(target)))
        store = SqliteStore(str(directory), "policy")
        store.insert(POLICY_LEDGER, DOC)
        store.close()
        assert not target.exists()
        # Nothing left the directory: what was no database was set aside in it, and is whole.
        assert {path.name for path in tmp_path.iterdir()} == {"srv"}
        [aside] = directory.glob("ledger.db.corrupt-*Z")
        assert aside.read_text() == "what the attacker wants there"

    def test_a_stamp_is_finished_in_the_same_directory(self, directory: Path, note: Path) -> None:
        note.write_text("20260101T000000Z-2\n")
        open_ledger(directory)
        aside = directory / "ledger.db.corrupt-20260101T000000Z-2"
        assert aside.read_text() == "what the attacker wants there"
        assert not note.exists()

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_it_is_no_plain_file(
        self, directory: Path, tmp_path: Path, note: Path, kind: str
    ) -> None:
        note.unlink()
        (tmp_path / "other").write_text("20260101T000000Z\n")
        note.symlink_to(tmp_path / "other") if kind == "link" else os.mkfifo(note)
        with pytest.raises(StoreRefused):
            open_ledger(directory)

    def test_what_sqlite_says_of_a_hostile_file_can_be_printed(
        self, directory: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The jobs' database is workers' to write, and its schema's names are quoted."""
        import sqlite3

        store = SqliteStore(str(directory), "work")
        store.close()
        db = sqlite3.connect(directory / "work/work.db")
        db.execute("PRAGMA writable_schema = ON")
        db.execute(
            "INSERT INTO sqlite_master VALUES ('table', ?, 'x', 0, 'CREATE TABLE nonsense')",
            ("a\n<0>EMERGENCY \x1b[2J",),
        )
        db.commit()
        db.close()
        SqliteStore(str(directory), "work").close()
        lines = capfd.readouterr().err.splitlines()
        assert lines
        assert all(line.isprintable() for line in lines)


def test_root_becomes_no_owner_in_a_directory_of_others(directory: Path) -> None:
    """What looks like the jobs' directory may be a link by the time it is used."""
    (directory / "work").mkdir()
    settings = StoreSettings(f"sqlite://{directory}")
    give(directory)
    with pytest.raises(NomarrError, match="not safe"), open_as_owner(settings):
        pass
    os.chown(directory, 0, 0)
    (directory / "work").chmod(0o777)
    with pytest.raises(NomarrError, match="not safe"), open_as_owner(settings):
        pass
