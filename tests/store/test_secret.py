"""Where the store's password comes from, and what is no password."""

from __future__ import annotations

from pathlib import Path

import pytest

from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.store.protocol import Domain
from nomarr_systemd.store.secret import read_password


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "credentials"
    directory.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    return directory


def keep(path: Path, content: bytes, mode: int = 0o400) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "password"),
    [
        (b"open sesame", "open sesame"),
        (b"open sesame\n", "open sesame"),
        (b"open sesame\r\n", "open sesame"),
        (b"two\nlines\n\n", "two\nlines\n"),
        (b" spaces count ", " spaces count "),
        ("Pässwörd €".encode(), "Pässwörd €"),
        (b"x" * 4096, "x" * 4096),
    ],
)
def test_a_password_is_the_files_content(tmp_path: Path, content: bytes, password: str) -> None:
    file = keep(tmp_path / "password", content)
    assert read_password("policy", password_file=str(file)) == password


@pytest.mark.parametrize("domain", ["policy", "work"])
def test_each_domain_has_a_credential_of_its_own(credentials: Path, domain: Domain) -> None:
    """One for both would give the ledger's password to workers."""
    other = "work" if domain == "policy" else "policy"
    for name in ("nomarr-arango", f"nomarr-arango-{other}"):
        keep(credentials / name, b"not for it")
    with pytest.raises(StoreRefused, match=domain):
        read_password(domain, password_file=None)
    keep(credentials / f"nomarr-arango-{domain}", b"own")
    assert read_password(domain, password_file=None) == "own"


def test_an_explicit_file_wins_over_credentials(credentials: Path, tmp_path: Path) -> None:
    keep(credentials / "nomarr-arango-policy", b"credential")
    file = keep(tmp_path / "password", b"explicit")
    assert read_password("policy", password_file=str(file)) == "explicit"


def test_without_a_password_the_hint_says_how_to_give_one(credentials: Path) -> None:
    with pytest.raises(StoreRefused) as caught:
        read_password("work", password_file=None)
    assert "work" in str(caught.value)
    assert "LoadCredential=nomarr-arango-work" in caught.value.hint


def test_without_credentials_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(StoreRefused):
        read_password("work", password_file=None)


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n", b"x" * 4097, b"secret\xff"])
def test_what_is_no_password_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    file = keep(tmp_path / "password", content)
    with pytest.raises(StoreRefused, match=str(file)) as caught:
        read_password("policy", password_file=str(file))
    assert caught.value.hint
    assert caught.value.__cause__ is None
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreRefused, match="cannot read"):
        read_password("policy", password_file=str(tmp_path / name))


def test_a_credential_that_cannot_be_read_does_not_fall_through(credentials: Path) -> None:
    (credentials / "nomarr-arango-work").symlink_to("nowhere")
    keep(credentials / "nomarr-arango", b"common")
    with pytest.raises(StoreRefused, match="nomarr-arango-work"):
        read_password("work", password_file=None)


@pytest.mark.parametrize("mode", [0o404, 0o444, 0o644, 0o666])
def test_a_file_that_everyone_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = keep(tmp_path / "password", b"x", mode)
    with pytest.raises(StoreRefused) as caught:
        read_password("policy", password_file=str(file))
    assert caught.value.hint == f"chmod o-rwx {file}"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_the_owner_and_a_group_may_read_it(tmp_path: Path, mode: int) -> None:
    file = keep(tmp_path / "password", b"x", mode)
    assert read_password("policy", password_file=str(file)) == "x"
