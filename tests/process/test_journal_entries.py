"""Entries for the journal: what journald gets, and that nobody waits for a journald that hangs."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.systemd import journal_socket
from nomarr_systemd.systemd.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(Paths(str(tmp_path), str(tmp_path)))


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A socket in journald's place that nobody reads by itself."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        listening.settimeout(5)
        monkeypatch.setattr(journal_socket, "_SOCKET", path)
        yield listening


def test_an_entry_in_the_native_protocol(journal: Journal, journald: socket.socket) -> None:
    """No value can begin a field or an entry of its own, or reach a terminal as a control."""
    by = "uid 0\nPRIORITY=0\n\nMESSAGE=\x1b[2Jforged\u202e"
    journal.write_act(parse_component("tag-0"), "paused", by)
    entry = journald.recv(65536).decode()
    assert "\nPRIORITY=5\n" in entry
    assert "OBJECT_SYSTEMD_UNIT=nomarr-worker@tag-0.service\n" in entry
    shown = r"uid 0\nPRIORITY=0\n\nMESSAGE=\x1b[2Jforged\u202e"
    assert f"MESSAGE=tag-0: paused by {shown}\n" in entry
    assert entry.endswith(f"NOMARR_BY={shown}\n")
    assert all(line.isprintable() for line in entry.splitlines())


def read_number(entry: bytes) -> int:
    fields = dict(line.partition("=")[::2] for line in entry.decode().splitlines())
    return int(fields["NOMARR_REASON"])


def test_a_journald_that_hangs_is_not_waited_for(
    journal: Journal, journald: socket.socket, tmp_path: Path
) -> None:
    """What it cannot take is sent later, in order, also by another process."""
    for number in range(1000):  # more than any queue takes; blocking, this would never end
        journal.write_incident("tag", str(number), opened=True)
    assert journal.socket.has_kept()
    found: list[bytes] = []
    other = Journal(Paths(str(tmp_path), str(tmp_path)))
    other.write_incident("tag", "1000", opened=False)
    while len(found) < 1001:
        found.append(journald.recv(65536))
        other.socket.flush()
    assert [read_number(entry) for entry in found] == list(range(1001))
    assert b"\nNOMARR_LATE_MS=" not in found[0]
    assert b"\nNOMARR_LATE_MS=" in found[999]
    assert not other.socket.has_kept()


def test_entries_that_are_kept_are_bounded(
    journal: Journal, journald: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_socket, "MAX_KEPT", 10)
    for number in range(1000):
        journal.write_incident("tag", str(number), opened=True)
    entry = b""
    while not journal.socket.flush():
        journald.recv(65536)
    journald.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            entry = journald.recv(65536)
    assert entry.startswith(b"MESSAGE=journald has not answered for long")


def test_a_journald_that_is_away_is_no_error(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_socket, "_SOCKET", str(tmp_path / "nowhere"))
    journal.write_incident("tag", "text", opened=True)
