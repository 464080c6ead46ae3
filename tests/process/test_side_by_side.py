"""Modules of tests beside each other: each test is run and told of once, if a process ends, too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def server(tmp_path_factory):
    yield os.getpid()
    (pathlib.Path(__file__).parent / f"ended-{os.getpid()}").touch()
    assert "FAIL_AT_THE_END" not in os.environ

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")
"""
GOOD = """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_good(number, server, place):
    assert server == os.getpid()
    print("said by NAME")
    (place / str(number)).touch()
    assert len(list(place.iterdir())) == number + 1
"""
BAD = """
def test_bad():
    print("said by bad")
    assert 1 == 2, "as it is"

def test_after_bad():
    pass
"""
LOST = """
import os, signal

def test_before():
    pass

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_never_run():
    pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number, name in enumerate("abcde"):
        directory = tmp_path / f"tier{number % 2}"
        directory.mkdir(exist_ok=True)
        (directory / f"test_{name}.py").write_text(GOOD.replace("NAME", name))
    return tmp_path


def run(site: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Its exit status, and all that it said."""
    options = ["-p", "tests.support.side_by_side", "-p", "no:cacheprovider", "--processes=3", "-ra"]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={site}", *arguments, str(site)]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={"PATH": "/usr/bin:/bin", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_all_are_run_and_a_session_ends_in_each_process(site: Path) -> None:
    status, said = run(site)
    assert (status, re.findall("=== 15 passed in", said)) == (0, ["=== 15 passed in"]), said
    assert 1 <= len(list(site.glob("ended-*"))) <= 3
    assert "said by" not in said


def test_a_failure_is_told_with_what_it_printed_and_no_other(site: Path) -> None:
    (site / "test_bad.py").write_text(BAD)
    status, said = run(site)
    assert status == 1
    assert "=== 1 failed, 16 passed in" in said
    assert "as it is" in said
    assert set(re.findall("said by .*", said)) >= {"said by bad"}
    assert not re.search("said by [a-e]$", said, re.MULTILINE)


def test_a_test_that_ends_its_process_has_failed(site: Path) -> None:
    (site / "test_lost.py").write_text(LOST)
    status, said = run(site)
    assert status == 1
    assert "=== 1 failed, 16 passed in" in said
    assert "its process ended in it; 1 tests of" in said
    assert re.search(r"^FAILED .*test_lost\.py::test_killed", said, re.MULTILINE)


def test_a_fixture_that_fails_at_the_end_fails_the_run(site: Path) -> None:
    status, said = run(site, FAIL_AT_THE_END="1")
    assert status == 1
    assert "a fixture of the session failed at its end" in said
    assert "AssertionError" in said


def test_it_stops_after_so_many_failures(site: Path) -> None:
    for number in range(30):
        (site / f"test_bad{number}.py").write_text(BAD)
    status, said = run(site, "--maxfail=2")
    assert status == 1
    assert "stopping after 2 failures" in said
    assert len(list(site.glob("ended-*"))) <= 3
