"""Forty ways to die on a booted system, side by side: ``nomarrctl why`` names cause, job, stack,
decision and next step of each, from a real journald and a real systemd-coredump.

What cannot be shown here, because a container has neither a kernel's log nor the controllers for
memory and processes of its own: a kill for memory, and the kernel's word about TasksMax=. Their
lines are in tests/unit/test_run_log.py as a real kernel wrote them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.installed import WORKERS, write
from tests.support.machine import Machine, unit_of
from tests.support.ways_to_die import PLAIN, POISONED, PYTHON, WAYS, Way, make_config

BROKEN = "[Service]\nType=oneshot\nExecStart=/bin/false\n"
OTHER = "[Service]\nExecStart=/bin/sleep infinity\n"


@pytest.fixture(scope="module", autouse=True)
def graveyard(machine: Machine) -> None:
    write(machine.path(f"{WORKERS}/plain"), PLAIN, 0o755)
    write(machine.path(f"{WORKERS}/lost"), "#!/there/is/no/such/interpreter\n", 0o755)
    write(machine.path(f"{WORKERS}/noexec"), PLAIN, 0o700)  # for root alone; apply looks as root
    write(machine.path(f"{WORKERS}/dying.py"), PYTHON + POISONED)
    write(machine.path("/etc/systemd/system/broken.service"), BROKEN)
    write(machine.path("/etc/systemd/system/other.service"), OTHER)
    machine.apply(make_config())
    machine.run("nomarrctl", "jobs", "add", "--pool", "poison", "/m/bad.flac")
    for way in WAYS:
        if way.signal:
            wait_until_active(machine, way.pool)
            machine.kill(f"{way.pool}-0", way.signal)
    for pool in ("term", "asked", "stubborn", "bound"):
        wait_until_active(machine, pool)
    machine.kill("term-0", "TERM")
    machine.systemctl("stop", "--no-block", unit_of("asked-0"), unit_of("stubborn-0"))
    machine.systemctl("stop", "--no-block", "other.service")


def wait_until_active(machine: Machine, pool: str) -> None:
    name = f"{pool}-0"
    machine.wait_for(lambda: machine.get(name, "ActiveState") == "active", f"{name} runs")


def ask(machine: Machine, name: str) -> dict[str, Any]:
    """The report. ``why`` gives the supervisor a third of a second and says if that was too short:
    forty programs that start and die at once may keep it longer."""

    def look() -> dict[str, Any] | None:
        report: dict[str, Any] = json.loads(machine.run("nomarrctl", "why", name, "--json").stdout)
        is_whole = not any("supervisor does not answer" in note for note in report["notes"])
        return report if is_whole else None

    found = machine.wait_for(look, f"the supervisor has its part in the report on {name}")
    assert found is not None
    return found


def wait_for_decision(machine: Machine, pool: str) -> dict[str, Any]:
    name = f"{pool}-0"
    machine.wait_for(lambda: machine.account(name).records, f"{name} is decided about")
    told = f"NOMARR_COMPONENT_ID=worker:{pool}:0"
    machine.wait_for(lambda: machine.journal("--quiet", told), f"{name} is in the journal")
    return ask(machine, name)


def advice_of(report: dict[str, Any]) -> str:
    return " ".join(f"{each['text']} {each['command']}" for each in report["advice"])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.pool)
def test_it_is_told_rightly(machine: Machine, way: Way) -> None:
    report = wait_for_decision(machine, way.pool)
    death, trace = report["death"], report["trace"]
    assert death["kind"] == way.kind
    if way.kind != "start-timeout":  # how it ended after that does not matter
        assert death["code"] == way.code
    assert way.says in death["line"]
    assert death["job"] == way.job
    if way.stack:
        assert trace["is_cause"]
        assert any(way.stack in line for line in trace["lines"])
    else:
        assert trace is None
    assert report["decision"]["action"] == way.action
    assert way.next in advice_of(report)
    assert "its supervisor is gone" not in report["headline"]
    told = " ".join(machine.run("nomarrctl", "why", f"{way.pool}-0").stdout.split())
    assert death["line"].split(";")[0] in told


def test_frames_have_their_time_and_the_bad_line_is_shown(machine: Machine) -> None:
    """These programs name no invocation in their frames."""
    report = wait_for_decision(machine, "babble")
    assert report["death"]["bad_line"] == "HEALTH|{nonsense} (not one JSON object)"
    frames = wait_for_decision(machine, "sick")["frames"]
    assert {frame["invocation"] for frame in frames} == {
        ask(machine, "sick-0")["death"]["invocation"]
    }
    assert all(frame["received_ms"] > 0 for frame in frames)
    assert re.search(
        r"\d\d:\d\d:\d\d\.\d{3}  unhealthy", machine.run("nomarrctl", "why", "sick").stdout
    )
    assert ask(machine, "sick-0")["death"]["phase"] == "database away"


def test_different_hangs_have_different_fingerprints(machine: Machine) -> None:
    reports = [wait_for_decision(machine, pool) for pool in ("native", "loop", "regex", "locked")]
    assert len({report["fingerprint"] for report in reports}) == len(reports)


def test_what_supervisor_and_frames_said_is_kept(machine: Machine) -> None:
    """The job of a dead run is known after the supervisor was killed."""
    before = wait_for_decision(machine, "hang")
    machine.systemctl("kill", "--signal=KILL", "nomarr-supervisor.service")
    machine.wait_for(lambda: ask(machine, "hang-0")["state"]["health"], "it answers again", 60)
    assert ask(machine, "hang-0")["death"]["job"] == before["death"]["job"] == "/m/a.flac"


@pytest.mark.parametrize(("pool", "how"), [("zero", "status 0"), ("term", "SIGTERM")])
def test_an_end_that_nobody_asked_for(machine: Machine, pool: str, how: str) -> None:
    name = f"{pool}-0"
    machine.wait_for(
        lambda: machine.get(name, "ActiveState") in ("inactive", "failed"), f"{name} ends", 60
    )
    report = wait_for_decision(machine, pool)
    assert (report["verdict"], report["death"]["kind"]) == ("died", "ended")
    assert how in report["death"]["line"]
    assert report["death"]["job"] == "/m/a.flac"
    assert report["decision"]["action"] == "restart"
    assert (
        "[pool.zero.policy]" if pool == "zero" else "A person or a program sent it"
    ) in advice_of(report)


def test_a_stop_that_was_asked_for(machine: Machine) -> None:
    machine.wait_for(lambda: machine.get("asked-0", "ActiveState") != "deactivating", "stopped")
    machine.wait_for(lambda: machine.get("asked-0", "ActiveState") == "inactive", "stopped")
    report = ask(machine, "asked-0")
    assert (report["verdict"], report["death"]) == ("stopped", None)
    assert "systemd was asked to stop it" in report["headline"]


def test_a_stop_with_what_it_is_bound_to(machine: Machine) -> None:
    machine.wait_for(lambda: machine.get("bound-0", "ActiveState") == "inactive", "stopped")
    report = ask(machine, "bound-0")
    assert (report["verdict"], report["death"]) == ("stopped", None)
    assert "was stopped with other.service, which is inactive" in report["headline"]
    assert report["needs"] == ["other.service: inactive"]
    assert f"systemctl start other.service {unit_of('bound-0')}" in advice_of(report)


def test_a_stop_that_took_too_long(machine: Machine) -> None:
    report = wait_for_decision(machine, "stubborn")
    assert report["death"]["kind"] == "stop-timeout"
    assert report["decision"]["action"] == "ignore"
    assert "stop_timeout_s" in advice_of(report)


def test_stuck_but_alive(machine: Machine) -> None:
    """It loads for ever, and extends its time."""
    report = ask(machine, "stuck-0")
    assert report["verdict"] == "alive"
    assert re.search("is starting for .*", report["headline"])
    text = machine.run("nomarrctl", "why", "stuck-0").stdout
    assert "loading model" in text
    assert "It has not said READY=1 yet" in text
    assert report["frames"]


@pytest.mark.parametrize("pool", ["lost", "noexec"])
def test_a_program_that_cannot_be_executed(machine: Machine, pool: str) -> None:
    report = wait_for_decision(machine, pool)
    assert (report["death"]["code"], report["death"]["never_ran"]) == (203, True)
    assert report["decision"]["action"] == "restart"
    assert f"[pool.{pool}]" in advice_of(report)


def test_what_systemd_could_not_read_is_in_the_journal(machine: Machine) -> None:
    report = wait_for_decision(machine, "nofile")
    assert [each.kind for each in machine.account("nofile-0").records] == ["resources"]
    assert any("environment files" in line["text"] for line in report["journal"])


def test_what_it_needed_and_did_not_get_is_named(machine: Machine) -> None:
    machine.wait_for(lambda: machine.get("broken.service", "ActiveState") == "failed", "broken")
    report = wait_for_decision(machine, "need")
    assert (report["death"]["kind"], report["decision"]["action"]) == ("dependency", "hold")
    assert report["needs"] == ["broken.service: failed"]
    assert "systemctl status broken.service" in advice_of(report)


def test_a_job_that_kills(machine: Machine) -> None:
    machine.wait_for(
        lambda: any(each.action == "refund" for each in machine.account("poison-0").records),
        "it is quarantined",
    )
    report = ask(machine, "poison-0")
    assert (report["death"]["kind"], report["death"]["job"]) == ("signal", "/m/bad.flac")
    assert report["trace"]["is_cause"]
    assert any("in process" in line for line in report["trace"]["lines"])
    assert report["decision"]["action"] == "restart"
    assert "quarantine release" in advice_of(report)


def test_a_core_dump(machine: Machine) -> None:
    """The kernel's pattern is the whole machine's and is not changed for a test: systemd-coredump
    is started as the kernel would start it, with a core on its input."""
    machine.run("apt-get", "install", "--yes", "systemd-coredump", "libdw1")
    wait_until_active(machine, "core")
    pid = machine.get("core-0", "MainPID")
    owner = machine.run("stat", "--format=%u %g", f"/proc/{pid}").stdout.split()
    moment = machine.run("date", "+%s").stdout.strip()
    limit = "18446744073709551615"
    arguments = " ".join((pid, *owner, "11", moment, limit, "vm"))
    command = f"head -c 4096 /proc/{pid}/exe | /lib/systemd/systemd-coredump {arguments}"
    machine.run("sh", "-c", command)
    machine.kill("core-0", "SEGV")
    wait_for_decision(machine, "core")
    report = machine.wait_for(
        lambda: (found := ask(machine, "core-0")) and found["coredump"] and found,
        "the entry of systemd-coredump",
    )
    assert report["coredump"]["pid"] == int(pid)
    assert f"coredumpctl info {pid}" in advice_of(report)


def test_nobody_else_can_report_a_core_dump(machine: Machine) -> None:
    """A program can send any MESSAGE_ID and any field, but not those of journald."""
    forged = (
        "MESSAGE_ID=fc2e22bc6ee647b6b90729ab34a250b1\nCOREDUMP_UNIT=nomarr-worker@quiet-0.service\n"
        "COREDUMP_PID=1\nMESSAGE=Process 1 (x) dumped core.\n"
        "_SYSTEMD_SLICE=system-systemd\\x2dcoredump.slice\n"
    )
    wait_for_decision(machine, "quiet")
    machine.path("/root/forged").write_text(forged)
    machine.run("sh", "-c", "logger --journald=/root/forged")
    assert ask(machine, "quiet-0")["coredump"] is None
