"""Each cure that ``nomarrctl doctor`` names is tried: a thing is broken, doctor finds it, the very
command that it printed is run, and doctor is content. All on one installation, one after the other:
a cure that leaves something broken is seen by the next case.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.systemd.manager import RECONCILER
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation

FOREVER = """\
import signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
signal.pause()
"""
UNIT = "nomarr-worker@tag-0.service"


class Patient(Installation):
    """An installation whose cures can be run: ``nomarrctl`` is a program in the lab."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        words = " ".join(map(shlex.quote, self.command()))
        os.makedirs(f"{lab.directory}/bin", exist_ok=True)
        lab.write_program("bin/nomarrctl", f'#!/bin/sh\nexec {words} "$@"\n')

    def examine(self, level: str = "bad") -> list[dict[str, Any]]:
        done = self.ctl("doctor", "--json")
        findings = json.loads(done.stdout)["findings"]
        bad = [each for each in findings if each["level"] == "bad"]
        assert done.returncode == (1 if bad else 0)
        found = [each for each in findings if each["level"] == level]
        return [each for each in found if "a reboot forgets" not in each["text"]]

    def find(self, text: str, level: str = "bad") -> str:
        """The cure of the finding with this text, which there must be."""
        found = self.examine(level)
        cures = [each["mend"] for each in found if text in each["text"]]
        assert cures, f"not found: {text}; only {found}"
        return str(cures[0])

    def cure(self, command: str) -> None:
        path = f"PATH={self.lab.directory}/bin:{os.environ['PATH']}"
        done = self.lab.run(["env", path, "sh", "-c", command], check=False, timeout_s=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def wait_until_well(self) -> None:
        found: list[list[dict[str, Any]]] = []

        def look() -> bool:
            found.append(self.examine())
            return not found[-1]

        try:
            self.lab.wait_for(look, what="doctor is content")
        except AssertionError as error:
            raise AssertionError(f"doctor is not content: {found[-1]}") from error

    def snapshot(self) -> dict[str, tuple[int, int, int, bytes]]:
        """Every file of the state directory: mode, owner, time of its last change, content. Not the
        store of jobs: the supervisor writes the history of health there at any moment."""
        shown = {}
        for path in sorted(self.state.rglob("*")):
            if path.is_relative_to(self.state / "work"):
                continue
            facts = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            shown[str(path)] = (facts.st_mode, facts.st_uid, facts.st_mtime_ns, content)
        return shown


@pytest.fixture(scope="module")
def module_lab() -> Iterator[Lab]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    yield lab
    lab.end()


@pytest.fixture(scope="module")
def patient(module_lab: Lab) -> Patient:
    site = Patient(module_lab)
    site.bring_up(2)
    site.lab.systemctl("enable", "nomarr-workers.target")
    site.wait_until_reconciled()
    site.crash("tag-1")  # the ledger has an account
    site.wait_until_healthy("tag-0", "tag-1")
    site.wait_until_well()
    return site


def freeze_supervisor(site: Patient) -> None:
    os.kill(site.lab.main_pid("nomarr-supervisor.service"), signal.SIGSTOP)


def remove(*parts: str) -> Callable[[Patient], None]:
    """Remove a file or directory: ``{run}``, ``{state}`` and ``{units}`` are known."""

    def act(site: Patient) -> None:
        for part in parts:
            lab = site.lab
            path = part.format(run=lab.runtime, state=site.state, units=lab.units)
            subprocess.run(["rm", "-r", path], check=True)

    return act


def ctl(*arguments: str) -> Callable[[Patient], None]:
    return lambda site: (site.lab.systemctl(*arguments), None)[1]


def add_dropin(*lines: str) -> Callable[[Patient], None]:
    def act(site: Patient) -> None:
        text = "\n".join(("[Service]", *lines, ""))
        site.lab.write_unit("nomarr-worker@.service.d/zz-own.conf", text)
        site.lab.reload()

    return act


def write(place: str, text: str) -> Callable[[Patient], None]:
    def act(site: Patient) -> None:
        path = Path(place.format(run=site.lab.runtime, state=site.state, units=site.lab.units))
        path.write_text(text)

    return act


def mask_by_failing(site: Patient) -> None:
    site.good("reset", "tag-0")
    site.mask("tag-0")


def leave_report(site: Patient) -> None:
    """Of an older run, with nobody told of it."""
    path = f"{site.lab.runtime}/nomarr/pending/{'a' * 32}"
    facts = {"UNIT": UNIT, "INVOCATION_ID": "a" * 32, "SERVICE_RESULT": "signal"}
    facts |= {"EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}
    lines = [f"MONITOR_{name}={value}" for name, value in facts.items()]
    Path(path).write_text("\n".join([*lines, "INSTANCE=tag-0", "END=1", ""]))
    os.utime(path, (1, 1))


def leave_rubbish(site: Patient) -> None:
    path = f"{site.lab.runtime}/nomarr/pending/{'b' * 32}"
    Path(path).write_text("cut off")
    os.utime(path, (1, 1))


def fail_helper(site: Patient) -> None:
    dropin = "nomarr-wakeup.service.d/99-fail.conf"
    site.lab.write_unit(dropin, "[Service]\nRestart=no\nExecStart=\nExecStart=/bin/false\n")
    site.lab.reload()
    site.lab.systemctl("start", "nomarr-wakeup.service", check=False)
    Path(site.lab.units, dropin).unlink()
    site.lab.reload()


def spoil_configuration(site: Patient) -> None:
    """And the reconciler has failed on it."""
    write("{state}/config.json", "rubbish")(site)
    site.lab.systemctl("start", RECONCILER, check=False)
    assert site.lab.get(RECONCILER, "ActiveState") == "failed"


def own_unit_file(site: Patient) -> None:
    """What ``systemctl edit --full`` makes: no mask can be put in its place."""
    text = Path(CHECKOUT, "units", "nomarr-worker@.service").read_text()
    site.lab.write_unit("nomarr-worker@tag-0.service", text)
    site.lab.reload()


def lose_worker(site: Patient) -> None:
    """Down and wanted, and nothing on record."""
    site.lab.systemctl("stop", UNIT)
    site.lab.systemctl("start", "nomarr-wanted@tag-0.target")


@pytest.mark.parametrize(
    ("text", "break_it"),
    [
        ("nomarr-reconcile.timer is inactive", ctl("stop", "nomarr-reconcile.timer")),
        ("nomarr-supervisor.service is inactive", ctl("stop", "nomarr-supervisor.service")),
        ("nomarr-supervisor.socket is inactive", ctl("stop", "nomarr-supervisor.socket")),
        ("nomarr-workers.target is inactive", ctl("stop", "nomarr-workers.target")),
        ("the supervisor does not answer", freeze_supervisor),
        ("no pipe for tag-0", remove("{run}/nomarr-supervisor/health/tag-0")),
        ("failures is not there", remove("{run}/nomarr/failures")),
        ("pending: no failure can be reported", remove("{run}/nomarr/pending")),
        ("tag-0, tag-1: Restart= in", add_dropin("Restart=always")),
        ("tag-0, tag-1: Type= in", add_dropin("Type=simple")),
        ("tag-0, tag-1: WatchdogSec= in", add_dropin("WatchdogSec=0")),
        (
            "files changed that systemd has not read",
            write("{units}/nomarr-worker@tag-0.service.d/override.conf", "[Service]\nNice=1\n"),
        ),
        (
            "the file is not what was applied (1 unit file would change)",
            write(
                "{units}/nomarr-worker@tag-0.service.d/20-nomarr.conf", "# Made by nomarrctl apply"
            ),
        ),
        (
            "the file is not what was applied (1 unit file would change)",
            remove("{units}/nomarr-wakeup.service"),
        ),
        ("the package's unit file is replaced by", own_unit_file),
        ("not executable: nomarr-controller", remove("{state}/libexec/nomarr-controller")),
        ("is masked, and the ledger does not know why", ctl("mask", UNIT)),
        ("1 worker failed for good: tag-0", mask_by_failing),
        ("which nomarrctl did not write", write("{state}/hold/tag-0", "somebody else\n")),
        ("left of workers that are not configured: tag-7", write("{state}/hold/tag-7", "gone\n")),
        ("can be changed by others", lambda site: (site.state / "hold").chmod(0o777)),
        ("work.db", lambda site: (site.state / "work/work.db").chmod(0o400)),
        ("ledger.db is open to others", lambda site: (site.state / "ledger.db").chmod(0o644)),
        ("1 failure waiting to be booked", leave_report),
        ("/pending: ", leave_rubbish),
        ("/spool: ", write("{state}/spool/x.json", "rubbish")),
        ("nomarr-wakeup.service has failed", fail_helper),
        ("config.json", spoil_configuration),
        ("nothing has been applied yet", remove("{state}/config.json")),
        ("down, and nothing will start", lose_worker),
    ],
)
def test_the_cure_works(patient: Patient, text: str, break_it: Callable[[Patient], None]) -> None:
    break_it(patient)
    patient.cure(patient.find(text))
    patient.wait_until_well()
    patient.wait_until_healthy("tag-0", "tag-1")


@pytest.mark.parametrize(
    ("text", "break_it"),
    [
        ("workers are not started at boot", ctl("disable", "nomarr-workers.target")),
        ("1 worker paused: tag-0", lambda site: (site.good("pause", "tag-0"), None)[1]),
        ("1 worker stopped by hand: tag-0", ctl("stop", UNIT)),
        ("could not be read were set aside", write("{state}/spool/y.bad", "rubbish")),
    ],
)
def test_the_cure_of_a_warning_works(
    patient: Patient, text: str, break_it: Callable[[Patient], None]
) -> None:
    break_it(patient)
    assert "All is well" not in patient.ctl("doctor").stdout
    patient.cure(patient.find(text, "warn"))
    assert not [each for each in patient.examine("warn") if text in each["text"]]
    patient.wait_until_healthy("tag-0", "tag-1")


def test_a_ledger_that_is_locked(patient: Patient) -> None:
    path = str(patient.state / "ledger.db")
    with subprocess.Popen(
        [patient.python, "-c", FOREVER, path], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "locked\n"
            cure = patient.find(f"the ledger is locked by {os.path.basename(patient.python)[:6]}")
            assert cure == f"kill {holder.pid}"
        finally:
            holder.terminate()  # the cure, from the namespace in which it is ours to run
    patient.wait_until_well()


def test_a_corrupt_ledger_is_only_looked_at(patient: Patient) -> None:
    path = patient.state / "ledger.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * 3000 + whole[3100:])
    before = patient.snapshot()
    cure = patient.find("the ledger is corrupt")
    assert patient.snapshot() == before
    patient.cure(cure)
    patient.wait_until_well()
    patient.cure(patient.find("a corrupt database was set aside", "warn"))
    assert not [each for each in patient.examine("warn") if "corrupt" in each["text"]]
