"""One machine for each module of tests: it boots in a second, but starts more slowly than a test.
Its journal is shown when a test fails.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import installed, packages, trees
from tests.support.capabilities import IS_ROOT
from tests.support.machine import Machine, MachineUnavailable


def pytest_runtest_setup() -> None:
    """Before anything is built for a machine that cannot be booted."""
    if not IS_ROOT:
        pytest.skip("needs root")


@pytest.fixture(scope="session")
def deb() -> Path:
    """The Debian package; a fault that lintian finds fails here."""
    return packages.build_once("build-deb")


@pytest.fixture(scope="session")
def web_deb(deb: Path) -> Path:
    """The package of the page, which the same build makes."""
    return deb.with_name(deb.name.replace("nomarr-systemd_", "nomarr-web_"))


@pytest.fixture(scope="session")
def rpm() -> Path:
    """The RPM; a fault that rpmlint finds fails here."""
    return packages.build_once("build-rpm")


@pytest.fixture(scope="session")
def arango() -> Path:
    """The package of ArangoDB's driver."""
    return packages.build_once("build-arango")


@pytest.fixture(scope="session")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' workers, ready to be copied onto a root."""
    root = tmp_path_factory.mktemp("added") / "root"
    installed.lay_out(root)
    return root


@pytest.fixture(scope="module")
def suite() -> str:
    """Which Debian is booted; modules that want another say so."""
    return "bookworm"


@pytest.fixture(scope="module")
def tree(suite: str, deb: Path, web_deb: Path, arango: Path) -> Path:
    """The clean system that is booted."""
    needed, *offers = (packages.field(each, "Depends") for each in (deb, arango, web_deb))
    names = [name for name in ", ".join(offers).split(", ") if "nomarr-systemd" not in name]
    offered = ", ".join([*names, "systemd-coredump", "libdw1"])
    try:
        return trees.find_tree(suite, needed, offered)
    except MachineUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def machine(tree: Path, deb: Path, added: Path) -> Iterator[Machine]:
    """Booted with the package installed, nothing configured."""
    try:
        machine = Machine(tree, added, packages.install_once(tree, deb))
    except MachineUnavailable as error:
        pytest.skip(str(error))
    try:
        machine.boot()
        yield machine
    finally:
        machine.end()


@pytest.fixture(autouse=True)
def no_child_is_left(machine: Machine) -> Iterator[None]:
    """In place of the one for every tier: a reboot changes the machine's own processes."""
    before = _children() - machine.processes
    yield
    left = _children() - machine.processes - before
    assert not left, f"left running: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    machine = getattr(item, "funcargs", {}).get("machine")
    if report.when != "teardown" and report.failed and isinstance(machine, Machine):
        said = machine.journal("--output=short-precise", "--lines=400")
        report.sections.append(("machine: the end of the journal", said))
    return report


def _children() -> set[int]:
    tasks = Path("/proc/self/task")
    return {
        int(pid)
        for task in os.listdir(tasks)
        for pid in (tasks / task / "children").read_text().split()
    }
