"""For every tier: the same limits and signals however it was started; a test leaves no child;
in CI a missing capability is a failure.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from nomarr_systemd.host.machine import is_volatile
from tests.support.capabilities import NOT_HERE
from tests.support.depth import IS_DEEP, times

# Timings never decide a test: a busy machine is no failure. The same examples in every run, so that
# a change is what makes the difference, unless they are to go deep.
settings.register_profile("nomarr", deadline=None, derandomize=not IS_DEEP, max_examples=times(100))
settings.load_profile("nomarr")

# What a person may have set: every module of tests, and the package in each of thousands of
# processes, would be compiled again and again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SESSION_SERVERS = {"arango_server", "postgres_server", "running_pair"}
OPEN_FILES = 20_000  # a login on Debian has 1,024, and may have more if it asks


def pytest_configure() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.umask(0o022)
    os.environ.pop("COLUMNS", None)  # of pytest's own output: our tables would be cut to it
    if is_volatile(tempfile.gettempdir()):  # as on Debian 13: `doctor` warns of a store in there
        os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"
    # In the background of a script SIGINT is ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give schemathesis's items ids of their own: all have the same with pytest 9.2, and one that
    fails could not be named."""
    if not item.nodeid.endswith(f"::{item.name}"):
        above, _, _ = item.nodeid.rpartition("::")
        item._id = type(item.id).parse(f"{above}::{item.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("NOMARR_REQUIRE_ALL"):
        reason = str(call.excinfo.value) if call.excinfo else ""
        if not reason.startswith(NOT_HERE):
            report.outcome = "failed"
            report.longrepr = f"skipped where everything is required: {reason}"
    return report


@pytest.fixture(autouse=True)
def no_child_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process running; a session's own server may stay."""
    before = _children()
    yield
    if SESSION_SERVERS & set(request.fixturenames):
        return
    left = _children() - before
    assert not left, f"left running: {left}"


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update((task / "children").read_text().split())
        except OSError:  # a thread that ended meanwhile, or a kernel without the list
            continue
    return found
