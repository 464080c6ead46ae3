"""A power cut at every step of a failure, and twenty at random moments: after the boot, ledger and
machine agree.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.support.machine import CONFIG, Machine, unit_of
from tests.support.trees import SUITES

# What can be seen from outside when the power goes.
STEPS = ("killed", "failed", "pending", "booked", "carried-out")
MOMENTS = (*STEPS, *(f"random-{number}" for number in range(5)))
LATEST_S = 0.4  # a failure is over then
SIGNALS = ("KILL", "SEGV", "FPE", "ILL", "BUS")  # not alike: that would be an incident
WORKER = "systemd-notify --ready; exec sleep 10000"
POLICIES = {"back": "backoff_base_s = 0.5", "last": "max_restarts = 0"}  # by pool


@pytest.fixture(scope="module", params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def configured(machine: Machine, pool: str) -> None:
    """With a worker for each moment, and without those of the other pool: all of them start again
    at each boot, so they are no more than a shell."""
    config = (
        f"[policy]\nbackoff_jitter = 0\n[pool.{pool}]\nworkers = {len(MOMENTS)}\n"
        f'command = ["/bin/sh", "-c", "{WORKER}"]\n[pool.{pool}.policy]\n{POLICIES[pool]}\n'
    )
    if machine.path(CONFIG).read_text() != config:
        machine.apply(config)


def wait_for_moment(machine: Machine, moment: str, name: str, died: str) -> None:
    if moment not in STEPS:
        after_s = random.uniform(0, LATEST_S)
        print(f"the power goes {after_s * 1000:.0f} ms after the kill")
        time.sleep(after_s)
        return

    def is_now() -> bool:
        record = machine.account(name).find(died)
        match moment:
            case "killed":
                return True
            case "failed":
                return not os.path.lexists(
                    machine.path(f"/run/systemd/units/invocation:{unit_of(name)}")
                )
            case "pending":
                return machine.path(f"/run/nomarr/pending/{died}").exists() or record is not None
            case "booked":
                return record is not None
            case _:
                return record is not None and record.effect != "pending"

    machine.wait_for(is_now, f"{name} is {moment}")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("pool", POLICIES)
def test_a_power_cut_during_a_failure(machine: Machine, pool: str, moment: str) -> None:
    number = MOMENTS.index(moment)
    name = f"{pool}-{number}"
    machine.wait_until_running(name)
    died = machine.kill(name, SIGNALS[number % len(SIGNALS)])
    wait_for_moment(machine, moment, name, died)
    machine.power_cut()
    machine.boot()

    machine.systemctl("start", "nomarr-reconcile.service")
    machine.wait_until_settled(name)
    account = machine.account(name)
    assert [record.invocation for record in account.records] in ([died], [])
    if moment in ("booked", "carried-out"):
        assert account.records  # before the commit, the failure may go with the power
    shown = machine.show(name, "ActiveState", "LoadState")
    if pool == "last" and account.records:
        assert shown == {"ActiveState": "inactive", "LoadState": "masked"}
        assert account.failure_reason
    else:
        machine.wait_until_running(name, after=died)
        assert account.restart_count == len(account.records)
