"""The lab itself: gone without a trace, and clear about what it lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nomarr_systemd.demo import cgroup
from nomarr_systemd.demo.lab import sweep
from tests.support.capabilities import needs_root
from tests.support.lab import CHECKOUT, Lab
from tests.support.users import NOBODY

STRAY = "[Service]\nExecStart=/bin/sh -c 'setsid sleep 1000 & exec sleep 1000'\nRestart=always\n"
KILLED = """
import os, signal
from nomarr_systemd.demo.lab import Lab
with Lab() as lab:
    print(lab.directory, lab.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
AS_A_PLAIN_USER = f"""
import os
from nomarr_systemd.demo.lab import Lab, LabUnavailable
os.setuid({NOBODY})
try:
    Lab().begin()
except LabUnavailable as error:
    print(error)
"""


def cgroups_of(text: str) -> list[str]:
    return [
        os.path.join(parent, name)
        for parent in cgroup.find_hierarchies()
        for name in os.listdir(parent)
        if text in name
    ]


def pids_in(procs: list[Path]) -> set[str]:
    return {pid for path in procs for pid in path.read_text().split()}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )


def test_it_starts_and_leaves_nothing(any_lab: Lab) -> None:
    """A second lab, beside the fixture's: they do not see each other."""
    begun = time.monotonic()
    with Lab(uid=any_lab.uid) as lab:
        print(f"started in {(time.monotonic() - begun) * 1000:.0f} ms")
        lab.write_unit("stray.service", STRAY)
        lab.systemctl("start", "stray.service")
        group = lab.get("stray.service", "ControlGroup").rpartition("/manager/")[2]
        places = cgroups_of(f"-{lab.directory.rpartition('-')[2]}")
        procs = [Path(place, "manager", group, "cgroup.procs") for place in places]
        lab.wait_for(lambda: len(pids_in(procs)) == 2, what="both processes")
        pids = pids_in(procs)
        directory = lab.directory
        assert "stray" not in any_lab.systemctl("list-units", "--all")
    assert not os.path.exists(directory)
    assert not [place for place in places if os.path.exists(place)]
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}") or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_what_a_killed_owner_left_is_swept_up(any_lab: Lab) -> None:
    done = run_python(KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    directory, pid = done.stdout.split()
    name = f"-{directory.rpartition('-')[2]}"
    assert cgroups_of(name)
    sweep()
    assert not cgroups_of(name)
    assert not os.path.exists(f"/proc/{pid}") or " Z " in Path(f"/proc/{pid}/stat").read_text()
    assert not os.path.exists(directory)


def test_a_container_that_sees_its_hosts_cgroups_leaves_their_labs_alone(lab: Lab) -> None:
    sweeping = "from nomarr_systemd.demo.lab import sweep; sweep(); print('swept')"
    container = ("unshare", "--pid", "--fork", "--mount-proc", "--")
    done = subprocess.run(
        [*container, sys.executable, "-c", sweeping],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "swept\n", done.stderr
    assert lab.get("basic.target", "ActiveState") == "active"


@needs_root
def test_what_is_missing_is_named(lab: Lab) -> None:
    done = run_python(AS_A_PLAIN_USER)
    assert done.stdout.startswith("root is missing: a private systemd needs"), done.stderr


def test_it_has_a_journal_of_its_own(any_lab: Lab) -> None:
    any_lab.write_unit("said.service", "[Service]\nType=oneshot\nExecStart=/bin/echo a word\n")
    any_lab.systemctl("start", "said.service")
    any_lab.wait_for(lambda: "a word" in any_lab.journal("--output=cat"), what="the word")
    assert "said.service" in any_lab.systemctl("status", "said.service", check=False)
