"""Restarts that wait for each other, under systemd: workers whose start takes its time do not start
at the same time, none is forgotten, and none waits for a store that is away.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.core.ids import Component
from nomarr_systemd.fleet.turns import TurnStore
from nomarr_systemd.ledger.ledger import Ledger
from tests.support.fleet_site import Host, make_hosts, run_servers
from tests.support.lab import Lab
from tests.support.operator_site import WORKER as STEADY
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


def test_no_restart_waits_for_a_store_that_is_away(tmp_path: Path) -> None:
    """The only turn is another host's. The worker waits for it while the store can say so, and is
    restarted when that is away; the death is booked once."""
    policy = "[policy]\nbackoff_base_s = 0.1\nbackoff_max_s = 2\nbackoff_jitter = 0\n"
    with run_servers() as servers, make_hosts(["alpha"]) as (lab,):
        worker = lab.write_program("steady", STEADY)
        pool = f'[pool.tag]\ncommand = ["{worker}"]\nwatchdog_s = 3600\n'
        host = Host(lab, servers, tmp_path, {}, policy + pool, at_once=1)
        host.wait_until_healthy("tag-0")
        with closing(servers.open("policy")) as store:
            assert TurnStore(store, "elsewhere", 1).take(Component("tag", 7), 3_600_000)
        died = host.kill("tag-0")

        def waits() -> bool:
            records = host.records("tag-0")
            is_late = bool(records) and time.time() * 1000 > records[0].due.wall_ms + 500
            is_armed = lab.get("nomarr-restart@tag-0.timer", "SubState") == "waiting"
            return is_late and is_armed

        lab.wait_for(waits, what="it waits for its turn")
        assert lab.get("tag-0", "InvocationID") == died
        primary, standby = servers.primary, servers.standby
        servers.stop()
        lab.wait_until("tag-0", "active")
        assert lab.get("tag-0", "InvocationID") != died
        primary.start(synchronous_standby_names="")
        standby.start()
        servers.all = [standby, primary]
        lab.systemctl("start", "nomarr-reconcile.service")

        def booked() -> list[str]:
            with closing(servers.open("policy")) as store:
                (mine,) = {doc["host"] for doc in store.find("worker_restart_policy")}
                records = Ledger(store, host=mine).account("worker:tag:0").records
            done = [each for each in records if each.effect == "done"]
            return [each.invocation for each in done if each.action == "restart"]

        lab.wait_for(booked, what="its restart is done")
        assert booked() == [died]
