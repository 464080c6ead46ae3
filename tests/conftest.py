"""For every tier: a test leaves no child behind, and in CI a missing capability is a failure."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Timings never decide a test: a busy machine is no failure. The same examples in every run, so that
# a change is what makes the difference; NOMARR_RANDOM=1 draws others.
settings.register_profile("nomarr", deadline=None, derandomize=not os.environ.get("NOMARR_RANDOM"))
settings.load_profile("nomarr")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("NOMARR_REQUIRE_ALL"):
        report.outcome = "failed"
        report.longrepr = f"skipped where everything is required: {call.excinfo}"
    return report


@pytest.fixture(autouse=True)
def no_child_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process running; a session's own server may stay."""
    before = _children()
    yield
    if "arango_server" in request.fixturenames or "running_pair" in request.fixturenames:
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
