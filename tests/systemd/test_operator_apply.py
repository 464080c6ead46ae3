"""``nomarrctl apply`` against a real systemd: what differs, what is done, what is left."""

from __future__ import annotations

import os
import select
import shutil
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
    "_serve",
    "Manager.reload_unit",
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


def test_apply_shows_the_difference_first(site: Installation) -> None:
    site.configure(2)
    said = site.good("apply", "--dry-run")
    assert "tag: 2 workers to be started: tag-0, tag-1\n" in said
    diff = site.good("apply", "--dry-run", "--diff")
    assert "+ nomarr-worker@tag-0.service.d/20-nomarr.conf and 1 of the same pool\n" in diff
    site.configure(200)
    diff = site.good("apply", "--dry-run", "--diff")
    assert "+ nomarr-portion@tag-0.target.d/20-nomarr.conf and 3 like it\n" in diff
    assert "+ nomarr-tag-0.slice.d/20-nomarr.conf and 3 like it\n" in diff
    assert not site.state.exists()
    site.configure(2)
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


def test_a_worker_that_fails_while_others_start_waits_for_its_restart(site: Installation) -> None:
    """The target, started behind the workers, started it again: a death more, without a backoff."""
    loads = site.lab.write_program("loads", "#!/bin/sh\nexec sleep 1000\n")
    fails = site.lab.write_program("fails", "#!/bin/sh\nexit 1\n")
    site.worker = loads  # apply waits for it, for a while
    site.configure(1, backoff_s=60, more=f'[pool.fails]\ncommand = ["{fails}"]\n')
    site.good("apply")
    assert site.lab.get("nomarr-workers.target", "ActiveState") == "active"
    assert site.lab.get("tag-0", "ActiveState") == "activating"
    [record] = site.lab.wait_for(lambda: site.records("fails-0"), what="it is on record")
    site.lab.wait_until("nomarr-reconcile.service", "inactive")
    assert site.lab.get("fails-0", "InvocationID") == record.invocation
    assert [each.effect for each in site.records("fails-0")] == ["scheduled"]


def test_settings_that_need_no_restart(site: Installation) -> None:
    site.bring_up(1)
    run = site.lab.get("tag-0", "InvocationID")
    site.configure(1, backoff_s=7)
    said = site.good("apply")
    assert "[policy] backoff_base_s: 0.1 → 7\n" in said
    assert "restart" not in said
    assert site.lab.get("tag-0", "InvocationID") == run
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"


def test_scaling_up_and_down_leaves_nothing_behind(site: Installation) -> None:
    site.bring_up(2, backoff_s=60)
    runs = [site.lab.get(name, "InvocationID") for name in ("tag-0", "tag-1")]
    before = files_of(site)
    site.bring_up(10, backoff_s=60)
    # One waits for its restart, one is paused, one masked, one enabled, one stopped.
    died = site.kill("tag-9")
    site.lab.wait_for(lambda: site.account("tag-9").find(died), what="a record")
    site.lab.wait_until("nomarr-restart@tag-9.timer", "active")
    site.good("pause", "tag-8")
    site.lab.systemctl("mask", "--now", "nomarr-worker@tag-7.service")
    site.lab.systemctl("add-wants", "default.target", "nomarr-worker@tag-6.service")
    site.lab.stop("tag-5")
    gone = os.open(Path(site.lab.runtime, "nomarr-supervisor/health/tag-4"), os.O_WRONLY)
    site.configure(2, backoff_s=60)
    document = site.json("apply")
    assert document["workers"]["remove"] == [f"worker:tag:{number}" for number in range(2, 10)]
    poll = select.poll()
    poll.register(gone, select.POLLERR)
    site.lab.wait_for(lambda: poll.poll(0), what="nobody has the pipe open, nor does systemd")
    os.close(gone)
    pipes = Path(site.lab.runtime, "nomarr-supervisor/health")
    site.lab.wait_for(lambda: len(os.listdir(pipes)) == 2, what="the pipes are removed")
    # Their records are kept: they were paused, or died.
    records = site.state / "public/records"
    assert sorted(os.listdir(records)) == ["tag-8", "tag-9"]
    shutil.rmtree(records)
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
    assert "[pool.scan] stop_timeout_s: 90 → 7\n" in said
    assert "scan: 1 worker to be restarted with new settings, after its job: scan-0\n" in said
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
    for arguments in (["apply"], ["apply", "--dry-run"]):
        done = site.ctl(*arguments)
        assert done.returncode == 78
        assert "Invalid memory limit 'lots'" in done.stderr
    missing = '[pool.scan]\ncommand = ["/no/such/program"]\n'
    site.configure(3, more=missing)
    for arguments in (["apply"], ["apply", "--dry-run"]):
        done = site.ctl(*arguments)
        assert done.returncode == 78
        assert "/no/such/program" in done.stderr
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
    command = [sys.executable, "-c", code, "--user", "--config", str(site.config), "apply", "--yes"]
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


def test_killed_while_nothing_runs_yet_the_next_one_starts_all(site: Installation) -> None:
    """The supervisor starts while systemd loads the target with its workers."""
    site.bring_up(2)
    for step in ("_serve", "Manager.start_alone", "Manager.start_and_wait", "_start"):
        site.lab.systemctl("stop", "nomarr-workers.target", "nomarr-supervisor.service")
        apply_killed_at(site, step)
        for name in ("tag-0", "tag-1"):
            assert site.lab.get(name, "ActiveState") == "inactive", step
        site.good("apply")
        site.wait_until_healthy("tag-0", "tag-1")
        assert site.lab.get("nomarr-workers.target", "ActiveState") == "active", step


def test_killed_anywhere_what_is_added_to_a_paused_pool_is_paused(site: Installation) -> None:
    site.bring_up(1)
    site.good("pause", "tag")
    for number, step in enumerate(("_hold_new", "unit_files.install", "_forget"), start=2):
        site.configure(number)
        apply_killed_at(site, step)
        site.good("apply")
        assert site.row(f"tag-{number - 1}")["state"] == "paused", step


def test_a_worker_that_waits_for_another_unit_is_not_waited_for(site: Installation) -> None:
    """That may take for ever; nothing else could be applied meanwhile."""
    site.lab.write_unit("slow.service", "[Service]\nType=oneshot\nExecStart=/bin/sleep infinity\n")
    needs = "[Unit]\nWants=slow.service\nAfter=slow.service\n"
    site.lab.write_unit("nomarr-worker@tag-0.service.d/50-needs.conf", needs)
    site.configure(2)
    site.good("apply")
    site.wait_until_healthy("tag-1")
    assert site.lab.get("slow.service", "ActiveState") == "activating"
    assert site.lab.get("tag-0", "ActiveState") == "inactive"
    site.lab.systemctl("stop", "slow.service")
    site.wait_until_healthy("tag-0")


def reloads(site: Installation) -> int:
    """How often the manager has read its files anew."""
    return sum("Reloading." in line for line in site.lab.journal().splitlines())


def test_nothing_is_reloaded_if_nothing_differs(site: Installation) -> None:
    site.bring_up(2)
    before = reloads(site)
    assert "Nothing differs." in site.good("apply")
    assert reloads(site) == before
    # An apply that was cut off before systemd and the supervisor had read what it wrote.
    site.configure(2, backoff_s=7)
    apply_killed_at(site, "Manager.reload")
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"
    assert reloads(site) == before
    assert "Nothing differs." in site.good("apply")
    assert reloads(site) == before + 1
    # A person has changed a file that systemd has not read yet.
    override = Path(site.lab.units, "nomarr-worker@tag-0.service.d/override.conf")
    override.write_text("[Service]\nNice=1\n")
    site.good("apply")
    assert reloads(site) == before + 2
    # Without its supervisor nothing is in force.
    site.lab.systemctl("stop", "nomarr-supervisor.service")
    site.good("apply")
    assert site.lab.get("nomarr-supervisor.service", "ActiveState") == "active"


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


ON_A_TERMINAL = """\
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
os.write(fd, sys.argv[1].encode() + b"\\n")
try:
    while said := os.read(fd, 4096):
        sys.stdout.write(said.decode())
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
# It goes on with its job for as long as the file is there, and says so to systemd.
SLOW = """\
#!/bin/sh
finish() {{
    while [ -e {keep} ]; do
        systemd-notify EXTEND_TIMEOUT_USEC=20000000; sleep 0.2
    done
    exit 0
}}
trap finish TERM
systemd-notify --ready
while :; do
    printf 'HEALTH|{{"component_id":"%s","status":"healthy"}}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 0.2 & wait $!
done 3>"$NOMARR_HEALTH_PIPE"
"""


def test_it_asks_before_it_removes_workers(site: Installation) -> None:
    site.bring_up(2)
    site.configure(1)
    before = files_of(site)
    for arguments in (["apply"], ["apply", "--json"]):
        done = site.lab.run(site.command(*arguments), check=False)
        assert done.returncode == 1
        assert "1 worker would be stopped and removed with their history: tag-1" in done.stderr
        assert "say --yes" in done.stderr
    assert files_of(site) == before
    for answer, runs in (("n", True), ("y", False)):
        command = [site.python, "-c", ON_A_TERMINAL, answer, *site.command("apply")]
        done = site.lab.run(command, check=False)
        assert "Go on? [y/N]" in done.stdout, done.stdout + done.stderr
        assert done.returncode == (1 if runs else 0)
        assert ("tag-1" in "".join(files_of(site))) == runs


def test_a_worker_that_extends_its_stop_holds_nothing_up(site: Installation) -> None:
    keep = Path(site.lab.directory, "keep")
    keep.touch()
    slow = site.lab.write_program("slow", SLOW.format(keep=keep))
    pool = f'[pool.slow]\nworkers = 2\ncommand = ["{slow}"]\nstop_timeout_s = 5\n'
    site.bring_up(1, more=pool)
    site.wait_until_healthy("slow-0", "slow-1")
    site.configure(2, more=pool.replace("workers = 2", "workers = 1"))
    code = f"import sys; sys.path.insert(0, {site.source!r}); import nomarr_systemd.operate.apply"
    code += " as apply; apply.EXTRA_S = 0.5; from nomarr_systemd.cli.main import main;"
    code += " sys.exit(main())"
    options = ["--user", "--config", str(site.config), "apply", "--yes"]
    done = site.lab.run([site.python, "-c", code, *options], check=False)
    assert done.returncode == 1
    assert "still finishing a job: slow-1; run apply again then" in done.stderr
    assert "nomarrctl: stopping: 0 of 1 (slow-1)" in done.stderr  # through a pipe, too
    site.wait_until_healthy("tag-0", "tag-1", "slow-0")  # the rest was done
    keep.unlink()
    site.lab.wait_until("slow-1", "inactive", "failed")
    site.good("apply")
    assert site.good("apply", "--dry-run") == "Nothing differs.\n"
    assert not [name for name in files_of(site) if "slow-1" in name]


def test_health_of_one_pool(site: Installation) -> None:
    """The supervisor judges each pool by its own rules, and systemd has its start timeout."""
    own = f'[pool.scan]\ncommand = ["{site.worker}"]\n[pool.scan.health]\nframe_interval_s = 0.1\n'
    site.bring_up(1, more=own + "startup_timeout_s = 7\nstaleness_interval_s = 0.3\n")
    site.wait_until_healthy("scan-0")
    times = [site.lab.get(name, "TimeoutStartUSec") for name in ("tag-0", "scan-0")]
    assert times == ["1min", "7s"]
    runs = {name: site.lab.get(name, "InvocationID") for name in ("tag-0", "scan-0")}
    for name in runs:
        os.kill(site.lab.main_pid(name), signal.SIGSTOP)
    site.lab.wait_for(lambda: site.account("scan-0").find(runs["scan-0"]), what="it is stale")
    assert site.records("scan-0")[-1].kind == "stale"
    assert site.lab.get("tag-0", "InvocationID") == runs["tag-0"]
    os.kill(site.lab.main_pid("tag-0"), signal.SIGCONT)
    said = site.good("apply", "--dry-run")
    assert said == "Nothing differs.\n"
    site.configure(1, more=own + "startup_timeout_s = 8\nstaleness_interval_s = 0.3\n")
    said = site.good("apply", "--dry-run")
    assert "[pool.scan.health] startup_timeout_s: 7 → 8\n" in said


OLD_WANTED = {
    ".service": "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n",
    ".socket": "[Socket]\nListenFIFO=%t/wanted-%i\nService=nobody.service\n",
}


@pytest.mark.parametrize("kind", OLD_WANTED)
def test_workers_that_an_older_version_started_are_wanted(site: Installation, kind: str) -> None:
    """Before there was a unit for that, and when it was a service or a socket: of a worker that
    runs, and of one that waits for its restart."""
    site.bring_up(3, backoff_s=60)
    lab = site.lab
    lab.write_unit(f"nomarr-wanted@{kind}", OLD_WANTED[kind])
    lab.write_unit("nobody.service", OLD_WANTED[".service"])
    lab.reload()
    site.kill("tag-1")
    lab.wait_for(lambda: site.records("tag-1"), what="the decision")
    # Without a controller: it would take what follows for a request to stop tag-1.
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    lab.systemctl("start", f"nomarr-wanted@tag-1{kind}")
    lab.stop("tag-2")
    wanted = [f"nomarr-wanted@tag-{number}.target" for number in range(3)]
    lab.systemctl("stop", *wanted)
    assert lab.get("tag-0", "ActiveState") == "active"
    site.configure(4, backoff_s=60)
    site.good("apply")
    states = [lab.get(name, "ActiveState") for name in wanted]
    assert states == ["active", "active", "active"]  # apply has started the last one again
    lab.wait_until(f"nomarr-wanted@tag-1{kind}", "inactive")
    assert site.row("tag-1")["state"] == "restarting"
    lab.stop("tag-1")
    assert site.row("tag-1")["state"] == "stopped"
