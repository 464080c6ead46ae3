"""``nomarrctl status`` against a real systemd: table, details, JSON, and the screen that stays."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unicodedata import east_asian_width

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation

# A job's name as a hostile file has it: it clears the screen, is long, and wide.
HOSTILE = """\
#!/bin/sh
trap "exit 0" TERM
systemd-notify --ready
while :; do
    printf '%s%s%s\\n' 'HEALTH|{"component_id":"' "$NOMARR_COMPONENT_ID" \
        '","status":"healthy","phase":"processing","job":"\\u001b[2J\\u202e龍龍龍龍龍龍 of a \
long name that goes on and on and on and on and on and on and on.flac"}' >&3
    sleep 0.2 & wait $!
done 3>"$NOMARR_HEALTH_PIPE"
"""
SILENT = """\
#!/bin/sh
systemd-notify --ready
exec sleep 1000
"""
HASTY = """\
[health]
frame_interval_s = 0.1
staleness_interval_s = 0.5
"""


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def room(line: str) -> int:
    """The columns that a line takes."""
    return sum(2 if east_asian_width(sign) in "WF" else 1 for sign in line)


def test_a_damaged_account_is_not_an_empty_one(site: Installation) -> None:
    site.bring_up(2)
    site.crash("tag-0")
    site.wait_until_healthy("tag-0")
    assert site.row()["window"]["used"] == 1
    public = site.state / "public" / "tag-0.json"
    public.write_text(public.read_text()[:100])
    row = site.row()
    assert "are damaged" in row["ledger_problem"]
    assert (row["window"]["used"], row["lifetime"]["used"]) == (None, None)
    assert site.row("tag-1")["ledger_problem"] is None
    shown = site.good("status")
    assert "?/2" in shown
    assert f"tag-0: The ledger's records in {public} are damaged" in shown
    assert "Ledger: The ledger's records" in site.good("status", "tag-0")
    assert "are damaged" in site.ctl("policy", "explain", "tag-0").stderr
    found = site.json("doctor", status=1)["findings"]
    bad = [each for each in found if each["check"] == "workers" and each["level"] == "bad"]
    assert [each["mend"] for each in bad] == ["nomarrctl --user reconcile"]
    site.good("reconcile")
    assert site.row()["window"]["used"] == 1


def test_one_row_for_each_worker(site: Installation) -> None:
    site.bring_up(2)
    row = site.row("tag-1")
    assert row.pop("uptime_s") >= 0
    assert row.pop("pid") == site.lab.main_pid("tag-1")
    assert row.pop("invocation") == site.lab.get("tag-1", "InvocationID")
    assert row == {
        "component": "worker:tag:1",
        "pool": "tag",
        "instance": "tag-1",
        "unit": "nomarr-worker@tag-1.service",
        "state": "healthy",
        "trouble": None,
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "health": "healthy",
        "phase": None,
        "note": None,
        "job": None,
        "disagreement": None,
        "held": None,
        "window": {"used": 0, "limit": 2, "window_s": 300.0},
        "lifetime": {"used": 0, "limit": 20},
        "next_restart_in_s": None,
        "failure_reason": None,
        "ledger_problem": None,
        "last_chance": None,
        "last_frame_wall_ms": row["last_frame_wall_ms"],
        "metrics": None,
        "statistics": {"total_restarts": 0, "restarts_per_hour": 0, "recoveries": 0},
        "last_crash": None,
    }
    assert row["last_frame_wall_ms"] > 0
    lines = site.good("status").splitlines()
    assert lines[0].split() == [
        *("WORKER", "UNIT", "HEALTH", "PHASE", "JOB", "UP", "WINDOW", "LIFETIME", "NEXT"),
        *("LAST", "CRASH"),
    ]
    assert lines[1] == "tag: 2 workers, 2 healthy"
    assert lines[2].split()[:3] == ["tag-0", "active", "healthy"]


def test_a_crash_a_mask_and_a_pause_are_shown(site: Installation) -> None:
    site.bring_up(3)
    site.mask("tag-0")
    site.good("pause", "tag-1")
    last = site.row("tag-0")["last_crash"]
    assert (last["class"], last["code"], last["word"]) == ("signal", -9, "SIGKILL")
    assert last["decision"] == "fail"
    done = site.ctl("status", COLUMNS="80")
    assert done.returncode == 3
    said = done.stdout
    assert "tag: 3 workers, 1 healthy, 1 masked, 1 paused" in said
    assert re.search(r"^tag-0 +masked +- +- +2/2 +2/20 +reset +SIGKILL$", said, re.MULTILINE)
    assert re.search(r"^tag-1 +paused +- +- +0/2 +0/20 +resume +-$", said, re.MULTILINE)
    assert "tag-0: failed: 2 restarts within 5 min, the limit is 2" in said
    details = site.ctl("status", "tag-0", "worker:tag:1")
    assert details.returncode == 3
    assert "Failed: 2 restarts within 5 min, the limit is 2" in details.stdout
    assert "Mend: nomarrctl --user reset --start tag-0" in details.stdout
    assert "Held: paused by root (uid 0)" in details.stdout
    assert site.ctl("status", "tag-2").returncode == 0


def test_it_fits_and_nothing_hostile_reaches_the_terminal(site: Installation) -> None:
    site.lab.write_program("worker", HOSTILE)
    site.bring_up(1)
    for columns in ("40", "80", "120", "200"):
        lines = site.good("status", COLUMNS=columns).splitlines()
        assert all(room(line) <= int(columns) for line in lines)
        assert "\\x1b" in "".join(lines)
    for arguments in (["status"], ["status", "tag-0"], ["status", "--json"]):
        said = site.good(*arguments)
        assert "\x1b" not in said
        assert "\u202e" not in said
    assert "\\x1b[2J\\u202e龍" in site.good("status", "tag-0")
    assert site.row()["job"].startswith("\x1b[2J\u202e龍")


def test_without_the_supervisor_status_shows_the_rest(site: Installation) -> None:
    site.bring_up(1)
    site.lab.systemctl("stop", "nomarr-supervisor.service")
    done = site.ctl("status")
    assert "The supervisor does not answer (unit: inactive)" in done.stdout
    assert "systemctl --user start nomarr-supervisor.service" in done.stdout
    assert "tag-0" in done.stdout
    row = site.row()
    assert (row["health"], row["lifetime"]["limit"]) == (None, 20)


def test_two_witnesses_that_disagree(site: Installation) -> None:
    site.lab.write_program("worker", SILENT)
    site.configure(1, more=HASTY)
    site.good("apply")
    site.lab.wait_for(lambda: site.row()["disagreement"], what="the disagreement")
    assert site.row()["disagreement"] == "supervisor-blind"
    said = site.ctl("status").stdout
    assert "tag-0: systemd and its pipe disagree: supervisor-blind" in said


def test_before_the_first_apply(site: Installation) -> None:
    site.configure(2)
    assert site.ctl("status").returncode == 3
    assert site.row()["active"] == "inactive"
    site.config.write_text("")
    assert "No workers are configured" in site.good("status")


class Screen:
    """What a terminal of a certain size is shown."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.text = ""

    def wait_for(self, look: Callable[[str], object], *, timeout_s: float = 30.0) -> str:
        """The screen as soon as ``look`` finds something on one that is complete."""
        ends = time.monotonic() + timeout_s
        while True:
            for screen in re.findall(r"\x1b\[H(.*?)\x1b\[J", self.text, re.DOTALL):
                if look(plain(screen)):
                    return plain(screen)
            self.text = self.text[self.text.rfind("\x1b[H") :] if self.text else ""
            left_s = ends - time.monotonic()
            assert left_s > 0, f"not shown: {self.text!r}"
            if select.select([self.fd], [], [], left_s)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


@contextmanager
def watching(site: Installation, *arguments: str) -> Iterator[tuple[Screen, subprocess.Popen[str]]]:
    ours, theirs = pty.openpty()
    screen = Screen(ours)
    screen.resize(24, 80)

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("status", "--watch", *arguments)],
        env=site.lab.environment | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        text=True,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as program:
        os.close(theirs)
        try:
            yield screen, program
        finally:
            if program.poll() is None:
                program.kill()
            program.wait(30)
            os.close(ours)


def test_watch_follows_crashes_resizes_and_the_supervisors_restart(site: Installation) -> None:
    site.bring_up(1, backoff_s=60)
    with watching(site) as (screen, program):
        screen.wait_for(lambda text: "tag-0   healthy" in text and "DOING" in text)
        site.lab.systemctl("restart", "nomarr-supervisor.service")
        site.kill()
        shown = screen.wait_for(lambda text: "restarting" in text)
        assert all(len(line) <= 79 for line in shown.splitlines())
        site.good("reset", "tag-0", "--start")
        screen.wait_for(lambda text: "tag-0   healthy" in text)
        screen.resize(24, 140)
        screen.wait_for(lambda text: "LIFETIME" in text)
        screen.resize(3, 140)
        shown = screen.wait_for(lambda text: "lines more" in text)
        assert len(shown.splitlines()) == 3
        site.lab.systemctl("stop", "nomarr-supervisor.service")
        screen.resize(24, 80)
        screen.wait_for(lambda text: "The supervisor does not answer" in text)
        site.configure(2)
        site.good("apply")
        screen.wait_for(lambda text: "tag-1   healthy" in text)
        os.write(screen.fd, b"\x03")
        assert program.wait(30) == 0
        rest = os.read(screen.fd, 65536).decode(errors="replace")
        assert rest.endswith("\x1b[?25h\x1b[?1049l")


def test_watch_leaves_the_terminal_as_it_was_when_it_is_ended(site: Installation) -> None:
    site.bring_up(1)
    with watching(site) as (screen, program):
        screen.wait_for(lambda text: "healthy" in text)
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 0
        assert os.read(screen.fd, 65536).decode().endswith("\x1b[?25h\x1b[?1049l")


def test_watch_for_scripts_tells_changes_only(site: Installation) -> None:
    done = site.ctl("status", "--watch")
    assert done.returncode == 78
    site.bring_up(1, backoff_s=60)
    done = site.ctl("status", "--watch")
    assert done.returncode == 2
    assert "with --json" in done.stderr
    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("status", "--watch", "--json")],
        env=site.lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        first = json.loads(program.stdout.readline())
        assert first["supervisor"] is True
        assert first["workers"][0]["state"] == "healthy"
        site.kill()
        states = []
        while "restarting" not in states:
            states.append(json.loads(program.stdout.readline())["workers"][0]["state"])
        program.stdout.close()
        site.good("reset", "tag-0", "--start")  # a change, and nobody there to read it
        assert program.wait(30) == 0
