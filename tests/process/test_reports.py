"""Reports of the hook and rings of backoffs: read, kept for the supervisor, and cleared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nomarr_systemd.controller import reports
from nomarr_systemd.controller.reports import Report
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.layout import Paths

TAG = Component("tag", 0)
RUN = "a" * 32


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(str(tmp_path / "run"), str(tmp_path / "state"))
    os.makedirs(found.pending)
    return found


def write(paths: Paths, name: str, text: str) -> Path:
    path = Path(paths.pending, name)
    path.write_text(text)
    return path


def test_a_report_is_read_as_it_was_written(paths: Paths) -> None:
    reports.write_report(paths, Report(TAG, RUN, "signal", "killed", "RTMIN+3"))
    [found] = reports.read_reports(paths).deaths
    assert found._replace(age_ms=0) == Report(TAG, RUN, "signal", "killed", "RTMIN+3")


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("INSTANCE=tag-0\nMONITOR_INVOCATION_ID=" + RUN, True),  # being written
        ("", True),
        ("INSTANCE=../x\nEND=1\n", False),
        ("INSTANCE=tag-0\nMONITOR_INVOCATION_ID=x\nEND=1\n", False),
        ("\xff\x00END=1\nEND=1\n", False),
    ],
)
def test_what_is_no_report(paths: Paths, text: str, stays: bool) -> None:
    path = write(paths, "x", text)
    assert reports.read_reports(paths) == ([], {})
    assert path.exists() == stays


def test_a_ring_that_came_meanwhile_is_not_cleared(paths: Paths) -> None:
    """The next backoff may be over while the controller is still at the one before."""
    ring = write(paths, "due-tag-0", "DUE=1\nINSTANCE=tag-0\nEND=1\n")
    [(component, written_ns)] = reports.read_reports(paths).due.items()
    os.utime(ring, ns=(written_ns + 1, written_ns + 1))
    reports.clear_bell(paths, component, written_ns)
    assert ring.exists()
    reports.clear_bell(paths, component, written_ns + 1)
    assert not ring.exists()
    reports.clear_bell(paths, component, written_ns)  # of none


def test_what_the_supervisor_has_not_answered_is_kept_for_a_while(paths: Paths) -> None:
    reports.write_report(paths, Report(TAG, RUN, "signal"))
    reports.keep_untold(paths, RUN)
    reports.keep_untold(paths, RUN)  # again
    assert reports.read_reports(paths) == ([], {})
    [found] = reports.read_reports(paths, with_untold=True).deaths
    assert found.is_untold
    os.utime(Path(paths.untold, RUN), (0, 0))
    assert reports.read_reports(paths, with_untold=True).deaths == []
    assert os.listdir(paths.untold) == []


def test_no_directory_and_no_room_are_no_errors(paths: Paths) -> None:
    os.rmdir(paths.pending)
    assert reports.read_reports(paths, with_untold=True) == ([], {})
    reports.clear_report(paths, RUN)
    reports.make_directory(paths)
    assert os.stat(paths.pending).st_mode & 0o777 == 0o700
    Path(paths.untold).write_text("in the way")
    reports.write_report(paths, Report(TAG, RUN, "signal"))
    reports.keep_untold(paths, RUN)
    assert len(reports.read_reports(paths).deaths) == 1
