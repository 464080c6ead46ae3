"""What apply refuses and doctor shows of a store: who could replace it, who could read its secrets,
what is sent in the clear, a driver that is missing. Security findings 2, 12 and 23.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.config.file import parse
from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.host.access import may_read
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate import store_check
from nomarr_systemd.operate.store_check import find_concerns
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="nomarr-check-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def check(place: Path, store: str, more: str = "") -> list[tuple[str, str]]:
    scope = Scope(False, "", Paths(str(place / "run"), str(place)))
    concerns = find_concerns(scope, parse(f"[store]\n{store}\n{more}"))
    return [(each.level, each.text) for each in concerns]


def arango(place: Path, host: str = "localhost", scheme: str = "arangodb") -> str:
    return (
        f'url = "{scheme}://ledger@{host}/nomarr"\nwork_user = "work"\n'
        f'password_file = "{place}/ledger"\nwork_password_file = "{place}/work"'
    )


@needs_root
def test_a_directory_that_is_not_roots(place: Path) -> None:
    url = f'url = "sqlite://{place}"'
    assert check(place, url) == []
    os.chown(place, NOBODY, NOBODY)
    [(level, text)] = check(place, url)
    assert level == "bad"
    assert "could be replaced by others" in text
    assert "belongs to nobody" in text


@needs_root
def test_another_directory_needs_one_for_the_jobs(place: Path) -> None:
    (place / "other").mkdir()
    [(level, text)] = check(place, f'url = "sqlite://{place}/other"')
    assert (level, text) == ("bad", f"there is no directory {place}/other/work for the jobs")


@pytest.mark.parametrize(
    ("host", "scheme", "is_warned"),
    [
        ("localhost", "arangodb", False),
        ("127.0.0.9:99", "arangodb", False),
        ("[::1]", "arangodb", False),
        ("db.example", "arangodb", True),
        ("localhost,10.0.0.1", "arangodb", True),
        ("[fd00::1]", "arangodb", True),
        ("db.example", "arangodb+tls", False),
    ],
)
def test_a_password_in_the_clear(place: Path, host: str, scheme: str, is_warned: bool) -> None:
    found = [text for _, text in check(place, arango(place, host, scheme))]
    assert any("is not encrypted" in text for text in found) is is_warned


@needs_root
class TestPasswords:
    @pytest.fixture(autouse=True)
    def files(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_check, "_USER", "nobody")
        for name, gid, mode in (("ledger", 0, 0o600), ("work", NOBODY, 0o640)):
            (place / name).write_text("secret")
            (place / name).chmod(mode)
            os.chown(place / name, 0, gid)

    def test_each_has_its_own(self, place: Path) -> None:
        assert check(place, arango(place)) == []

    @pytest.mark.parametrize(
        ("uid", "gid", "mode"),
        [(0, NOBODY, 0o640), (NOBODY, 0, 0o600), (NOBODY, 0, 0o000), (0, 0, 0o604)],
    )
    def test_the_ledgers_is_not_for_workers(
        self, place: Path, uid: int, gid: int, mode: int
    ) -> None:
        os.chown(place / "ledger", uid, gid)
        (place / "ledger").chmod(mode)
        assert check(place, arango(place)) == [
            ("bad", f"nobody may read the ledger's password in {place}/ledger")
        ]

    def test_also_by_a_group_that_a_pool_adds(self, place: Path) -> None:
        os.chown(place / "ledger", 0, 6)  # Debian's "disk"
        (place / "ledger").chmod(0o640)
        pool = '[pool.tag]\ncommand = ["/bin/x"]\n[pool.tag.unit]\nSupplementaryGroups = "6 7"'
        assert check(place, arango(place)) == []
        [(level, _)] = check(place, arango(place), pool)
        assert level == "bad"

    def test_the_jobs_is_for_them(self, place: Path) -> None:
        (place / "work").chmod(0o600)
        [(level, text)] = check(place, arango(place))
        assert level == "warn"
        assert "could not take jobs" in text

    def test_nobody_reads_what_is_behind_a_closed_directory(self, place: Path) -> None:
        (place / "work").chmod(0o644)
        place.chmod(0o700)
        assert not may_read(f"{place}/work", "nobody")
        assert not may_read(f"{place}/none", "nobody")
        assert not may_read(f"{place}/work", "no-such-user")


def test_a_missing_driver(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "arango" or name.startswith("nomarr_systemd.store.arango"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "arango", None)
    config = parse(f"[store]\n{arango(place)}")
    concerns = find_concerns(Scope(True, "", Paths(str(place), str(place), user=True)), config)
    with pytest.raises(StoreRefused, match="driver is missing") as caught:
        store_check.refuse(concerns)
    assert "python3-arango" in caught.value.hint


def test_a_host_without_a_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_check, "host_of", lambda _url: "unknown")
    [level] = [level for level, text in check(place, arango(place)) if "machine-id" in text]
    assert level == "bad"
