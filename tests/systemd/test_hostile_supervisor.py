"""A supervisor that lies, dawdles or floods: failures are booked and workers restarted, whatever it
answers, and a fault about one worker is none of the others'."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.core import account as book
from nomarr_systemd.systemd.manager import SOON
from tests.support.crashes import (
    WORKER,
    account_of,
    kill,
    records_of,
    wait_for_run,
)
from tests.support.lab import Lab
from tests.support.poison import HOSTILE_SUPERVISOR, POISON, WHOLE, say, write_answers

POLICY = "[policy]\nbackoff_base_s = 0\nbackoff_jitter = 0\nmax_restarts = 50\n"
CONTROLLER = "nomarr-controller.service"


@pytest.fixture
def answers(lab: Lab) -> Path:
    """Three workers of ``tag``, one of ``other``, and the hostile program as their supervisor."""
    file = Path(lab.directory, "answers")
    write_answers(file, {})
    lab.write_unit(
        "nomarr-supervisor.service.d/99-hostile.conf",
        f"[Service]\nWatchdogSec=0\nExecStart=\n"
        f"ExecStart=/usr/bin/python3 {HOSTILE_SUPERVISOR} {file} {lab.paths.live}\n",
    )
    path = lab.write_program("worker", WORKER)
    lab.install(
        f'{POLICY}[pool.tag]\nworkers = 3\ncommand = ["{path}", "0"]\nwatchdog_s = 3600\n'
        f'[pool.other]\nworkers = 1\ncommand = ["{path}", "0"]\nwatchdog_s = 3600\n'
    )
    lab.systemctl("start", "nomarr-supervisor.service", "nomarr-controller.socket")
    lab.start("tag-0", "tag-1", "tag-2", "other-0")
    # A start of the supervisor has everybody looked at.
    lab.wait_until("nomarr-reconcile.service", "inactive")
    return file


def asked(answers: Path) -> list[str]:
    try:
        return answers.with_suffix(".asked").read_text().split()
    except FileNotFoundError:
        return []


def outcome(**fields: object) -> dict[str, object]:
    return {"settled": True, "jobs": [], "quarantined": [], "refund": [], "fail_pool": "", **fields}


def test_no_answer_keeps_a_failure_from_its_booking(lab: Lab, answers: Path) -> None:
    def lies(run: str) -> list[dict[str, Any]]:
        return [
            {"labels": say({"ok": True, "labels": 5}), "crashed": say({"ok": True, "outcomes": 5})},
            {"labels": say({"ok": True, "labels": {run: [1]}}), "*": say({"ok": True})},
            {"*": say({"ok": True, "outcomes": {run: outcome(quarantined=5, refund={"a": 1})}})},
            {"*": say({"ok": True, "outcomes": {run: outcome(quarantined=[1], fail_pool=[])}})},
            {"*": say({"ok": True, "outcomes": {run: 5}, "labels": [POISON], "workers": POISON})},
            {"*": say('{"ok":true,"labels":' + "[" * 50_000)},
            {"*": say('{"ok":true,"labels":{"x":' + '{"y":' * 900 + "1" + "}" * 902)},
            {"*": say("no JSON", "5", "null", "[]")},
        ]

    for number in range(len(lies(""))):
        died = lab.get("other-0", "InvocationID")
        write_answers(answers, lies(died)[number])
        kill(lab, "other-0")
        wait_for_run(lab, died, "other-0")
        assert account_of(lab, "other-0").find(died) is not None
    assert lab.get(CONTROLLER, "NRestarts") == "0"
    assert lab.get(CONTROLLER, "Result") == "success"


@pytest.mark.parametrize(
    "how",
    [{"hang": True}, {"lines": [" " * 9000], "drip": True, "every_s": 0.05}, {"flood": "x" * 999}],
    ids=["hang", "drip", "flood"],
)
def test_one_question_without_an_answer_is_the_last(
    lab: Lab, answers: Path, how: dict[str, Any]
) -> None:
    """Deaths of several workers at once cost one timeout, and are booked all the same."""
    lab.systemctl("stop", "nomarr-controller.socket", CONTROLLER)
    write_answers(answers, {"*": how})
    died = {name: kill(lab, name) for name in ("tag-0", "other-0")}
    for name in died:
        lab.wait_until(name, "failed")
        lab.wait_until("nomarr-wakeup.service", "inactive")
    before = asked(answers)
    lab.systemctl("start", "nomarr-reconcile.service")
    assert asked(answers)[len(before) :] == ["labels"]
    for name, run in died.items():
        wait_for_run(lab, run, name)
        assert account_of(lab, name).find(run) is not None
    assert sorted(os.listdir(lab.paths.untold)) == sorted(died.values())  # told when it answers


def test_an_incident_ends_whatever_is_said_of_its_canary(lab: Lab, answers: Path) -> None:
    write_answers(answers, {"*": say({"ok": True, "workers": 5})})
    died = {name: kill(lab, name) for name in ("tag-0", "tag-1", "tag-2")}
    for name, run in died.items():
        wait_for_run(lab, run, name)
    assert lab.get(CONTROLLER, "NRestarts") == "0"


def test_a_fault_about_one_worker_is_none_of_the_others(lab: Lab, answers: Path) -> None:
    """Its account is damaged beyond what anybody expects."""
    write_answers(answers, {"*": say({"ok": True})})
    first = kill(lab, "other-0")
    wait_for_run(lab, first, "other-0")
    lab.systemctl("stop", "nomarr-controller.socket", CONTROLLER)
    with sqlite3.connect(Path(lab.paths.state, "ledger.db")) as ledger:
        body = book.to_doc(account_of(lab, "other-0")) | {"records": ["|" + WHOLE, "1|2|3"]}
        body |= {"k": "many", "window": 5}
        ledger.execute(
            "UPDATE worker_restart_policy SET body = ? WHERE key = 'worker:other:0'",
            (json.dumps(body),),
        )
    ledger.close()
    died = {name: kill(lab, name, signal.SIGUSR1) for name in ("other-0", "tag-1")}
    for name in died:
        lab.wait_until(name, "failed")
        lab.wait_until("nomarr-wakeup.service", "inactive")
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, died["tag-1"], "tag-1")
    assert records_of(lab, "tag-1")[-1].invocation == died["tag-1"]
    said = lab.journal("--identifier=nomarr-controller", "--output=cat")
    assert "this worker is left as it is component=worker:other:0 fault=" in said
    assert SOON in lab.systemctl("list-units", "--state=active")  # it is looked at again
