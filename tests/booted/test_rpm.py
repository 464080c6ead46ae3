"""The RPM's scriptlets, tried for real by rpm itself on a copy of this machine: install, upgrade,
erase. Dependencies are Debian's here, which rpm cannot see.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import packages
from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine, MachineUnavailable, unit_of

CONFIG = f"""\
[policy]
backoff_base_s = 0.2
max_restarts = 0

[pool.steady]
workers = 2
command = ["{WORKERS}/steady", "0"]
"""
NAMES = ("steady-0", "steady-1")
NEWER = "0.1.1"
WEB = "nomarr-web.service"


@pytest.fixture(scope="module")
def machine(added: Path) -> Iterator[Machine]:
    if shutil.which("rpm") is None:
        pytest.skip("rpm is missing: run packaging/prepare test")
    try:
        machine = Machine(Path("/"), added)
    except MachineUnavailable as error:
        pytest.skip(str(error))
    try:
        machine.boot()
        yield machine
    finally:
        machine.end()


def run_rpm(machine: Machine, *arguments: str) -> str:
    options = ["--force-debian", "--nodeps"]
    if machine.run("rpm", "--force-debian", "--version", check=False).returncode:
        options.remove("--force-debian")  # Debian's own, until Debian 12
    done = machine.run("rpm", *options, *arguments)
    return done.stdout + done.stderr


def find_web(rpm: Path) -> Path:
    """The subpackage that the same build makes."""
    return rpm.with_name(rpm.name.replace(packages.NAME, "nomarr-web"))


def ask_page(machine: Machine, path: str) -> str:
    ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read())"
    url = f"http://127.0.0.1:8765{path}"
    return machine.run("/usr/bin/python3", "-c", ask, url, check=False).stdout


def test_install_upgrade_erase(machine: Machine, rpm: Path) -> None:
    newer = packages.build_once("build-rpm", "--quick", "--version", NEWER)
    for package in (rpm, newer, find_web(rpm), find_web(newer)):
        shutil.copy(package, machine.path("/root"))

    said = run_rpm(machine, "--install", f"/root/{rpm.name}")
    assert "fail" not in said.lower()
    assert machine.run("getent", "passwd", "nomarr").stdout  # %pre
    state = machine.run("stat", "--format=%A %U:%G", f"{STATE}/work").stdout  # %post
    assert state == "drwxrws--- nomarr:nomarr\n"
    assert machine.systemctl("is-enabled", "nomarr-workers.target").strip() == "enabled"
    assert "failed for good" in machine.run("journalctl", "--list-catalog").stdout
    assert machine.get("nomarr-supervisor.service", "LoadState") == "loaded"  # daemon-reload
    assert machine.get("nomarr-supervisor.service", "ActiveState") == "inactive"
    compiled = machine.run("find", packages.LIBEXEC, "-name", "*.pyc").stdout
    assert "/worker/__pycache__/main." in compiled  # %posttrans

    assert not machine.path(f"{packages.LIBEXEC}/nomarr-web").exists()  # a package of its own

    run_rpm(machine, "--install", f"/root/{find_web(rpm).name}")
    assert machine.run("getent", "passwd", "nomarr-web").stdout
    assert machine.get(WEB, "LoadState") == "loaded"
    assert machine.get(WEB, "ActiveState") == "inactive"

    machine.apply(CONFIG)
    machine.wait_until_running(*NAMES)
    machine.systemctl("enable", "--now", WEB)
    page = machine.get(WEB, "MainPID")
    assert '"instance":"steady-0"' in ask_page(machine, "/api/workers")
    workers = [machine.get(name, "MainPID") for name in NAMES]
    supervisor = machine.get("nomarr-supervisor.service", "MainPID")

    run_rpm(machine, "--upgrade", f"/root/{newer.name}", f"/root/{find_web(newer).name}")
    assert machine.run("nomarrctl", "--version").stdout == f"nomarrctl {NEWER}\n"
    assert [machine.get(name, "MainPID") for name in NAMES] == workers
    assert machine.get("nomarr-supervisor.service", "MainPID") not in (supervisor, "0")  # %postun
    assert machine.run("find", packages.LIBEXEC, "-name", "*.pyc").stdout
    assert "steady" in machine.path("/etc/nomarr/nomarr.toml").read_text()
    machine.wait_until_healthy("steady-0")

    assert machine.get(WEB, "MainPID") not in (page, "0")
    assert '"instance":"steady-0"' in ask_page(machine, "/api/workers")
    run_rpm(machine, "--erase", "nomarr-web")
    assert machine.get(WEB, "LoadState") == "not-found"
    assert not machine.path(f"{packages.LIBEXEC}/nomarr_systemd/web").exists()

    machine.kill("steady-1")
    machine.wait_for(lambda: machine.get("steady-1", "LoadState") == "masked", "it is masked")
    machine.wait_until_settled("steady-1")
    run_rpm(machine, "--erase", packages.NAME)
    for unit in (unit_of("steady-0"), "nomarr-supervisor.service", "nomarr-controller.socket"):
        shown = machine.show(unit, "ActiveState", "LoadState")
        assert shown == {"ActiveState": "inactive", "LoadState": "not-found"}  # %preun, %postun
    assert not machine.path(packages.LIBEXEC).exists()
    assert machine.account("steady-1").failure_reason  # what it knew stays
    assert machine.path("/etc/nomarr/nomarr.toml.rpmsave").exists()
