"""Restarts that wait for each other, under systemd: workers whose start takes its time do not start
at the same time, and none is forgotten.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation

# Ready when ``slow`` is not there; it notes when it begins, and when it is ready.
WORKER = """\
#!/bin/sh
trap "exit 0" TERM
echo begins "$NOMARR_COMPONENT_ID" >> {place}/log
while [ -e {place}/slow ]; do sleep 0.05; done
echo ready "$NOMARR_COMPONENT_ID" >> {place}/log
systemd-notify --ready
while :; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3
    sleep 0.2 & wait $!
done 3>"$NOMARR_HEALTH_PIPE"
"""


@pytest.fixture
def site(lab: Lab) -> Installation:
    site = Installation(lab)
    site.worker = lab.write_program("worker", WORKER.replace("{place}", lab.directory))
    site.bring_up(2, more="[fleet]\nmax_restarts_at_once = 1\n")
    return site


def test_one_worker_at_a_time_starts_again(site: Installation) -> None:
    log, slow = (Path(site.lab.directory, name) for name in ("log", "slow"))
    site.wait_until_reconciled()
    before = len(log.read_text().splitlines())

    def read() -> list[tuple[str, str]]:
        """What was noted since then."""
        lines = [line.split() for line in log.read_text().splitlines()[before:]]
        return [(word, name) for word, name in lines]

    slow.touch()
    for pid in site.lab.main_pids("tag-0", "tag-1"):
        os.kill(pid, signal.SIGKILL)
    site.lab.wait_for(read, what="the first begins")
    ((_, first),) = read()
    other = {"worker:tag:0": "tag-1", "worker:tag:1": "tag-0"}[first]

    def waits() -> bool:
        """Its backoff is over, and it has a timer for its turn: a second or more after that."""
        restarts = [each for each in site.records(other) if each.action == "restart"]
        is_armed = site.lab.get(f"nomarr-restart@{other}.timer", "SubState") == "waiting"
        return is_armed and bool(restarts) and time.time() * 1000 > restarts[0].due.wall_ms + 500

    site.lab.wait_for(waits, what="the other waits for its turn")
    assert read() == [("begins", first)]
    slow.unlink()
    site.wait_until_healthy("tag-0", "tag-1")
    assert [word for word, _ in read()] == ["begins", "ready", "begins", "ready"]
    for name in ("tag-0", "tag-1"):
        assert [each.action for each in site.records(name)] == ["restart"]
