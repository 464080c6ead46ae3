"""Entries for the journal: what journald gets, and that nobody waits for a journald that hangs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.systemd import journal


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A socket in journald's place that nobody reads by itself."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        listening.settimeout(5)
        monkeypatch.setattr(journal, "_SOCKET", path)
        yield listening


def test_an_entry_in_the_native_protocol(journald: socket.socket) -> None:
    """No value can begin a field or an entry of its own, or reach a terminal as a control."""
    by = "uid 0\nPRIORITY=0\n\nMESSAGE=\x1b[2Jforged\u202e"
    journal.write_act(parse_component("tag-0"), "paused", by, user=False)
    entry = journald.recv(65536).decode()
    assert "\nPRIORITY=5\n" in entry
    assert "OBJECT_SYSTEMD_UNIT=nomarr-worker@tag-0.service\n" in entry
    shown = r"uid 0\nPRIORITY=0\n\nMESSAGE=\x1b[2Jforged\u202e"
    assert f"MESSAGE=tag-0: paused by {shown}\n" in entry
    assert entry.endswith(f"NOMARR_BY={shown}\n")
    assert all(line.isprintable() for line in entry.splitlines())


def test_a_journald_that_hangs_is_not_waited_for(journald: socket.socket) -> None:
    for _ in range(5000):  # more than any queue takes; blocking, this would never end
        journal.write_incident("tag", "x" * 1000, opened=True)
    assert b"MESSAGE=" in journald.recv(65536)


def test_a_journald_that_is_away_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SOCKET", str(tmp_path / "nowhere"))
    journal.write_incident("tag", "text", opened=True)
