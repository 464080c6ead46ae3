"""What the supervisor makes of stops that a person requests, of workers that say no farewell: it
asks systemd whether an end was requested.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.core.job import STOPPED, Owner, key_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import Claims
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.lab import Lab
from tests.support.operator_site import WORKER, Installation
from tests.support.supervision import Live, status_of

UNIT = "nomarr-worker@tag-0.service"
SUPERVISOR = "nomarr-supervisor.service"
# A SIGTERM ends its frames, and nothing else.
DEAF = WORKER.replace("exit $ARGV[0]", "exec 'sleep', 1000")


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


@pytest.fixture
def events(site: Installation) -> Iterator[Live]:
    """What the supervisor tells of one healthy worker."""
    site.bring_up(1)
    with closing(Live(site.lab.paths.live)) as live:
        live.ask(op="subscribe", topics=["worker:*:status"])
        yield live


def is_crash(event: dict[str, Any]) -> bool:
    return bool(event["type"] == "worker:crash")


def test_a_stop_is_no_crash(site: Installation, events: Live) -> None:
    site.lab.stop("tag-0")
    assert not list(filter(is_crash, events.until(status_of("stopped"))))


def test_a_restart_is_no_crash_and_a_death_after_it_is(site: Installation, events: Live) -> None:
    site.lab.systemctl("restart", UNIT)
    assert not list(filter(is_crash, events.until(status_of("healthy"))))
    died = site.kill()
    assert events.until(is_crash)[-1]["invocation"] == died


def test_a_stop_that_the_next_supervisor_finds_is_no_crash(site: Installation) -> None:
    site.bring_up(1)
    pid = site.lab.main_pid(SUPERVISOR)
    os.kill(pid, signal.SIGSTOP)
    site.lab.stop("tag-0")
    os.kill(pid, signal.SIGKILL)

    def look() -> bool:
        try:
            with closing(Live(site.lab.paths.live)) as live:
                [worker] = live.ask(op="snapshot")["workers"]
        except OSError:  # it is being started
            return False
        assert not worker["last_crash"]
        return bool(worker["status"] == "stopped")

    site.lab.wait_for(look, what="it is seen as stopped")


def test_the_silence_of_a_worker_that_is_stopping_is_not_judged(site: Installation) -> None:
    site.worker = site.lab.write_program("deaf", DEAF)
    health = "[health]\nframe_interval_s = 0.1\nstaleness_interval_s = 0.5\nmax_misses = 2\n"
    site.bring_up(1, more=f"stop_timeout_s = 3600\n{health}")
    with closing(Live(site.lab.paths.live)) as events:
        events.ask(op="subscribe", topics=["worker:*:status"])
        site.lab.systemctl("stop", "--no-block", UNIT)
        seen = events.until(status_of("stopping"))
        os.kill(site.lab.main_pid("tag-0"), signal.SIGKILL)
        seen += events.until(status_of("stopped"))
    assert not list(filter(is_crash, seen))


def test_a_stop_is_not_held_against_the_job(site: Installation) -> None:
    """Its jobs are settled at once: a claim would last for ten minutes."""
    site.bring_up(1, more="claim_timeout_s = 600\njob_max_crashes = 1\n")
    path = Path(site.state)
    with closing(SqliteStore(str(path), "work")) as store:
        queue.add(store, "tag", ["/a"], on_page=lambda *_: None)
        run = site.lab.get("tag-0", "InvocationID")
        owner = Owner("worker:tag:0", run, "", read_boot_id())
        assert Claims(store, "tag", owner).take(key_of("tag", "/a"))
        site.lab.stop("tag-0")
        site.lab.wait_for(
            lambda: queue.find(store, "tag", "/a")["status"] == "error", what="it is settled"
        )
        job = queue.find(store, "tag", "/a")
    assert job["error"]["cause"] == STOPPED
    assert not job.get("crashes")
