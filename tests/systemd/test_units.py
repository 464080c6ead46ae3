"""systemd's own opinion of the units: whether it accepts them, and how exposed they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.values import Config
from nomarr_systemd.host.layout import Paths, make_programs, system_paths
from nomarr_systemd.systemd.unit_files import UnitsRefused, find_data, verify

EXPOSURE = {
    "nomarr-wakeup.service": 1.7,
    "nomarr-controller.service": 1.6,
    "nomarr-restart@.service": 1.7,
    "nomarr-pause-end.service": 1.7,
    "nomarr-portions.service": 1.7,
    "nomarr-reconcile.service": 1.6,
    "nomarr-supervisor.service": 1.4,  # CAP_KILL, and a network; 1.0 with SQLite
    "nomarr-web.service": 2.0,
    "nomarr-worker@.service": 2.4,
}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)


@pytest.fixture(params=[False, True], ids=["system", "user"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Paths:
    if request.param:
        return Paths(str(tmp_path / "run"), str(tmp_path / "state"), user=True)
    return system_paths()


@pytest.fixture
def libexec(tmp_path: Path) -> str:
    make_programs(str(tmp_path / "libexec"), search=[])
    return str(tmp_path / "libexec")


def with_pool(*lines: str) -> Config:
    return parse("\n".join(["[pool.tag]", *lines]))


def test_systemd_accepts_every_unit(paths: Paths, libexec: str) -> None:
    config = with_pool(
        "workers = 2",
        'entrypoint = "package.module:Class"',
        '[pool.tag.unit]\nMemoryMax = "4G"\nAfter = ["a.service", "b.service"]\nNice = 5',
        'ProtectHome = true\n[pool.cmd]\ncommand = ["/bin/sh", "-c", "exit"]',
    )
    verify(config, paths, libexec=libexec)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (('command = ["/nowhere/program"]',), ["nomarr-worker@tag-0", "/nowhere/program"]),
        (
            ('command = ["/bin/true"]', "[pool.tag.unit]\nMemoryMaxx = 3"),
            ["nomarr-worker@tag-0.service.d/20-nomarr.conf", "MemoryMaxx"],
        ),
        (
            ('command = ["/bin/true"]', '[pool.tag.unit]\nMemoryMax = "much"'),
            ["nomarr-worker@tag-0.service.d/20-nomarr.conf", "much"],
        ),
    ],
    ids=["program", "directive", "value"],
)
def test_what_systemd_refuses_is_said_in_its_words(
    paths: Paths, libexec: str, lines: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(UnitsRefused) as raised:
        verify(with_pool(*lines), paths, libexec=libexec)
    assert all(word in str(raised.value) for word in words)
    assert "nothing was changed" in raised.value.hint


@pytest.mark.parametrize("unit", EXPOSURE)
def test_the_systems_units_are_closed(unit: str, tmp_path: Path) -> None:
    tree = shutil.copytree(find_data("units"), tmp_path / "units")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", tree / unit],
        capture_output=True,
        text=True,
        check=True,
    )
    overall = re.search(r"Overall exposure level for .*: ([0-9.]+) ", done.stdout)
    assert overall, done.stdout
    print(f"exposure of {unit}: {overall[1]}")
    assert float(overall[1]) <= EXPOSURE[unit], done.stdout


def test_each_sandbox_belongs_to_a_unit() -> None:
    units = Path(find_data("units"))
    assert {path.name.removesuffix(".d") for path in units.glob("*.service.d")} == set(EXPOSURE)
