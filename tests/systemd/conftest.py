"""A private systemd for each test that asks for one; its journal is shown when the test fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from nomarr_systemd.demo.lab import LabUnavailable
from tests.support.lab import Lab
from tests.support.users import NOBODY


def _open(uid: int) -> Iterator[Lab]:
    lab = Lab(uid=uid)
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    yield lab
    lab.end()


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield from _open(0)


@pytest.fixture(params=[0, NOBODY], ids=["root", "plain"])
def any_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Once as root, once as a plain user: where user scope is claimed to work."""
    yield from _open(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        for found in getattr(item, "funcargs", {}).values():
            value = getattr(found, "lab", found)
            if isinstance(value, Lab):
                said = value.journal("--output=short-precise", "--lines=500")
                report.sections.append(("lab: the end of the journal", said))
    return report
