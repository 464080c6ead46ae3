"""Jobs for any language: real shell workers take jobs by ``nomarrctl job`` under a private systemd,
and one dies in the middle of a job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.job import key_of
from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation

CTL = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
from nomarr_systemd.cli.main import main
sys.exit(main())
"""
# The job: fails for *.bad, kills its worker for poison*, waits for PATH.go for wait*.
WORK = """#!/bin/sh
case $1 in
    *.bad) echo "no such format" >&2; exit 3 ;;
    */poison*) kill -SEGV $PPID; sleep 1000 ;;
    */wait*) while [ ! -e "$1.go" ]; do sleep 0.1; done ;;
esac
cat "$1"
"""
TOML = """
[policy]
backoff_base_s = 0.1
backoff_multiplier = 1
backoff_jitter = 0
max_restarts = 1
max_lifetime_restarts = 1
[health]
staleness_interval_s = 600
[pool.sh]
workers = 2
command = ["{worker}", "{work}"]
crash_policy = "restart-requeue-in-flight"
watchdog_s = 3600
[pool.sh.unit]
Environment = ["NOMARRCTL={ctl}"]
"""


class ShellSite(Installation):
    """Two workers of examples/shell-jobs.sh."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.nomarrctl = lab.write_program("nomarrctl", CTL)
        worker = lab.write_program("jobs.sh", (CHECKOUT / "examples/shell-jobs.sh").read_text())
        work = lab.write_program("work", WORK)
        self.config.write_text(TOML.format(worker=worker, work=work, ctl=self.nomarrctl))
        self.good("apply")
        self.wait_until_healthy("sh-0", "sh-1")
        self.store = SqliteStore(str(self.state), "work")
        self.place = Path(lab.directory, "place")
        self.place.mkdir()

    def add(self, *names: str) -> None:
        for name in names:
            (self.place / name).write_text(f"text of {name}")
        self.good("jobs", "add", *(str(self.place / name) for name in names))

    def wait_for_job(self, name: str, status: str) -> Doc:
        path = str(self.place / name)

        def look() -> Doc | None:
            doc = queue.find(self.store, "sh", path)
            return doc if doc["status"] == status else None

        found = self.lab.wait_for(look, what=f"{name} is {status}")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def site() -> Iterator[ShellSite]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = ShellSite(lab)
        with closing(site.store):
            yield site
    finally:
        lab.end()


def test_jobs_are_done_and_fail(site: ShellSite) -> None:
    site.add("one", "two words", "three.bad")
    assert site.wait_for_job("one", "done")["result"] == "text of one"
    assert site.wait_for_job("two words", "done")["result"] == "text of two words"
    failed = site.wait_for_job("three.bad", "error")
    assert failed["error"]["message"] == "exit status 3: no such format"
    assert (failed["attempts"], site.store.find(CLAIMS, {"pool": "sh"})) == (1, [])


def test_a_worker_dies_in_the_middle_of_a_job(site: ShellSite) -> None:
    site.add("wait-a")
    doc = site.wait_for_job("wait-a", "running")
    instance = doc["component_id"].removeprefix("worker:").replace(":", "-")
    assert doc["invocation"] == site.lab.get(instance, "InvocationID")
    os.kill(site.lab.main_pid(instance), signal.SIGKILL)
    site.lab.wait_for(
        lambda: queue.find(site.store, "sh", doc["path"])["attempts"] == 2, what="a second try"
    )
    (site.place / "wait-a.go").touch()
    done = site.wait_for_job("wait-a", "done")
    assert [each["invocation"] for each in done["crashes"]] == [doc["invocation"]]
    assert done["result"] == "text of wait-a"
    site.good("reset", "--pool", "sh", "--start")
    site.wait_until_healthy("sh-0", "sh-1")


def test_a_job_that_kills_shell_workers_is_quarantined(site: ShellSite) -> None:
    site.add("poison")
    job = site.wait_for_job("poison", "quarantined")
    assert len(job["crashes"]) == 2
    site.wait_until_healthy("sh-0", "sh-1")
    for name in ("sh-0", "sh-1"):
        site.lab.wait_for(
            lambda: site.account(name).restart_count == 0,  # noqa: B023
            what="the restarts are refunded",
        )


def test_what_a_run_has_in_hand_is_its_own(site: ShellSite) -> None:
    """The program itself, as a worker of no unit calls it."""
    site.lab.stop("sh-0", "sh-1")
    site.add("x", "y")
    settings = json.dumps({"store": {"url": f"sqlite://{site.state}"}})

    def call(run: str, *arguments: str, status: int = 0) -> str:
        env = ["env", "NOMARR_COMPONENT_ID=worker:sh:0", f"NOMARR_SETTINGS={settings}"]
        command = [*env, f"INVOCATION_ID={run * 32}", site.nomarrctl, "job", *arguments]
        done = site.lab.run(command, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout

    path = str(site.place / "x")
    assert json.loads(call("a", "take")) == {"id": key_of("sh", path), "path": path, "attempts": 1}
    assert json.loads(call("a", "take"))["path"] == path  # its own, again
    assert call("b", "take", "--path", "--wait", "1") == f"{site.place}/y\n"
    call("c", "take", "--wait", "0.5", status=3)
    call("c", "done", status=4)
    call("a", "done", "--result", "{", status=2)
    call("a", "done", "--result", '{"bpm": 120}')
    call("a", "done", status=4)
    assert site.wait_for_job("x", "done")["result"] == {"bpm": 120}
    call("b", "release")
    assert call("c", "take", "--path") == f"{site.place}/y\n"
    call("c", "fail", "--type", "Odd", "too odd")
    assert site.wait_for_job("y", "error")["error"] == {"type": "Odd", "message": "too odd"}
    outside = site.lab.run([site.nomarrctl, "job", "take"], check=False)
    assert outside.returncode == 78
    assert "not a worker's environment" in outside.stderr
    away = json.dumps({"store": {"url": "sqlite:///dev/null/nomarr"}})
    command = ["env", "NOMARR_COMPONENT_ID=worker:sh:0", f"NOMARR_SETTINGS={away}"]
    lost = site.lab.run(
        [*command, f"INVOCATION_ID={'d' * 32}", site.nomarrctl, "job", "done"], check=False
    )
    assert lost.returncode == 75
