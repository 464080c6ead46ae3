"""A whole pool dies of the same cause: one incident, nobody masked, all back when it is over."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.incident import SPAN_MS, Incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.time import age_ms
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.public import read_incidents
from nomarr_systemd.store.open import open_store
from tests.support.lab import Lab

WORKERS = 4
NAMES = [f"tag-{number}" for number in range(WORKERS)]
WORKER = """\
#!/bin/sh
# Runs for as long as what all of them need is there.
[ -e {needed} ] || exit 1
systemd-notify --ready --pid=$$
trap "exit 1" TERM
while :; do sleep 1000 & wait $!; done
"""
CONFIG = """\
[policy]
backoff_base_s = {backoff_s}
backoff_multiplier = 1
backoff_jitter = 0
max_restarts = {max_restarts}
window_s = {window_s}
max_lifetime_restarts = 0

[health]
startup_timeout_s = 3600

[pool.tag]
workers = 4
command = ["{program}"]
watchdog_s = 3600
"""


class Pool:
    """Four workers that need a file."""

    def __init__(
        self,
        lab: Lab,
        *,
        backoff_s: float = 0.2,
        max_restarts: int = 100,
        window_s: float = 300,
    ) -> None:
        self.lab = lab
        self.needed = Path(lab.directory, "needed")
        self.needed.touch()
        text = WORKER.replace("{needed}", str(self.needed))
        config = CONFIG.replace("{program}", lab.write_program("worker", text))
        config = config.replace("{backoff_s}", str(backoff_s)).replace("{window_s}", str(window_s))
        lab.install(config.replace("{max_restarts}", str(max_restarts)))
        lab.systemctl("start", "nomarr-controller.socket")
        lab.start(*NAMES)

    def break_down(self) -> None:
        """What they need is gone, and all notice at once."""
        self.needed.unlink()
        for pid in [self.lab.main_pid(name) for name in NAMES]:
            os.kill(pid, signal.SIGTERM)

    def incident(self) -> Incident | None:
        with Store(self.lab) as store:
            return IncidentStore(store.store).get("tag")

    def account(self, name: str) -> Account:
        with Store(self.lab) as store:
            return Ledger(store.store).account(f"worker:{name.replace('-', ':')}")

    def records(self, name: str, *actions: str) -> list[Record]:
        return [each for each in self.account(name).records if each.action in actions]

    def count_tries(self, name: str, incident: Incident) -> int:
        """Count the restarts of a worker since the incident was opened."""
        since = incident.opened.boottime_ms
        return sum(each.boottime_ms >= since for each in self.records(name, "restart"))

    def wait_for_incident(self, *, closed: bool = False) -> Incident:
        def look() -> Incident | None:
            found = self.incident()
            return found if found is not None and bool(found.closed) == closed else None

        return self.lab.wait_for(look, what="the incident")  # type: ignore[return-value]

    def said(self) -> str:
        return self.lab.journal("-o", "cat", "NOMARR_POOL=tag")

    def states(self) -> list[str]:
        return [self.lab.get(name, "ActiveState") for name in NAMES]


class Store:
    def __init__(self, lab: Lab) -> None:
        self.store = open_store(lab.config.store.url, "policy")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_an_outage_blames_nobody_and_ends_by_itself(lab: Lab) -> None:
    pool = Pool(lab)
    pool.break_down()
    opened = pool.wait_for_incident()
    assert opened.canary in opened.members
    assert len(opened.members) >= 3
    canary = opened.canary.removeprefix("worker:").replace(":", "-")
    others = [name for name in NAMES if name != canary]
    for name in others:
        lab.wait_until(name, "failed")
        lab.wait_for(lambda: Path(lab.paths.hold, name).exists(), what="a hold")  # noqa: B023
    # The canary tries again and again, at its own cost; the others lie still.
    lab.wait_for(lambda: len(pool.records(canary, "restart")) >= 4, what="the canary's tries")
    runs = {name: lab.get(name, "InvocationID") for name in others}
    pool.needed.touch()
    closed = pool.wait_for_incident(closed=True)
    assert closed.closed == f"{opened.canary} is healthy"
    lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")
    for name in others:
        assert lab.get(name, "InvocationID") != runs[name]
        account = pool.account(name)
        assert pool.records(name, "fail") == []
        given_back = {record.invocation for record in pool.records(name, "refund")}
        blamed = {record.invocation for record in pool.records(name, "restart")}
        assert blamed <= given_back
        assert not any(account.window.values()), "the window is untouched"
    assert os.listdir(lab.paths.hold) == []
    lab.wait_for(lambda: "is closed" in pool.said(), what="it is told")
    assert pool.said().count("wait and are not blamed") == pool.said().count("is closed") == 1


def test_a_second_outage_within_the_window_counts(lab: Lab) -> None:
    pool = Pool(lab)
    pool.break_down()
    pool.wait_for_incident()
    pool.needed.touch()
    first = pool.wait_for_incident(closed=True)
    lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")
    before = {name: len(pool.records(name, "restart")) for name in NAMES}
    pool.break_down()
    for name in NAMES:
        lab.wait_for(
            lambda: len(pool.records(name, "restart")) >= before[name] + 2,  # noqa: B023
            what="it counts",
        )
    again = pool.incident()
    assert again is not None
    assert again.opened == first.opened


def test_every_incident_is_kept_and_shown(lab: Lab) -> None:
    """Three in a row, the controller killed after the end of each; what is published was
    published, or is by the next reconciliation."""
    pool = Pool(lab, window_s=0.01)
    happened = []
    for number in range(3):
        pool.break_down()
        opened = pool.wait_for_incident()
        canary = opened.canary.removeprefix("worker:").replace(":", "-")
        lab.wait_for(
            lambda: pool.count_tries(canary, opened) >= 2,  # noqa: B023
            what="the canary dies again",
        )
        pool.needed.touch()
        happened.append(pool.wait_for_incident(closed=True))
        lab.systemctl("kill", "--signal=KILL", "nomarr-controller.service")
        lab.systemctl("start", "nomarr-reconcile.service")
        lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")
        found, problem = read_incidents(lab.paths.public)
        assert problem == ""
        assert [each.key for each in found] == [each.key for each in happened]
        last = found[number]
        members = tuple(sorted(happened[number].members))  # as they are kept
        assert last == happened[number]._replace(refunds=(), members=members)
        assert last.closed.endswith("is healthy")
        assert last.closed_wall_ms is not None
        assert last.closed_wall_ms > last.opened.wall_ms
        assert last.deaths is not None
        assert last.deaths > len(last.members), "the canary died more than once"
    assert len({each.opened for each in happened}) == 3


def test_an_outage_that_outlasts_a_canary_masks_nobody(lab: Lab) -> None:
    """With its last restart gone, the canary steps back and the next one is tried."""
    pool = Pool(lab, max_restarts=1)
    pool.break_down()
    opened = pool.wait_for_incident()
    lab.wait_for(
        lambda: (found := pool.incident()) is not None and found.canary != opened.canary,
        what="another canary",
    )
    pool.needed.touch()
    pool.wait_for_incident(closed=True)
    lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")
    assert not any(pool.records(name, "fail") for name in NAMES)


def test_a_canary_that_fails_for_good_is_followed_by_the_next(lab: Lab) -> None:
    pool = Pool(lab, backoff_s=0.1, max_restarts=1)
    pool.break_down()
    opened = pool.wait_for_incident()
    lab.wait_for(
        lambda: (found := pool.incident()) is not None and found.canary != opened.canary,
        what="another canary",
    )
    closed = pool.wait_for_incident(closed=True)
    assert closed.closed == "no worker is left to try"
    lab.wait_for(
        lambda: all(lab.get(name, "LoadState") == "masked" for name in NAMES), what="all masked"
    )
    assert os.listdir(lab.paths.hold) == []


def test_an_incident_outlives_the_controller(lab: Lab) -> None:
    pool = Pool(lab)
    pool.break_down()
    pool.wait_for_incident()
    for name in NAMES:
        lab.wait_until(name, "failed")
    lab.systemctl("kill", "--signal=KILL", "nomarr-controller.service")
    pool.needed.touch()
    lab.systemctl("start", "nomarr-reconcile.service")
    pool.wait_for_incident(closed=True)
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")


def test_what_a_worker_paid_twice_is_given_back_twice(lab: Lab) -> None:
    pool = Pool(lab)
    pool.needed.unlink()
    pids = {name: lab.main_pid(name) for name in NAMES}
    os.kill(pids["tag-3"], signal.SIGTERM)
    lab.wait_for(lambda: len(pool.records("tag-3", "restart")) >= 2, what="it dies again")
    for name in NAMES[:3]:
        os.kill(pids[name], signal.SIGTERM)
    opened = pool.wait_for_incident().opened
    lab.wait_for(lambda: Path(lab.paths.hold, "tag-3").exists(), what="a hold")
    blamed = {
        record.invocation
        for record in pool.records("tag-3", "restart")
        if age_ms(record.moment, opened) < SPAN_MS
    }
    lab.wait_for(
        lambda: blamed <= {record.invocation for record in pool.records("tag-3", "refund")},
        what="both are refunded",
    )


def other_than(canary: str) -> list[str]:
    return [name for name in NAMES if f"worker:{name.replace('-', ':')}" != canary]


def open_for_long(lab: Lab) -> tuple[Pool, str, str]:
    """An incident whose canary has a long backoff; the canary, by both its names."""
    pool = Pool(lab, backoff_s=60)
    pool.break_down()
    canary = pool.wait_for_incident().canary
    instance = canary.removeprefix("worker:").replace(":", "-")
    for name in other_than(canary):
        lab.wait_for(lambda: Path(lab.paths.hold, name).exists(), what="a hold")  # noqa: B023
    lab.wait_until(f"nomarr-restart@{instance}.timer", "active")
    return pool, canary, instance


def test_a_canary_that_is_paused_is_followed_by_the_next(lab: Lab) -> None:
    pool, canary, instance = open_for_long(lab)
    Path(lab.paths.hold, instance).write_text("paused by somebody\n")
    pool.needed.touch()
    lab.wait_for(
        lambda: all(lab.get(name, "ActiveState") == "active" for name in other_than(canary)),
        what="the others run",
    )
    assert lab.get(instance, "ActiveState") == "failed"


def test_a_canary_whose_backoff_was_cancelled_is_followed_by_the_next(lab: Lab) -> None:
    pool, canary, instance = open_for_long(lab)
    lab.systemctl("stop", f"nomarr-worker@{instance}.service")
    pool.needed.touch()
    lab.wait_for(
        lambda: all(lab.get(name, "ActiveState") == "active" for name in other_than(canary)),
        what="the others run",
    )
    assert lab.get(instance, "ActiveState") == "failed"


def test_an_election_that_was_cut_off_is_completed(lab: Lab) -> None:
    pool, canary, _ = open_for_long(lab)
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    pool.needed.touch()
    with Store(lab) as store:
        chosen = other_than(canary)[0]
        IncidentStore(store.store).elect("tag", f"worker:{chosen.replace('-', ':')}")
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_until(chosen, "active")
    lab.systemctl("start", "nomarr-reconcile.service")
    pool.wait_for_incident(closed=True)


def test_an_incident_outlives_a_reboot(lab: Lab) -> None:
    """As a boot finds it: nothing has failed, and whatever is held did not start."""
    pool, canary, instance = open_for_long(lab)
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    lab.systemctl("reset-failed", "nomarr-worker@*.service")
    pool.needed.touch()
    lab.start(*NAMES)
    for name in other_than(canary):
        assert lab.get(name, "ActiveState") == "inactive"
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_for(lambda: pool.states() == ["active"] * WORKERS, what="all run")
    assert lab.get(instance, "ActiveState") == "active"
