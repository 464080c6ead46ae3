"""nomarrctl why, history and events against a real systemd and its journal: one installation in
which every pool has died in its own way.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.demo.lab import LabUnavailable
from tests.support import mortals
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation
from tests.support.poison import HOSTILE_SUPERVISOR, say, write_answers

# Whatever a terminal would obey, but for line breaks.
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture(scope="module")
def graveyard() -> Iterator[Installation]:
    """All of them have died, but for fine-0, and what is decided about them is on record."""
    with_lab = Lab()
    try:
        with_lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = Installation(with_lab)
        site.config.write_text(mortals.write(with_lab))
        site.good("apply")
        site.wait_until_healthy("fine-0", "fine-1")
        died = site.kill("fine-1")
        for name in ("segv-0", "hang-0", "lost-0", "fine-1", "dep-0"):
            with_lab.wait_for(lambda: site.account(name).records, what=f"{name} is decided")  # noqa: B023
        for name in ("raise-0", "conf-0"):
            with_lab.wait_for(
                lambda: with_lab.get(name, "LoadState") == "masked",  # noqa: B023
                what=f"{name} is masked",
            )
        assert site.account("fine-1").find(died)
        for name in ("segv-0", "hang-0", "lost-0", "fine-1", "raise-0", "conf-0"):
            with_lab.wait_for(lambda: is_told(with_lab, name), what=f"{name} is in the journal")  # noqa: B023
        yield site
    finally:
        with_lab.end()


def is_told(lab: Lab, name: str) -> bool:
    """Whether a decision about the worker is in the journal: that comes after the record."""
    component_id = parse_component(name).component_id
    return bool(lab.journal("--quiet", f"NOMARR_COMPONENT_ID={component_id}"))


def ask(site: Installation, *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(site.good("why", *arguments, "--json"))
    assert report["schema"] == "nomarr.why/1"
    return report


def read(site: Installation, *arguments: str) -> str:
    """The text for people; never with anything that a terminal would obey."""
    text = site.good("why", *arguments)
    assert not OBEYED.search(text)
    return text


def test_an_exception(graveyard: Installation) -> None:
    report = ask(graveyard, "raise-0")
    assert (report["death"]["kind"], report["death"]["code"]) == ("exit", 1)
    assert report["trace"]["kind"] == "traceback"
    assert report["trace"]["headline"] == "RuntimeError: cannot go on"
    assert report["trace"]["is_cause"]
    assert report["decision"]["action"] == "fail"
    assert report["state"]["failure_reason"] == "2 restarts within 5 min, the limit is 2"
    # Of a run that is over before journald looks at it, a user's journald may know nothing.
    alike = [record for record in graveyard.account("raise-0").records if record.kind == "exit"]
    assert report["repeats"]["times"] + report["repeats"]["unknown"] == len(alike)
    text = read(graveyard, "raise-0")
    assert text.startswith("worker:raise:0 died: exited with status 1\n")
    assert text.index("Python traceback") < text.index("Decision") < text.index("Journal of this")
    assert "a red line, a bell \\x07 and <script>" in text
    assert "nomarrctl --user reset --start raise-0" in text
    assert report["statistics"] == {
        "total_restarts": 2,
        "restarts_per_hour": 24.0,
        "recoveries": 0,
    }
    often = "2 in all, 2 within 5 min, 24 per hour; it ran stably again 0 times"
    assert re.search(rf"^ *restarts +{often}$", text, re.MULTILINE)


def test_an_older_run(graveyard: Installation) -> None:
    first, *_, last = graveyard.account("raise-0").records
    report = ask(graveyard, "raise-0", "--invocation", first.invocation[:12])
    assert report["death"]["invocation"] == first.invocation
    assert report["decision"]["action"] == "restart"
    assert ask(graveyard, "raise-0")["death"]["invocation"] == last.invocation
    texts = [line["text"] for line in report["journal"]]
    assert sum("Main process exited" in text for text in texts) == 1
    unknown = graveyard.ctl("why", "raise-0", "--invocation", "0" * 32)
    assert unknown.returncode == 4
    assert "Neither the ledger nor the journal knows the run" in unknown.stdout
    bad = graveyard.ctl("why", "raise-0", "--invocation", "xyz")
    assert bad.returncode == 2
    assert "is not an invocation id" in bad.stderr


def test_a_segmentation_fault(graveyard: Installation) -> None:
    report = ask(graveyard, "segv-0")
    assert (report["death"]["kind"], report["death"]["code"]) == ("signal", -11)
    assert report["trace"]["headline"] == "Fatal Python error: Segmentation fault"
    assert any("decode_the_header" in line for line in report["trace"]["lines"])
    assert "killed by SIGSEGV" in read(graveyard, "worker:segv:0")


def test_a_hang(graveyard: Installation) -> None:
    report = ask(graveyard, "hang-0")
    assert report["death"]["kind"] == "watchdog"
    assert report["death"]["job"] == "/music/endless.flac"
    assert report["death"]["progress_age_s"] > 0
    assert report["frames"][-1]["phase"] == "processing"
    stacks = "\n".join(report["trace"]["lines"])
    assert "wait_for_the_gpu" in stacks
    assert "prefetch" in stacks  # every thread's
    text = read(graveyard, "hang-0")
    assert "The stacks of its threads" in text
    assert "progress  the last was" in text
    assert "self.progress()" in text


def test_a_kill_and_a_hostile_job(graveyard: Installation) -> None:
    report = ask(graveyard, "fine-1")
    assert (report["death"]["kind"], report["death"]["code"]) == ("signal", -9)
    name = r"/music/\x1b[31mred\x1b]0;owned\x07\u202e.flac"  # spelled out, as status has it
    assert report["death"]["job"] == name
    assert report["trace"] is None
    text = read(graveyard, "fine-1")
    assert "killed by SIGKILL" in text
    assert f"job       {name}" in text
    assert "now       failed" in text
    assert "restart: restart 1/5 within 5 min, 1/20 in all, after 10 min" in text


def test_a_configuration_that_is_wrong(graveyard: Installation) -> None:
    report = ask(graveyard, "conf-0")
    assert (report["death"]["kind"], report["death"]["code"]) == ("config", 78)
    text = read(graveyard, "conf-0")
    assert "exit status 78 is never restarted" in text
    assert "masked, and stays down until it is reset" in text


def test_a_program_that_cannot_be_executed(graveyard: Installation) -> None:
    report = ask(graveyard, "lost-0")
    assert report["death"]["code"] == 203
    assert report["death"]["never_ran"]
    texts = [line["text"] for line in report["journal"]]
    assert sum("Failed at step EXEC" in text for text in texts) == 1
    text = read(graveyard, "nomarr-worker@lost-0.service")
    assert text.startswith("worker:lost:0 could not be started: exited with status 203")
    assert "[pool.lost]" in text


def test_a_dependency_that_fails(graveyard: Installation) -> None:
    report = ask(graveyard, "dep-0")
    assert report["death"]["kind"] == "dependency"
    assert "it needs broken.service, which is failed" in report["headline"]
    assert report["needs"] == ["broken.service: failed"]
    assert "systemctl --user status broken.service" in read(graveyard, "dep-0")


def test_a_worker_that_never_died(graveyard: Installation) -> None:
    report = ask(graveyard, "fine-0")
    assert (report["verdict"], report["death"]) == ("alive", None)
    assert report["state"]["health"] == "healthy"
    text = read(graveyard, "fine-0")
    assert re.match("worker:fine:0 is running for .*, and no death of it is on record\n", text)
    assert "processing, job" in text, "what it does"
    assert "Its last lines" in text


def test_a_volatile_journal_is_named(graveyard: Installation) -> None:
    assert "lost at a reboot" in read(graveyard, "segv-0")


def test_a_worker_that_is_not_there(graveyard: Installation) -> None:
    done = graveyard.ctl("why", "find-0")
    assert (done.returncode, done.stdout) == (4, "")
    assert "did you mean fine-0?" in done.stderr
    assert graveyard.ctl("why", "\x1b[31m").returncode == 2


def test_a_broken_configuration_is_no_obstacle(graveyard: Installation, tmp_path: Path) -> None:
    whole = graveyard.config.read_text()
    graveyard.config.write_text("[policy\n")
    try:
        assert "killed by SIGSEGV" in graveyard.good("why", "segv-0")
    finally:
        graveyard.config.write_text(whole)


def test_the_page(graveyard: Installation) -> None:
    file = Path(graveyard.lab.directory, "why.html")
    graveyard.good("why", "raise-0", "--html", str(file))
    page = file.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http://" not in page.replace('http-equiv="', "")
    assert not OBEYED.search(page)
    done = graveyard.ctl("why", "raise-0", "--html", "/there/is/no/such/directory/a.html")
    assert done.returncode == 1
    assert "cannot write" in done.stderr


def test_on_a_terminal_it_is_coloured_and_fits(graveyard: Installation) -> None:
    """``script`` gives it a terminal; its colours are all that a terminal is to obey."""
    for columns in (80, 160):
        command = f"stty cols {columns}; exec {_command(graveyard, 'why', 'fine-1')}"
        done = graveyard.lab.run(["script", "-qec", command, "/dev/null"])
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.replace("\r\n", "\n"))
        assert text != done.stdout.replace("\r\n", "\n")
        assert not OBEYED.search(text)
        widest = max(
            len(line) for line in text.splitlines() if not line.startswith("      journalctl")
        )
        assert widest <= columns


def _command(site: Installation, *arguments: str) -> str:
    import shlex
    import sys

    from tests.support.lab import CHECKOUT

    code = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r});"
        "from nomarr_systemd.cli.main import main; sys.exit(main())"
    )
    return shlex.join(
        [sys.executable, "-c", code, "--user", "--config", str(site.config), *arguments]
    )


def test_history(graveyard: Installation) -> None:
    report = json.loads(graveyard.good("history", "--json"))
    assert report["schema"] == "nomarr.history/1"
    found = [(each["component"], each["action"]) for each in report["records"]]
    assert set(found) == {
        ("worker:conf:0", "fail"),
        ("worker:dep:0", "hold"),
        ("worker:fine:1", "restart"),
        ("worker:hang:0", "restart"),
        ("worker:lost:0", "restart"),
        ("worker:raise:0", "fail"),
        ("worker:raise:0", "restart"),
        ("worker:segv:0", "restart"),
    }
    moments = [each["at_ms"] for each in report["records"]]
    assert moments == sorted(moments)
    text = graveyard.good("history", "raise-0", "--limit", "2", "--since", "1h")
    heads, *rows = text.splitlines()
    assert heads.split()[:5] == ["WHEN", "WORKER", "RUN", "HOW", "DECISION"]
    assert [" fail " in row for row in rows] == [False, True]
    assert graveyard.ctl("history", "nope-7").returncode == 4
    assert graveyard.ctl("history", "--since", "soon").returncode == 2
    assert (
        graveyard.good("history", "--since", "2100-01-01") == "Nothing is on record since then.\n"
    )


def test_events_that_are_over(graveyard: Installation) -> None:
    lines = graveyard.good("events", "--json", "--lines", "100").splitlines()
    events = [json.loads(line) for line in lines]
    decided = [each for each in events if each["type"] == "decision"]
    assert {each["topic"] for each in decided} >= {"worker:segv:0:status", "worker:conf:0:status"}
    shown = {each["topic"]: each for each in events if each["type"] == "snapshot"}
    assert shown["worker:fine:0:status"]["worker"]["status"] == "healthy"
    assert shown["system:health"]["system"]["status"] == "error"
    text = graveyard.good("events", "--topic", "worker:fine:*:status")
    assert not OBEYED.search(text)
    assert "worker:fine:0" in text
    assert "worker:segv:0" not in text
    bad = graveyard.ctl("events", "--topic", "Nonsense")
    assert bad.returncode == 2


@contextlib.contextmanager
def follow(site: Installation, *arguments: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events that ``nomarrctl events --follow`` prints."""
    lab = site.lab
    command = _command(site, "events", "--follow", "--json", *arguments)
    # A test that waits in vain is to fail, not to hang; timeout hands on the signal to end.
    shell = ["sh", "-c", f"exec timeout 60 {command}"]
    enter = ["nsenter", f"--target={lab.pid}", "--mount", "--", *shell]
    with subprocess.Popen(
        enter, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as follower:
        try:
            assert follower.stdout is not None
            yield map(json.loads, follower.stdout)
        finally:
            follower.terminate()


def test_events_as_they_come(graveyard: Installation) -> None:
    kinds = []
    with follow(graveyard, "--topic", "worker:conf:0:status") as events:
        for event in events:
            kinds.append(event["type"])
            if event["type"] == "snapshot":
                _tell_supervisor(graveyard, {"op": "reset", "component": "worker:conf:0"})
                _tell_supervisor(graveyard, {"op": "set_failed", "component": "worker:conf:0"})
            if event["type"] == "worker_update":
                break
    assert kinds[-2:] == ["snapshot", "worker_update"]


def _tell_supervisor(site: Installation, request: dict[str, str]) -> None:
    code = (
        "import json, socket, sys\n"
        "with socket.socket(socket.AF_UNIX) as s:\n"
        "    s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode() + b'\\n')\n"
        "    assert json.loads(s.recv(65536))['ok']\n"
    )
    path = f"{site.lab.runtime}/nomarr/live.sock"
    site.lab.run(["/usr/bin/python3", "-c", code, path, json.dumps(request)])


def test_without_the_supervisor(lab: Lab) -> None:
    """A death it never saw, and a journal that still has it all."""
    site = Installation(lab)
    site.configure(1, backoff_s=60)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    died = site.kill()
    lab.wait_for(lambda: site.account().find(died), what="a record")
    lab.wait_for(lambda: is_told(lab, "tag-0"), what="tag-0 is in the journal")
    lab.systemctl("stop", "nomarr-supervisor.service")
    text = read(site, "tag-0")
    assert "worker:tag:0 died: killed by SIGKILL" in text
    assert "The supervisor does not answer" in text
    assert "tag-0: killed by SIGKILL" in site.good("events")  # decisions are in the journal
    done = site.ctl("events", "--topic", "worker:tag:0:status")
    assert done.returncode == 3
    assert "The supervisor does not answer" in done.stderr
    # Those who follow hear of the controller's decisions all the same.
    with follow(site) as events:
        assert any(event["invocation"] == died for event in events)
        lab.start("tag-0")
        died = lab.get("tag-0", "InvocationID")  # without the pipe it may be dead by now
        lab.systemctl("kill", "--signal=KILL", "nomarr-worker@tag-0.service", check=False)
        assert any(event["invocation"] == died for event in events)


def test_a_supervisor_that_answers_too_late(lab: Lab) -> None:
    """It answers the first question, and not the one about frames."""
    site = Installation(lab)
    site.configure(1, backoff_s=60)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    died = site.kill()
    lab.wait_for(lambda: site.account().find(died), what="a record")
    worker = {"component": "worker:tag:0", "status": "crashed"}
    first = say({"topic": "worker:tag:0:status", "worker": worker})
    answers = Path(lab.directory, "answers")
    write_answers(answers, {"subscribe": first, "label": say({"ok": True}), "*": {"hang": True}})
    lab.write_unit(
        "nomarr-supervisor.service.d/99-late.conf",
        "[Service]\nWatchdogSec=0\nExecStart=\n"
        f"ExecStart=/usr/bin/python3 {HOSTILE_SUPERVISOR} {answers} {lab.paths.live}\n",
    )
    lab.reload()
    lab.systemctl("restart", "nomarr-supervisor.service")
    text = read(site, "tag-0")
    assert "worker:tag:0 died: killed by SIGKILL" in text
    note = "The supervisor does not answer in time: frames of the run, or its job, are missing."
    assert note in " ".join(text.split())
    assert "None of this run" not in text


def test_paused_and_masked_by_hand(lab: Lab) -> None:
    site = Installation(lab)
    site.configure(1)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    site.good("pause")
    text = read(site, "tag-0")
    assert text.startswith("worker:tag:0 was stopped, and is held: paused by root")
    assert "held: paused by root (uid 0)" in text
    assert "nomarrctl --user resume tag" in text
    lab.systemctl("mask", "nomarr-worker@tag-0.service")
    assert "it was masked by hand" in read(site, "tag-0")


def test_an_older_death_is_not_blamed(lab: Lab) -> None:
    """For a stop on request, nor for an end that is not on record yet."""
    site = Installation(lab)
    site.bring_up(1, backoff_s=0.1)
    died = site.crash()
    site.wait_until_healthy("tag-0")
    lab.stop("tag-0")
    report = ask(site, "tag-0")
    assert (report["verdict"], report["death"]) == ("stopped", None)
    assert "was stopped: systemd was asked to stop it" in report["headline"]
    text = " ".join(read(site, "tag-0").split())
    assert "Its last death was another one" in text
    assert f"nomarrctl --user why tag-0 --invocation {died[:8]}" in text
    lab.start("tag-0")
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    lab.systemctl("kill", "nomarr-worker@tag-0.service")
    lab.wait_until("tag-0", "inactive")
    report = ask(site, "tag-0")
    assert (report["death"]["kind"], report["death"]["code"]) == ("ended", 0)
    assert report["decision"] is None
    assert [line.split()[2] for line in site.good("history", "tag").splitlines()[1:]] == ["tag-0"]


def test_a_hold_of_somebody_else(lab: Lab) -> None:
    """resume ends no hold that nomarrctl did not write: why names what does."""
    site = Installation(lab)
    site.bring_up(1)
    hold = site.state / "hold" / "tag-0"
    hold.write_text("maintenance of a disk\n")
    site.kill()
    lab.wait_for(lambda: site.records(), what="it is on record")
    assert "is held, and was not paused: nomarrctl doctor tells more" in site.ctl("resume").stdout
    [cure] = [
        each["command"] for each in ask(site, "tag-0")["advice"] if "its hold" in each["text"]
    ]
    lab.run(["sh", "-c", cure])
    site.wait_until_healthy("tag-0")


# Its configuration is wrong until there is a file; stopped in the middle of its work.
MENDED = """\
#!/bin/sh
test -e "$XDG_RUNTIME_DIR/mended" || exit 78
systemd-notify --ready
sleep 1000
"""


def test_a_mask_is_told_by_the_death_that_led_to_it(lab: Lab) -> None:
    """Something has started the worker before it could be masked, as a boot may: the mask stops
    that run, and the end of it is not why the worker is down."""
    site = Installation(lab)
    site.worker = lab.write_program("worker", MENDED)
    site.configure(1)
    template = Path(lab.units, "nomarr-worker@.service")
    site.good("apply", "--dry-run")
    in_the_way = template.with_name("nomarr-worker@tag-0.service")
    lab.write_unit(in_the_way.name, Path(CHECKOUT, "units", template.name).read_text())
    site.good("apply")
    [record] = lab.wait_for(lambda: site.records(), what="it is on record")
    assert (record.kind, record.action, record.effect) == ("config", "fail", "pending")
    told = "failed for good, but not masked: "
    lab.wait_for(lambda: ask(site, "tag-0")["state"]["line"].startswith(told), what="it is told")
    report = ask(site, "tag-0")
    assert report["advice"][-1]["command"] == "nomarrctl --user reset --start tag-0"
    Path(lab.runtime, "mended").touch()

    def starts() -> bool:
        """A mask that is tried again just then cancels the start."""
        lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
        return lab.get("tag-0", "ActiveState") == "active"

    lab.wait_for(starts, what="it runs")
    in_the_way.unlink()
    lab.reload()
    site.ctl("reconcile")
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked", what="the mask")
    lab.wait_until("tag-0", "inactive", "failed")
    report = ask(site, "tag-0")
    assert report["death"] is not None, report["headline"]
    assert (report["death"]["kind"], report["death"]["invocation"]) == (
        "config",
        record.invocation,
    )
    assert report["decision"]["action"] == "fail"
    assert "nomarrctl --user reset --start tag-0" in read(site, "tag-0")
