"""A journald that hangs holds up nothing, and what it could not take is written later, in order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import Machine, unit_of

# Two to a pool: fewer than an incident takes, so each death is decided about by itself.
POOLS = [f"p{number}" for number in range(20)]
NAMES = [f"{pool}-{number}" for pool in POOLS for number in (0, 1)]
CONFIG = """\
[policy]
backoff_base_s = 0.2
""" + "".join(
    f'\n[pool.{pool}]\nworkers = 2\ncommand = ["{WORKERS}/steady", "0"]\n' for pool in POOLS
)
# As long as its queue has room, journald's socket takes entries of a journald that hangs. One
# sender may not have so many under way.
FILL = """
import socket
links, sent = [], 1
while sent:
    links.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
    sent = 0
    try:
        while True:
            sent += links[-1].sendto(b"MESSAGE=filler\\n", "/run/systemd/journal/socket")
    except BlockingIOError:
        pass
"""
JOURNALD = "systemd-journald.service"
PATIENT = "/run/systemd/system/systemd-journald.service.d/patient.conf"


@pytest.fixture(autouse=True)
def running(machine: Machine) -> None:
    """Its own watchdog, of 3 min, must not end it before a busy machine has done all this."""
    machine.run("mkdir", "-p", PATIENT.rpartition("/")[0])
    machine.path(PATIENT).write_text("[Service]\nWatchdogSec=0\n")
    machine.systemctl("daemon-reload")
    machine.systemctl("restart", JOURNALD)
    machine.apply(CONFIG)
    machine.wait_until_running(*NAMES)


def kill_all(machine: Machine) -> dict[str, str]:
    """Kill every worker; return the runs that died, by instance."""
    before = {name: machine.get(name, "InvocationID") for name in NAMES}
    units = map(unit_of, NAMES)
    machine.systemctl("kill", "--kill-whom=main", "--signal=KILL", *units)
    for name, run in before.items():
        machine.wait_until_running(name, after=run)
    return before


def read_decisions(machine: Machine) -> list[dict[str, Any]]:
    lines = machine.journal("--output=json", "--all", "NOMARR_DECISION=restart").splitlines()
    return [json.loads(line) for line in lines]


def test_restarts_go_on_and_nothing_is_lost(machine: Machine) -> None:
    machine.systemctl("kill", "--kill-whom=main", "--signal=STOP", JOURNALD)
    try:
        machine.run("python3", "-c", FILL)
        waves = [kill_all(machine), kill_all(machine)]
        machine.wait_for(  # workers run again before their deaths are told
            lambda: len(list(machine.path("/run/nomarr/journal").iterdir())) > len(NAMES),
            "entries of both waves are kept",
        )
    finally:
        machine.systemctl("kill", "--kill-whom=main", "--signal=CONT", JOURNALD)
    killed = {run for wave in waves for run in wave.values()}
    machine.wait_for(
        lambda: {each["NOMARR_INVOCATION_ID"] for each in read_decisions(machine)} >= killed,
        "all decisions are in the journal",
    )
    said = [each["NOMARR_INVOCATION_ID"] for each in read_decisions(machine)]
    said = [run for run in said if run in killed]
    assert len(said) == len(killed), "each once"
    assert set(said[: len(NAMES)]) == set(waves[0].values()), "the first deaths come first"
    # Within a wave, in the order in which they were booked.
    records = [machine.account(name).find(run) for wave in waves for name, run in wave.items()]
    booked = {each.invocation: each.boottime_ms for each in records if each is not None}
    assert [booked[run] for run in said] == sorted(booked.values())
    late = [each for each in read_decisions(machine) if "NOMARR_LATE_MS" in each]
    assert len(late) > len(NAMES)
    machine.wait_for(
        lambda: not list(machine.path("/run/nomarr/journal").iterdir()), "nothing is kept"
    )
