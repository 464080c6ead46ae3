"""``nomarrctl apply`` against a real systemd: what differs, what is done, what is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation

# Where apply is killed: before the first call of each.
STEPS = (
    "unit_files.install",
    "leftovers.remove_files",
    "Manager.reload",
    "Manager.reload_or_start",
    "_wait_for_pipes",
    "_restart",
    "_start",
)


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def files_of(site: Installation) -> dict[str, str]:
    """Everything that a worker may leave, but for the marks of stops, which age."""
    lab = site.lab
    found = {}
    places = [Path(lab.units), site.state / "hold", site.state / "public"]
    for place in (*places, Path(lab.runtime, "nomarr-supervisor/health")):
        for path in place.rglob("*"):
            text = path.read_text() if path.is_file() and path.parent != places[2] else ""
            found[str(path)] = text
    units = lab.systemctl("list-units", "--all", "--plain", "--no-legend", "nomarr-*@*")
    found |= {name: "" for name in units.split() if name.startswith("nomarr-worker@")}
    found |= {name: "" for name in units.split() if name.startswith("nomarr-restart@")}
    return found


def descriptors(site: Installation) -> int:
    return int(site.lab.get("nomarr-supervisor.service", "NFileDescriptorStore"))


def test_apply_shows_the_difference_first(site: Installation) -> None:
    site.configure(2)
    said = site.good("apply", "--dry-run")
    assert "+ nomarr-worker@tag-1.service.d/20-nomarr.conf" in said
    assert "worker:tag:1: to be started" in said
    assert not site.state.exists()
    site.good("apply")
    site.wait_until_healthy("tag-0", "tag-1")
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"
    assert "Nothing differs." in site.good("apply")
    site.configure(1, more="stop_timeout_s = 7\n")
    document = site.json("apply", "--dry-run")
    assert document["applied"] is False
    assert document["files"]["add"] == []
    assert document["files"]["remove"] == ["nomarr-worker@tag-1.service.d/20-nomarr.conf"]
    diff = document["files"]["change"]["nomarr-worker@tag-0.service.d/20-nomarr.conf"]
    assert "-TimeoutStopSec=90s\n+TimeoutStopSec=7s" in diff
    assert document["workers"] == {
        "remove": ["worker:tag:1"],
        "restart": ["worker:tag:0"],
        "start": [],
    }
    assert site.json("apply")["applied"] is True
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"


def test_settings_that_need_no_restart(site: Installation) -> None:
    site.bring_up(1)
    run = site.lab.get("tag-0", "InvocationID")
    site.configure(1, backoff_s=7)
    said = site.good("apply")
    assert "take effect without a restart" in said
    assert site.lab.get("tag-0", "InvocationID") == run
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"


def test_scaling_up_and_down_leaves_nothing_behind(site: Installation) -> None:
    site.bring_up(2, backoff_s=60)
    runs = [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")]
    before, kept = files_of(site), descriptors(site)
    site.bring_up(10, backoff_s=60)
    # One waits for its restart, one is paused, one masked, one enabled, one stopped.
    died = site.kill("tag-9")
    site.lab.wait_for(lambda: site.account("tag-9").find(died), what="a record")
    site.lab.wait_until("nomarr-restart@tag-9.timer", "active")
    site.good("pause", "tag-8")
    site.lab.systemctl("mask", "--now", "nomarr-worker@tag-7.service")
    site.lab.systemctl("add-wants", "default.target", "nomarr-worker@tag-6.service")
    site.lab.stop("tag-5")
    assert descriptors(site) == kept + 8
    site.configure(2, backoff_s=60)
    document = site.json("apply")
    assert document["workers"]["remove"] == [f"worker:tag:{number}" for number in range(2, 10)]
    site.lab.wait_for(lambda: descriptors(site) == kept, what="the descriptors are let go")
    pipes = Path(site.lab.runtime, "nomarr-supervisor/health")
    site.lab.wait_for(lambda: len(os.listdir(pipes)) == 2, what="the pipes are removed")
    assert files_of(site) == before
    assert [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")] == runs
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"


def test_only_what_changed_is_restarted(site: Installation) -> None:
    scan = f'[pool.scan]\ncommand = ["{site.worker}"]\n'
    site.bring_up(1, more=scan)
    site.wait_until_healthy("scan-0")
    runs = {name: site.lab.get(name, "InvocationID") for name in ("tag-0", "scan-0")}
    site.configure(1, more=scan + "stop_timeout_s = 7\n")
    said = site.good("apply")
    assert "+TimeoutStopSec=7s" in said
    assert "restarted: worker:scan:0" in said
    site.wait_until_healthy("tag-0", "scan-0")
    assert site.lab.get("tag-0", "InvocationID") == runs["tag-0"]
    assert site.lab.get("scan-0", "InvocationID") != runs["scan-0"]


def test_a_mistake_changes_nothing(site: Installation) -> None:
    site.bring_up(1)
    before = files_of(site)
    site.configure(3, more="watchdog = 3\n")
    done = site.ctl("apply")
    assert done.returncode == 78
    assert "did you mean watchdog_s?" in done.stderr
    site.configure(3, more='[pool.tag.unit]\nMemoryMax = "lots"\n')
    done = site.ctl("apply")
    assert done.returncode == 1
    assert "Invalid memory limit 'lots'" in done.stderr
    assert files_of(site) == before
    assert site.row()["state"] == "healthy"


def test_a_backoff_and_a_pause_survive_an_apply(site: Installation) -> None:
    site.bring_up(2, backoff_s=60)
    died = site.kill("tag-0")
    site.lab.wait_for(lambda: site.account("tag-0").find(died), what="a record")
    site.lab.wait_until("nomarr-restart@tag-0.timer", "active")
    site.good("pause", "tag-1")
    site.configure(3, backoff_s=60)
    site.good("apply")
    site.wait_until_healthy("tag-2")
    assert site.lab.get("tag-0", "ActiveState") == "failed"
    assert site.lab.get("tag-1", "ActiveState") == "inactive"
    assert site.lab.get("nomarr-restart@tag-0.timer", "ActiveState") == "active"


def apply_killed_at(site: Installation, step: str) -> None:
    """Run apply, and have it killed before a step."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "from nomarr_systemd.operate import apply\n"
        f"def die(*a, **k): os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        f"apply.{step} = die\n"
        "from nomarr_systemd.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "--user", "--config", str(site.config), "apply"]
    assert site.lab.run(command, check=False).returncode == -signal.SIGKILL


def test_killed_anywhere_the_next_one_completes_it(site: Installation) -> None:
    site.bring_up(2)
    for number, step in enumerate(STEPS):
        workers = 3 - number % 2
        names = [f"tag-{each}" for each in range(workers)]
        runs = [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")]
        site.configure(workers, more=f"stop_timeout_s = {10 + number}\n")
        apply_killed_at(site, step)
        site.good("apply")
        site.wait_until_healthy(*names)
        now = [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")]
        assert not set(runs) & set(now), f"not restarted after a kill at {step}"
        assert site.good("apply", "--dry-run") == "Nothing differs.\n", step
        traces = [path for path in files_of(site) if "tag-" in path]
        assert all(any(name in path for name in names) for path in traces), (step, traces)
        pipes = os.listdir(Path(site.lab.runtime, "nomarr-supervisor/health"))
        assert sorted(pipes) == names
        assert not (site.state / "apply.json").exists()


def test_two_at_once(site: Installation) -> None:
    site.bring_up(1)
    code = (
        "import fcntl, subprocess, sys\n"
        f"held = open({str(site.state / 'apply.lock')!r})\n"
        "fcntl.flock(held, fcntl.LOCK_EX)\n"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
    )
    site.configure(2)
    command = [sys.executable, "-c", code, *site.command("apply")]
    done = site.lab.run(command, check=False)
    assert done.returncode == 1
    assert "another nomarrctl apply is running" in done.stderr
    assert site.lab.get("tag-1", "ActiveState") == "inactive"


def test_a_controller_that_runs_decides_by_the_new_policy(site: Installation) -> None:
    site.bring_up(1)
    site.crash()
    assert site.records()[-1].window_limit == 2
    assert site.lab.get("nomarr-controller.service", "ActiveState") == "active"
    text = site.config.read_text().replace("max_restarts = 2", "max_restarts = 7")
    site.config.write_text(text)
    site.good("apply")
    site.crash()
    assert site.records()[-1].window_limit == 7


def test_a_store_that_others_could_replace_is_refused(site: Installation) -> None:
    """Before anything is changed, and by doctor in the same words: security finding 2."""
    site.configure(1)
    site.good("apply")
    place = Path(site.lab.directory, "store")
    place.mkdir()
    place.chmod(0o777)
    os.chown(place, site.lab.uid, -1)
    site.configure(1, more=f'[store]\nurl = "sqlite://{place}"\n')
    before = (site.state / "config.json").read_text()
    done = site.ctl("apply")
    assert done.returncode == 1
    assert f"could be replaced by others: others than its owner may write {place}" in done.stderr
    assert f"chmod go-w {place}" in done.stderr
    assert (site.state / "config.json").read_text() == before
    assert list(place.iterdir()) == []
    site.state.chmod(0o777)
    said = site.ctl("doctor").stdout
    assert f"could be replaced by others: others than its owner may write {site.state}" in said
    site.state.chmod(0o755)


def test_names_do_not_come_from_pipes(site: Installation) -> None:
    """Whoever may write there could name more than fit into a command: security finding 15."""
    site.configure(1)
    site.good("apply")
    health = Path(site.lab.runtime, "nomarr-supervisor/health")
    for number in range(1, 2000):
        os.mkfifo(health / f"other-{number}")
    assert site.json("apply", "--dry-run")["workers"]["remove"] == []
    site.good("apply")
