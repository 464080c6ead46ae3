"""nomarrctl as an operator uses it, against a real systemd: apply, status, pause, resume, reset."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from tests.systemd.lab import CHECKOUT, Lab

WORKER = """\
#!/bin/sh
trap "exit 0" TERM
systemd-notify --ready
while :; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 0.2 & wait $!
done 3>"$NOMARR_HEALTH_PIPE"
"""
POLICY = """\
[policy]
backoff_base_s = {backoff_s}
backoff_jitter = 0
max_restarts = 2
"""


class Installation:
    """A user's own installation in the lab, configured and run by nomarrctl alone."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.worker = lab.write_program("worker", WORKER)
        self.state = Path(lab.home, ".local/state/nomarr")
        self.config = Path(lab.directory, "nomarr.toml")

    def configure(self, workers: int, *, backoff_s: float = 0.1, more: str = "") -> None:
        self.config.write_text(
            POLICY.replace("{backoff_s}", str(backoff_s))
            + f'[pool.tag]\nworkers = {workers}\ncommand = ["{self.worker}"]\n'
            + f"watchdog_s = 3600\n{more}"
        )

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.path.insert(0, {str(CHECKOUT)!r});"
            "from nomarr_systemd.cli.main import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", code, "--user", "--config", str(self.config)]
        return self.lab.run([*command, *arguments], check=False)

    def good(self, *arguments: str) -> str:
        done = self.ctl(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, dict[str, str]]:
        rows = json.loads(self.ctl("status", "--json").stdout)
        return {row["component"]: row for row in rows}

    def account(self, instance: str = "tag-0") -> Account:
        try:
            text = (self.state / "public" / f"{instance}.json").read_text()
        except FileNotFoundError:
            return Account("worker:none:0")
        return book.from_doc(json.loads(text))

    def wait_until_healthy(self, *instances: str) -> None:
        wanted = {f"worker:{name.replace('-', ':')}" for name in instances}

        def look() -> bool:
            rows = self.status()
            return all(rows[name]["health"] == "healthy" for name in wanted)

        self.lab.wait_for(look, what=f"{wanted} are healthy", timeout_s=30)

    def kill(self, instance: str = "tag-0") -> str:
        died = self.lab.get(instance, "InvocationID")
        os.kill(self.lab.main_pid(instance), signal.SIGKILL)
        return died


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def test_apply_brings_workers_up_and_status_shows_them(site: Installation) -> None:
    site.configure(2)
    said = site.good("apply")
    assert "+ nomarr-worker@tag-1.service.d/20-nomarr.conf" in said
    site.wait_until_healthy("tag-0", "tag-1")
    rows = site.status()
    assert rows["worker:tag:0"] == {
        "component": "worker:tag:0",
        "unit": "active",
        "health": "healthy",
        "job": "-",
        "window": "0/2",
        "lifetime": "0/20",
        "next": "-",
        "last": "-",
    }
    assert site.ctl("status").returncode == 0
    assert "Nothing differs." in site.good("apply")


def test_scaling_restarts_nobody_and_leaves_nothing_behind(site: Installation) -> None:
    site.configure(1)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    run = site.lab.get("tag-0", "InvocationID")
    site.configure(4)
    said = site.good("apply", "--dry-run")
    assert "+ nomarr-worker@tag-3.service.d/20-nomarr.conf" in said
    assert site.lab.get("tag-3", "ActiveState") == "inactive"
    site.good("apply")
    site.wait_until_healthy("tag-0", "tag-1", "tag-2", "tag-3")
    site.configure(1)
    said = site.good("apply")
    assert "worker:tag:3 is stopped and removed" in said
    assert site.lab.get("tag-0", "InvocationID") == run
    assert site.lab.get("tag-3", "ActiveState") == "inactive"
    left = [str(path) for path in Path(site.lab.units).rglob("*tag-3*")]
    assert left == []
    pipes = Path(site.lab.runtime, "nomarr-supervisor", "health")
    site.lab.wait_for(lambda: os.listdir(pipes) == ["tag-0"], what="the pipes are removed")


def test_only_what_changed_is_restarted(site: Installation) -> None:
    scan = f'[pool.scan]\ncommand = ["{site.worker}"]\n'
    site.configure(1, more=scan)
    site.good("apply")
    site.wait_until_healthy("tag-0", "scan-0")
    runs = {name: site.lab.get(name, "InvocationID") for name in ("tag-0", "scan-0")}
    site.configure(1, more=scan + "stop_timeout_s = 7\n")
    said = site.good("apply")
    assert "+TimeoutStopSec=7s" in said
    site.wait_until_healthy("tag-0", "scan-0")
    assert site.lab.get("tag-0", "InvocationID") == runs["tag-0"]
    assert site.lab.get("scan-0", "InvocationID") != runs["scan-0"]


def test_a_mistake_changes_nothing(site: Installation) -> None:
    site.configure(1)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    before = {path: path.read_bytes() for path in Path(site.lab.units).rglob("*.conf")}
    site.configure(3, more="watchdog = 3\n")
    done = site.ctl("apply")
    assert done.returncode == 78
    assert "did you mean watchdog_s?" in done.stderr
    site.configure(3, more='[pool.tag.unit]\nMemoryMax = "lots"\n')
    done = site.ctl("apply")
    assert done.returncode == 1
    assert "Invalid memory limit 'lots'" in done.stderr
    assert {path: path.read_bytes() for path in Path(site.lab.units).rglob("*.conf")} == before


def test_pause_and_resume(site: Installation) -> None:
    site.configure(2)
    site.good("apply")
    site.wait_until_healthy("tag-0", "tag-1")
    assert "2 workers are paused" in site.good("pause")
    for name in ("tag-0", "tag-1"):
        assert site.lab.get(name, "ActiveState") == "inactive"
    # Not even by hand: the condition of the unit looks for the hold.
    site.lab.systemctl("start", "nomarr-worker@tag-0.service")
    assert site.lab.get("tag-0", "ActiveState") == "inactive"
    site.good("pause")
    assert "2 workers were started" in site.good("resume")
    site.wait_until_healthy("tag-0", "tag-1")
    assert "0 workers were started" in site.good("resume")
    assert site.account().restart_count == 0


def test_a_pause_cancels_a_backoff_and_keeps_the_counts(site: Installation) -> None:
    site.configure(1, backoff_s=30)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    died = site.kill()
    timer = "nomarr-restart@tag-0.timer"
    site.lab.wait_until(timer, "active")
    site.lab.wait_for(lambda: site.account().find(died), what="a record")
    assert site.status()["worker:tag:0"]["next"].startswith("in ")
    site.good("pause", "tag")
    assert site.lab.get(timer, "ActiveState") == "inactive"
    site.good("resume", "tag")
    site.wait_until_healthy("tag-0")
    assert site.account().restart_count == 1


def test_reset_unmasks_and_does_not_start(site: Installation) -> None:
    site.configure(1)
    site.good("apply")
    for _ in range(3):
        site.lab.wait_until("tag-0", "active")
        died = site.kill()

        def moved_on(died: str = died) -> bool:
            shown = site.lab.show("tag-0", "LoadState", "InvocationID")
            return shown["LoadState"] == "masked" or shown["InvocationID"] != died

        site.lab.wait_for(moved_on, what="it is restarted or masked")
    site.lab.wait_for(lambda: site.lab.get("tag-0", "LoadState") == "masked", what="the mask")
    row = site.status()["worker:tag:0"]
    assert (row["unit"], row["next"]) == ("masked", "2 restarts within 5 min, the limit is 2")
    assert site.ctl("status").returncode == 3
    assert site.good("reset", "worker:tag:0") == "worker:tag:0 was reset.\n"
    assert site.lab.get("tag-0", "ActiveState") == "inactive"
    assert site.account().restart_count == 0
    assert site.good("reset", "tag-0", "--start") == "worker:tag:0 was reset and started.\n"
    site.wait_until_healthy("tag-0")


@pytest.mark.parametrize("verb", ["reset", "pause"])
def test_a_worker_or_pool_that_is_not_there(site: Installation, verb: str) -> None:
    site.configure(1)
    done = site.ctl(verb, "nope-0" if verb == "reset" else "nope")
    assert done.returncode == 4
    assert "nope" in done.stderr


def test_without_the_supervisor_status_shows_the_rest(site: Installation) -> None:
    site.configure(1)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    site.lab.systemctl("stop", "nomarr-supervisor.service")
    said = site.ctl("status").stdout
    assert "The supervisor does not answer" in said
    assert "worker:tag:0" in said
