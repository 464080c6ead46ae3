"""What root reads from unprivileged processes, on a whole system: answers of a supervisor that was
taken over, frames, jobs. Root's programs go on, and no terminal and no journal obeys any of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import STATE, Machine
from tests.support.poison import (
    FORGED,
    HALF,
    HOSTILE_SUPERVISOR,
    POISON,
    check,
    poison,
    run,
    say,
    write_answers,
)

EVIL = "/opt/evil"
ANSWERS = f"{EVIL}/answers"
DROP_IN = "/etc/systemd/system/nomarr-supervisor.service.d/99-taken-over.conf"
TAKEN_OVER = f"""\
[Service]
WatchdogSec=0
ExecStart=
ExecStart=/usr/bin/python3 {EVIL}/hostile_supervisor.py {ANSWERS} /run/nomarr-supervisor/live.sock
"""
CONTROLLER, SUPERVISOR = "nomarr-controller.service", "nomarr-supervisor.service"
# Sends frames of every depth at which a reader deeper in the stack might fail, then lives on.
NESTER = """\
#!/usr/bin/python3
import os, subprocess, time

name = os.environ["NOMARR_COMPONENT_ID"]
pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY)
subprocess.run(["systemd-notify", "--ready"], check=True)
healthy = f'"component_id":"{name}","status":"healthy"'
for depth in (*range(30, 36), *range(300, 340), *range(960, 1000), 1900):
    for begin, end in (("[", "]"), ('{"x":', "}")):
        line = f'HEALTH|{{{healthy},"x":{begin * depth}1{end * depth}}}\\n'.encode()
        if len(line) <= 4096:
            os.write(pipe, line)
            time.sleep(0.002)
while True:
    os.write(pipe, f'HEALTH|{{{healthy},"phase":"processing","job":"all sent"}}\\n'.encode())
    time.sleep(0.2)
"""
CONFIG = f"""\
[policy]
backoff_base_s = 0.1
backoff_jitter = 0
max_restarts = 50

[health]
frame_interval_s = 0.5

[pool.tag]
workers = 2
command = ["{WORKERS}/steady", "0"]

[pool.other]
command = ["{WORKERS}/steady", "0"]
"""
NESTING = f"""
[pool.nest]
command = ["{EVIL}/nester"]
"""
READERS = ("root", "nomarr", "member", "stranger")
LOOKING = (
    ["status"], ["status", "tag-0"], ["why", "tag-0"], ["events"], ["history"],
    ["policy", "explain", "tag-0"], ["jobs", "list"],
)  # fmt: skip


@pytest.fixture(scope="module")
def prepared(machine: Machine) -> Machine:
    machine.run("mkdir", "-p", EVIL)
    shutil.copy(HOSTILE_SUPERVISOR, machine.path(EVIL))
    nester = machine.path(f"{EVIL}/nester")
    nester.write_text(NESTER)
    nester.chmod(0o755)
    groups = "nomarr"
    if machine.run("getent", "group", "nomarr-view", check=False).returncode == 0:
        groups += ",nomarr-view"
    machine.run("useradd", "--groups", groups, "member")
    machine.run("useradd", "stranger")
    machine.apply(CONFIG)
    machine.wait_until_running("tag-0", "tag-1", "other-0")
    return machine


@pytest.fixture
def answers(prepared: Machine) -> Iterator[Path]:
    """The supervisor is taken over; afterwards it is itself again."""
    file = prepared.path(ANSWERS)
    write_answers(file, {})
    prepared.path(DROP_IN).parent.mkdir(exist_ok=True)
    prepared.path(DROP_IN).write_text(TAKEN_OVER)
    reload_supervisor(prepared)
    yield file
    prepared.path(DROP_IN).unlink()
    reload_supervisor(prepared)


def reload_supervisor(machine: Machine) -> None:
    machine.systemctl("daemon-reload")
    machine.systemctl("restart", SUPERVISOR)
    machine.wait_for(
        lambda: machine.get("nomarr-reconcile.service", "ActiveState") == "inactive",
        "everybody was looked at",
    )


def as_user(user: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]


def ctl(machine: Machine, user: str, *arguments: str, on_terminal: bool = False) -> bytes:
    """What nomarrctl says to a user, with nothing in it that is obeyed, and no end but its own."""
    enter = ["nsenter", f"--target={machine.leader}", "--all", "--", "env", "--chdir=/"]
    command = [*enter, *as_user(user), "nomarrctl", *arguments]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    status, said = run(command, environment, on_terminal=on_terminal)
    assert b"Traceback" not in said, said.decode(errors="replace")
    assert status in (0, 1, 3, 4, 77, 78), (user, arguments, status, said)
    check(said, (user, arguments), on_terminal=on_terminal)
    return said


def die(machine: Machine, name: str, answers: Path, says: dict[str, Any]) -> None:
    """A failure while the supervisor says this: it is booked, and the worker runs again."""
    write_answers(answers, says)
    died = machine.kill(name)
    machine.wait_until_running(name, after=died)
    assert machine.account(name).find(died) is not None


@pytest.mark.parametrize(
    "how",
    [{"hang": True}, {"lines": [" " * 9000], "drip": True, "every_s": 0.4}, {"flood": "x" * 9999}],
    ids=["silent", "slow", "endless"],
)
def test_an_answer_that_does_not_end_blocks_nobody(
    prepared: Machine, answers: Path, how: dict[str, Any]
) -> None:
    """Finding 3: the controller decides, the reconciler ends, and people get their answers."""
    die(prepared, "other-0", answers, {"*": how})
    prepared.systemctl("start", "nomarr-reconcile.service")
    assert prepared.get("nomarr-reconcile.service", "Result") == "success"
    for verb in (["status"], ["why", "other-0"], ["events"], ["reset", "other-0"]):
        ctl(prepared, "root", *verb)


def test_events_about_nothing_are_not_waited_for(prepared: Machine, answers: Path) -> None:
    chatter = {"topic": "worker:no:1:status", "type": "x"}
    write_answers(answers, {"*": say(*[chatter] * 9999, every_s=0.1)})
    for verb in (["why", "other-0"], ["events"]):
        ctl(prepared, "root", *verb)


def test_an_answer_of_another_type_ends_no_program(prepared: Machine, answers: Path) -> None:
    """Finding 4."""
    before = prepared.get(CONTROLLER, "NRestarts")
    run = prepared.get("other-0", "InvocationID")
    outcome = {"settled": True, "quarantined": 5, "refund": 5, "fail_pool": 5, "jobs": 5}
    for lie in (
        {"ok": True, "settled": True, "quarantined": 5, "labels": 5},
        {"ok": True, "outcomes": {run: outcome}, "labels": {run: {}}},
        {"ok": True, "outcomes": [outcome], "workers": [1], "labels": [[]]},
    ):
        die(prepared, "other-0", answers, {"*": say(lie)})
        prepared.systemctl("start", "nomarr-reconcile.service")
        assert prepared.get("nomarr-reconcile.service", "Result") == "success"
    assert prepared.get(CONTROLLER, "NRestarts") == before


def test_nobody_is_shown_what_a_terminal_obeys(prepared: Machine, answers: Path) -> None:
    """Findings 10 and 19, for root, the workers' user, a member of the group and a stranger."""
    poison_jobs(prepared)
    worker: dict[str, Any] = {"component": "worker:tag:0", "status": [], "current_job": POISON}
    worker |= {"phase": POISON, "disagreement": POISON, "last_crash": {"error": POISON}}
    event = {"topic": "worker:tag:0:status", "type": POISON, "worker": worker}
    refusal = {"ok": False, "error": POISON}
    write_answers(
        answers,
        {
            "snapshot": say({"ok": True, "workers": [5, [], worker], "supervisor": [POISON]}),
            "subscribe": say(event, {"topic": [], "type": 5}, [POISON], refusal),
            "*": say(refusal),
        },
    )
    for user in READERS:
        for verb in LOOKING if user == "root" else (["status"], ["why", "tag-0"], ["events"]):
            ctl(prepared, user, *verb)
    for verb in (
        ["status", "tag-0"],
        ["events", "--topic", "worker:*:status"],
        ["jobs", "list"],
        ["jobs", "show", "tag:poisoned"],
    ):
        said = ctl(prepared, "root", *verb, on_terminal=True)
        assert FORGED.encode() in said, verb
        ctl(prepared, "root", *verb, "--json")
    ctl(prepared, "root", "reset", "--pool", "tag")


def poison_jobs(machine: Machine) -> None:
    """As any worker can."""
    machine.run("nomarrctl", "jobs", "add", "--pool", "tag", "/music/a.flac")
    job = {
        "pool": "tag", "path": "/a", "status": "quarantined", "attempts": "1", "result": "r",
        "component_id": "c", "updated_wall_ms": "abc", "error": {"type": "t", "message": "m"},
        "crashes": [{"component_id": "a", "invocation": "b", "cause": "c"}],
    }  # fmt: skip
    body = json.dumps(poison(job, ("pool", "status"))).replace(HALF, "")
    insert = (
        f"import sqlite3; db = sqlite3.connect('{STATE}/work/work.db'); body = {body!r};"
        "db.execute(\"INSERT INTO jobs VALUES ('tag:poisoned', 'r', ?)\", (body,)); db.commit()"
    )
    machine.run(*as_user("nomarr"), "python3", "-c", insert)


def test_the_journal_has_lines_of_roots_own_words(prepared: Machine, answers: Path) -> None:
    """What the supervisor calls a job goes into an entry of the controller's, and begins no other
    entry, no other field and no emergency."""
    run = prepared.get("other-0", "InvocationID")
    outcome = {"settled": True, "quarantined": [POISON], "refund": [run], "fail_pool": POISON}
    die(prepared, "other-0", answers, {"*": say({"ok": True, "outcomes": {run: outcome}})})
    prepared.systemctl("start", "nomarr-reconcile.service")

    def read(*terms: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in prepared.journal("--output=json", *terms).splitlines()]

    quarantine = "MESSAGE_ID=6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f07"
    found = prepared.wait_for(lambda: read(quarantine), "the quarantine is in the journal")
    assert all(FORGED in entry["MESSAGE"] for entry in found)
    for entry in read("_UID=0", "SYSLOG_IDENTIFIER=nomarr-controller"):
        assert int(entry["PRIORITY"]) > 1
        for name, value in entry.items():
            assert isinstance(value, str), (name, value)  # else it has bytes that are no text
            assert value.isprintable(), (name, value)
    check(prepared.journal("SYSLOG_IDENTIFIER=nomarr-controller", "--output=cat").encode(), "cat")


def test_a_nested_frame_is_dropped_and_nobody_falls(prepared: Machine) -> None:
    """Finding 7: by a worker on its own pipe, with a subscriber; others try it, too."""
    before = prepared.get(SUPERVISOR, "MainPID")
    prepared.apply(CONFIG + NESTING)
    line = 'HEALTH|{"component_id":"worker:tag:1","status":"healthy","x":' + "[" * 980 + "]" * 980
    for user in READERS[1:]:
        pipe = "/run/nomarr-supervisor/health/tag-1"
        write = f"import os; os.write(os.open({pipe!r}, os.O_WRONLY | os.O_NONBLOCK), {line!r}"
        prepared.run(*as_user(user), "python3", "-c", f"{write}.encode() + b'}}\\n')", check=False)
    for _ in range(3):  # with a subscriber each frame is described
        ctl(prepared, "root", "events", "--topic", "worker:*")
    prepared.wait_for(lambda: prepared.status("nest-0")["job"] == "all sent", "all were sent")
    assert prepared.status("nest-0")["health"] == "healthy"
    assert prepared.get(SUPERVISOR, "MainPID") == before
    assert prepared.get(SUPERVISOR, "NRestarts") == "0"
    prepared.apply(CONFIG)
