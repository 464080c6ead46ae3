"""The life of the Debian package on clean systems: installed, configured, upgraded under load,
refused, removed, purged. Each test has a machine of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import parse_component
from tests.support import packages
from tests.support.frames_seen import Subscriber
from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine, MachineError, MachineUnavailable, unit_of
from tests.support.trees import SUITES

CONFIG = f"""\
[policy]
backoff_base_s = 0.2
backoff_jitter = 0
max_restarts = 1

[health]
frame_interval_s = 0.1

[pool.tag]
workers = 2
entrypoint = "tagger:Tagger"

[pool.tag.unit]
Environment = ["PYTHONPATH={WORKERS}"]
"""
NAMES = ("tag-0", "tag-1")
LIVE = "/run/nomarr/live.sock"
NEWER = "0.1.0+newer"


@pytest.fixture(scope="session")
def newer() -> Path:
    """The same sources as a later version."""
    return packages.build_once("build-deb", "--quick", "--version", NEWER)


@pytest.fixture(scope="module", params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(tree: Path, added: Path) -> Iterator[Machine]:
    """Booted, without our package."""
    try:
        machine = Machine(tree, added)
    except MachineUnavailable as error:
        pytest.skip(str(error))
    try:
        machine.boot()
        yield machine
    finally:
        machine.end()


def running_units(machine: Machine) -> list[str]:
    """Ours that are active, but for the target and the slice, which are no processes."""
    text = machine.systemctl("list-units", "--plain", "--no-legend", "--state=active", "nomarr*")
    units = [line.split()[0] for line in text.splitlines()]
    return [unit for unit in units if not unit.endswith((".target", ".slice"))]


def traces(machine: Machine) -> list[str]:
    """Every file with our name, but for those of the tests and systemd's notes on its units."""
    places = ("/etc", "/run", "/usr", "/var/lib", "/var/cache")
    found = machine.run("find", *places, "-iname", "*nomarr*").stdout.splitlines()
    return [path for path in found if not path.startswith(("/usr/local/", "/run/systemd/units/"))]


def configure(machine: Machine) -> None:
    machine.apply(CONFIG)
    wait_until_healthy(machine)


def wait_until_healthy(machine: Machine) -> None:
    machine.wait_until_running(*NAMES)

    def all_are() -> bool:
        done = machine.run("nomarrctl", "status", "--json", check=False)
        return [row["health"] for row in json.loads(done.stdout)] == ["healthy", "healthy"]

    machine.wait_for(all_are, "both workers are healthy")


def mask(machine: Machine, name: str) -> None:
    """Two failures, where one restart is allowed."""
    died = machine.kill(name)
    machine.wait_until_running(name, after=died)
    machine.kill(name)
    machine.wait_for(lambda: machine.get(name, "LoadState") == "masked", f"{name} is masked")
    machine.wait_until_settled(name)


def pids(machine: Machine, *names: str) -> list[str]:
    return [machine.get(name, "MainPID") for name in names]


def test_nothing_runs_until_it_is_configured(machine: Machine, deb: Path) -> None:
    said = packages.install(machine, deb)
    assert "rror" not in said
    assert packages.version_of(machine).startswith("installed ")
    assert running_units(machine) == []
    assert machine.systemctl("is-enabled", "nomarr-workers.target").strip() == "enabled"
    assert "nomarr" in machine.run("getent", "passwd", "nomarr").stdout
    assert machine.run("nomarrctl", "--version").stdout.startswith("nomarrctl ")
    machine.reboot()
    assert running_units(machine) == []
    assert machine.systemctl("is-system-running").strip() == "running"

    configure(machine)
    shown = machine.systemctl("status", unit_of("tag-0"))
    assert f"{packages.LIBEXEC}/nomarr-worker tagger:Tagger" in shown
    machine.power_cut()
    begun = time.monotonic()
    machine.boot()
    wait_until_healthy(machine)
    print(f"from power on until both workers are healthy: {time.monotonic() - begun:.2f} s")
    assert machine.systemctl("is-system-running").strip() == "running"


def test_an_upgrade_under_load_is_not_noticed(machine: Machine, deb: Path, newer: Path) -> None:
    packages.install(machine, deb)
    configure(machine)
    workers = pids(machine, *NAMES)
    replaced = pids(machine, "nomarr-supervisor.service")
    # It reads all the time: what a subscriber has not taken is lost with the old supervisor.
    subscriber = Subscriber(str(machine.path(LIVE)), lambda _connection, _piece: None)
    subscriber.wait_for_data(0)

    packages.install(machine, newer)
    assert packages.version_of(machine) == f"installed {NEWER}"
    assert machine.run("nomarrctl", "--version").stdout.strip() == f"nomarrctl {NEWER}"
    assert pids(machine, *NAMES) == workers
    assert pids(machine, "nomarr-supervisor.service") != replaced
    subscriber.wait_for_data(1)
    wait_until_healthy(machine)
    subscriber.close()
    seen = subscriber.frames()
    assert sorted(seen) == [parse_component(name).component_id for name in NAMES]
    for frames in seen.values():
        assert {frame.connection for frame in frames} == {0, 1}, "of the old and of the new one"
        numbers = [frame.seq for frame in frames]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a frame was lost"

    mask(machine, "tag-0")  # by the new controller
    assert pids(machine, "tag-1") == workers[1:]


def test_a_failed_upgrade_leaves_all_as_it_was(machine: Machine, deb: Path, newer: Path) -> None:
    packages.install(machine, deb)
    configure(machine)
    before = packages.version_of(machine)
    workers = pids(machine, *NAMES)

    # The disk of the download was full: the archive ends in the middle of the files.
    cut = machine.path("/root/cut.deb")
    whole = newer.read_bytes()
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    assert machine.run("dpkg", "--install", "/root/cut.deb", check=False).returncode
    assert packages.version_of(machine) == before
    assert pids(machine, *NAMES) == workers
    assert machine.run("dpkg", "--verify", packages.NAME, check=False).stdout in (
        "",
        "??5?????? c /etc/nomarr/nomarr.toml\n",  # configured
    )
    wait_until_healthy(machine)

    packages.install(machine, newer)
    ledger = f"{STATE}/ledger.db"
    set_schema(machine, ledger, 99)
    with pytest.raises(MachineError, match="has schema 99, and this version knows up to 1"):
        packages.install(machine, deb)
    assert packages.version_of(machine) == f"installed {NEWER}"
    set_schema(machine, ledger, 1)
    packages.install(machine, deb)  # a downgrade that the store allows
    assert packages.version_of(machine) == before
    assert pids(machine, *NAMES) == workers
    wait_until_healthy(machine)


def set_schema(machine: Machine, ledger: str, number: int) -> None:
    code = f"import sqlite3; sqlite3.connect({ledger!r}).execute('PRAGMA user_version = {number}')"
    machine.run("/usr/bin/python3", "-c", code)


def test_remove_keeps_and_purge_leaves_nothing(machine: Machine, deb: Path) -> None:
    before = traces(machine)
    packages.install(machine, deb)
    configure(machine)
    mask(machine, "tag-1")
    account = machine.account("tag-1")
    assert account.failure_reason

    machine.run("dpkg", "--remove", packages.NAME)
    assert running_units(machine) == []
    assert machine.run("find", "/proc", "-maxdepth", "1", "-user", "nomarr").stdout == ""
    assert machine.account("tag-1") == account
    assert "tag" in machine.path("/etc/nomarr/nomarr.toml").read_text()

    packages.install(machine, deb)  # configured before, so it runs as after a boot
    machine.wait_until_running("tag-0")
    assert machine.get("tag-1", "LoadState") == "masked"
    assert machine.account("tag-1") == account

    machine.run("nomarrctl", "pause")  # so those that are added do not start
    machine.apply(f'{CONFIG}\n[pool.more]\nworkers = 70\ncommand = ["/bin/true"]\n')
    made = " ".join(traces(machine))
    for name in ("nomarr-portion@more-1.target.d", "nomarr-more-1.slice.d"):
        assert name in made
    machine.run("dpkg", "--purge", packages.NAME)
    assert running_units(machine) == []
    assert traces(machine) == before
    assert machine.get("tag-1", "LoadState") != "masked"

    packages.install(machine, deb)
    assert running_units(machine) == []
    assert "#[pool.tag]" in machine.path("/etc/nomarr/nomarr.toml").read_text()
    configure(machine)
    assert machine.account("tag-1").records == []
