"""Every field of every document and of every live answer is poisoned, every verb is run, in text
and as JSON, piped and on a terminal; then the bytes are looked at."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from click import Context

from nomarr_systemd.cli.main import nomarrctl
from nomarr_systemd.core import job
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.shared_archive import parse_host
from nomarr_systemd.live import protocol
from nomarr_systemd.supervisor.workers import Workers
from tests.support.lab import Lab
from tests.support.operator_site import Installation
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

NAME = "worker:tag:0"
WORKER = {
    "component": NAME, "id": 0, "queue_type": "tag", "status": "healthy", "pid": 7,
    "current_job": "a", "phase": "b", "seq": 1, "invocation": "c", "misses": 0, "late": 0,
    "drops": {"json": 1}, "disagreement": "d", "progress_age_s": 1.5, "frame_age_s": 1.5,
    "frames": 1, "metrics": {"files": 1, "note": "h"}, "note": "i",
    "last_crash": {"ts": 1, "error": "e", "worker_index": 0, "invocation": "f", "decision": "g"},
}  # fmt: skip
JOB = {
    "pool": "tag", "path": "/a", "status": "error", "attempts": 1, "component_id": NAME,
    "invocation": "a", "host": "h", "added_wall_ms": 1, "started_wall_ms": 1, "updated_wall_ms": 1,
    "result": {"a": ["b"]}, "error": {"type": "a", "message": "b", "cause": "c"}, "forgiven": 0,
    "crashes": [{"component_id": "a", "invocation": "b", "cause": "c", "wall_ms": 1}],
}  # fmt: skip
HOST = {"_key": "host:a", "name": "a", "lease": "b", "workers": {NAME: {"status": "healthy"}}}
KEPT = ("component", "pool", "status", "topic", "type", "component_id")
EVENTS = "events --topic worker:*:status"
SHOWING = (
    ["status"], ["status", "tag-0"], ["status", "tag-1"], ["why", "tag-0"], ["why", "tag-1"],
    ["events"], ["events", "--topic", "worker:*:status"], ["history"], ["policy", "show"],
    ["policy", "explain", "tag-0"],
    ["policy", "simulate"], ["doctor"], ["jobs", "list"], ["jobs", "show", "tag:poisoned"],
    ["jobs", "show", "tag:odd"], ["jobs", "quarantine", "list"], ["history", "--health", "tag-0"],
    ["why", "tag"],
)  # fmt: skip
DOING = (
    ["jobs", "retry", "tag:poisoned"], ["jobs", "quarantine", "release", "tag:odd"],
    ["jobs", "prune"], ["reconcile"], ["resume", "tag-1"], ["reset", "tag-1"],
    ["reset", "--pool", "tag"], ["restart", "tag-1"], ["pause", "tag-1"], ["apply"],
)  # fmt: skip


@pytest.fixture
def site(lab: Lab) -> Installation:
    """Two workers, one of which has died, with poison wherever anything is read."""
    site = Installation(lab)
    site.bring_up(2)
    site.crash("tag-0")
    site.wait_until_reconciled()
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    poison_answers(lab)
    # The start of a supervisor has everything looked at, and published: until that is over. Its
    # job may still wait, when the service is called inactive as well.
    lab.systemctl("start", "nomarr-reconcile.service")
    poison_ledger(site.state / "public/tag-0.json")
    (site.state / "hold").mkdir(exist_ok=True)
    # The reason is the first line of the file.
    text = f"incident: {FORGED} {POISON}"
    (site.state / "hold/tag-1").write_text(text, errors="replace")
    poison_jobs(site)
    return site


def poison_ledger(path: Path) -> None:
    """One record with poison in what people read, and one with poison in every text but those whose
    words are fixed: with others in their place the account is damaged, and not shown."""
    account = json.loads(path.read_text())
    last = Record.read(account["records"][-1])
    text = POISON.replace("|", "/")
    every = Record._make(text if isinstance(value, str) else value for value in last)
    every = every._replace(action=last.action, effect=last.effect)
    shown = last._replace(text=text, by=text)
    account["records"] = [every.write(), shown.write()]
    path.write_text(json.dumps(account | {"failure_reason": POISON, POISON: POISON}))


def poison_jobs(site: Installation) -> None:
    site.good("jobs", "add", "/a", "--pool", "tag")
    odd = {name: [name] for name in JOB} | {"pool": "tag", "status": "quarantined", "crashes": 5}
    deep: Any = POISON
    for _ in range(500):
        deep = [deep]
    rows = {
        "tag:poisoned": poison(JOB, ("pool", "status")),
        "tag:odd": odd | {"updated_wall_ms": "abc", "path": {"x": POISON}},
        "tag:deep": JOB | {"result": deep, "path": POISON},
        f"tag:{POISON}".encode("utf-8", "replace").decode(): JOB | {"status": "quarantined"},
        "tag:bytes": JOB | {"raw": "5", "path": 7},
    }
    with sqlite3.connect(site.state / "work/work.db") as jobs:
        bodies = {key: json.dumps(doc).replace(HALF, "") for key, doc in rows.items()}
        bodies["tag:half"] = json.dumps(JOB | {"path": POISON})
        for key, body in bodies.items():
            jobs.execute("INSERT INTO jobs VALUES (?, ?, ?)", (key, key[:20], body))
        books = {"crashes": POISON, "failed": {"reason": POISON}, "records": [POISON]}
        jobs.execute(
            "INSERT OR REPLACE INTO stats VALUES ('pool:tag', 'r', ?)", (json.dumps(books),)
        )
    jobs.close()


def make_answers() -> dict[str, Any]:
    worker = poison(WORKER, KEPT)
    frame = json.dumps({"job": POISON, "phase": POISON, POISON: {POISON: POISON}, "seq": POISON})
    status = {"topic": "worker:tag:0:status", "timestamp": 1}
    system = {"status": POISON, "errors": [POISON]}
    now_ms = time.time_ns() // 1_000_000
    rows = [[now_ms, {"h": 1}, 0, 0, 0], [now_ms, {POISON: 1}, POISON, 0, 0]]
    text = POISON.replace("|", "/")  # a bar would begin another field
    record = f"1||reset||0|0|{now_ms}||6|done||0|3|0|20|0||{text}|{text}"
    incident = Incident(
        *("tag", "x", 1, Moment(now_ms, "b" * 32, 1), NAME, (NAME,), ()), closed="x"
    ).to_past_doc()
    incident |= {name: POISON for name, value in incident.items() if isinstance(value, str)}
    incident |= {"pool": "tag", "members": "0", "canary": NAME}
    kept = {"workers": [POISON, "tag-0"], "incidents": [incident, poison(incident)]}
    settled = {"settled": [{"path": "", "status": ""}], "fail_pool": "x", "component_id": ""}
    events = [
        status | {"type": "snapshot", "worker": worker},
        status | {"type": "worker:crash", "cause": POISON, "decision": POISON},
        {"topic": "system:health", "type": POISON, "system": system},
        {"topic": "queue:tag:status", "type": "settled", "outcome": poison(settled)},
        {"topic": "worker:tag:1:status", "type": "frames", "frames": [POISON, {POISON: [POISON]}]},
        {"topic": POISON, "type": POISON},
    ]
    return {
        "snapshot": say({"ok": True, "workers": [worker], "supervisor": poison({"pid": "x"})}),
        "subscribe": say(*events),
        "blackbox": say({"ok": True, "frames": [f"HEALTH|{frame}"] * 3}),
        "label": say({"ok": True, "label": POISON, "job": POISON, "bad_line": POISON}),
        "labels": say({"ok": True, "labels": {POISON: POISON}}),
        "history": say({"ok": True, "workers": {NAME: {"health": rows, "records": [record]}}}),
        "fleet": say({"ok": True, "host": POISON, "now_ms": now_ms, "hosts": [poison(HOST)]}),
        "archive": say({"ok": True, "hosts": {"a": kept, POISON: kept}}),
        "jobs": say({"ok": True, "jobs": [poison(JOB)], "counts": {POISON: POISON}}),
        "*": say({"ok": False, "error": POISON}),
    }


def poison_answers(lab: Lab) -> None:
    file = Path(lab.directory, "answers")
    write_answers(file, make_answers())
    lab.write_unit(
        "nomarr-supervisor.service.d/99-hostile.conf",
        f"[Service]\nWatchdogSec=0\nExecStart=\n"
        f"ExecStart=/usr/bin/python3 {HOSTILE_SUPERVISOR} {file} {lab.paths.live}\n",
    )
    lab.reload()
    lab.systemctl("restart", "nomarr-supervisor.service")


def ctl(site: Installation, *arguments: str, on_terminal: bool = False) -> bytes:
    lab = site.lab
    command = ["nsenter", f"--target={lab.pid}", "--mount", "--", *site.command(*arguments)]
    status, said = run(command, lab.environment, on_terminal=on_terminal)
    assert b"Traceback" not in said, said.decode(errors="replace")
    assert status in (0, 1, 3), (arguments, status, said)
    check(said, arguments, on_terminal=on_terminal)
    return said


def test_nothing_is_left_out() -> None:
    """All fields, all questions and all verbs that there are."""
    said = Workers().add(Component("tag", 0), -1).describe()
    assert said.keys() == WORKER.keys()
    taken = job.begin(job.make_job("tag", "/a", 1), job.Owner("a", "b", "c", "d"), 1)
    assert taken.keys() - JOB.keys() <= {"_key"}
    words = (value for name, value in vars(protocol).items() if name.isupper())
    questions = {word for word in words if isinstance(word, str) and ":" not in word}
    # What root tells the supervisor is answered by a refusal, as everything else.
    assert questions - protocol.ROOT_ONLY == make_answers().keys() - {"*"}
    verbs = {verb[0] for verb in (*SHOWING, *DOING)}
    # For a shell, a private systemd, workers; copies documents as they are.
    assert set(nomarrctl.list_commands(Context(nomarrctl))) - verbs == {
        "completion",
        "demo",
        "job",
        "store",
    }


def test_nothing_that_others_wrote_is_obeyed(site: Installation) -> None:
    shown = {" ".join(verb): ctl(site, *verb) for verb in SHOWING}
    for verb in (["status"], ["why", "tag-0"], ["events"], ["jobs", "list"], ["history"]):
        ctl(site, *verb, on_terminal=True)
    for verb in SHOWING:
        said = ctl(site, *verb, "--json")
        start = re.search(rb"^[\[{]", said, re.MULTILINE)  # after warnings
        assert start is not None, verb
        document = said[start.start() :]
        for line in document.splitlines() if verb[0] == "events" else [document]:
            json.loads(line)
    page = ctl(site, "why", "tag-0", "--html", "-")
    assert b"<script>alert" not in page
    assert b"7*7" in page
    # It was all looked at, and none of it left out.
    for name in ("status tag-0", "status tag-1", "why tag-0", "jobs show tag:poisoned", EVENTS):
        assert FORGED.encode() in shown[name], name
    for verb in DOING:
        ctl(site, *verb)
    journal = site.lab.journal("--output=json", "--identifier=nomarr-controller")
    for entry in map(json.loads, journal.splitlines()):
        assert isinstance(entry["MESSAGE"], str)  # else journalctl shows a list of bytes
        check(entry["MESSAGE"].encode(), "the journal")


def test_what_is_kept_of_other_hosts() -> None:
    """As ``--fleet history`` shows it, which needs a store of several hosts."""
    said = json.loads(make_answers()["archive"]["lines"][0])
    kept = parse_host(said["hosts"]["a"])
    assert [each.instance for each in kept.workers] == ["tag-0"]
    assert kept.incidents
    for each in kept.incidents:
        check(f"{each.kind} {each.canary} {each.closed} {each.text}".encode(), "an incident")


def test_a_view_in_place_of_the_books_spins_nobody(lab: Lab) -> None:
    """What INSTEAD OF triggers take is never written, however often it is tried."""
    site = Installation(lab)
    site.configure(1)
    site.good("apply")
    site.good("jobs", "add", "/a")
    with sqlite3.connect(site.state / "work/work.db") as jobs:
        jobs.executescript(
            "ALTER TABLE stats RENAME TO old;"
            "CREATE VIEW stats AS SELECT 'pool:tag' AS key, 'r' AS rev, '{}' AS body;"
            "CREATE TRIGGER t1 INSTEAD OF UPDATE ON stats BEGIN SELECT 1; END;"
            "CREATE TRIGGER t2 INSTEAD OF INSERT ON stats BEGIN SELECT 1; END;"
        )
    jobs.close()
    status, said = run(
        [
            "nsenter",
            f"--target={lab.pid}",
            "--mount",
            "--",
            *site.command("reset", "--pool", "tag"),
        ],
        lab.environment,
    )
    assert b"Traceback" not in said
    assert status in (0, 1), said
