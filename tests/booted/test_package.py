"""The packages themselves: the same twice from the same sources, the test that goes with the
Debian package, python3-arango, and figures.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.support import packages, trees
from tests.support.machine import Machine

USE_ARANGO = """\
import os, subprocess, sys

from nomarr_systemd.store.open import open_store

server = subprocess.Popen(
    [sys.executable, "-m", "tests.arango_standin", "--account", "root:secret"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
port = server.stdout.readline().strip()
os.umask(0o077)
with open("/root/password", "w") as file:
    file.write("secret")
store = open_store(
    f"arangodb://root@127.0.0.1:{port}/_system", "policy", password_file="/root/password"
)
store.insert("meta", {"_key": "worker_enabled", "value": True})
print(store.get("meta", "worker_enabled")["value"])
store.close()
server.stdin.close()
server.wait()
"""


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_the_same_sources_give_the_same_package(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In another directory, another time zone and another language."""
    first: Path = request.getfixturevalue(kind)
    elsewhere = tmp_path / "elsewhere"
    again = packages.build(f"build-{kind}", elsewhere, "--quick", TZ="Asia/Tokyo", LC_ALL="C")
    assert checksum(first) == checksum(again)


def test_the_packages_own_test(machine: Machine) -> None:
    """What autopkgtest would run."""
    script = "/root/life"
    shutil.copy(packages.CHECKOUT / "packaging/debian/tests/life", machine.path(script))
    assert machine.run(script).stdout.endswith("life: fine\n")


def test_arangodb_by_its_own_package(machine: Machine, arango: Path) -> None:
    import_it = ("/usr/bin/python3", "-c", "import arango")
    assert machine.run(*import_it, check=False).returncode  # nobody else needs it
    shutil.copy(arango, machine.path("/root/arango.deb"))
    apt = ("apt-get", "install", "--yes", "--no-install-recommends")
    machine.run(*apt, "/root/arango.deb", timeout_s=120)
    for part in ("tests/__init__.py", "tests/arango_standin"):
        source, place = packages.CHECKOUT / part, machine.path(f"/opt/{part}")
        place.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    machine.path("/root/use.py").write_text(USE_ARANGO)
    environment = f"PYTHONPATH=/opt:{packages.LIBEXEC}"
    said = machine.run("env", environment, "/usr/bin/python3", "/root/use.py").stdout
    assert said == "True\n"


def test_it_pulls_in_little(machine: Machine, tree: Path, deb: Path) -> None:
    pulled = (tree / trees.PULLED).read_text().split()
    size_kb = deb.stat().st_size / 1000
    print(f"{deb.name}: {size_kb:.0f} kB; a minimal system gets {len(pulled)} packages: {pulled}")
    assert size_kb < 500
    assert len(pulled) <= 30
    assert not {"python3-requests", "gcc", "perl", "procps"} & set(pulled)
