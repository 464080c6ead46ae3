"""Workers that are killed in a lab, and what is on record about them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ledger_record import Record
from tests.support.lab import Lab

WORKER = """\
#!/bin/sh
# Ready at once, then waits; $1 is what a SIGTERM is answered with.
trap "exit $1" TERM
systemd-notify --ready
while :; do sleep 1000 & wait $!; done
"""


CRASHER = """\
#!/bin/sh
exit $1
"""


QUICK = """\
[policy]
backoff_base_s = 0.1
backoff_jitter = 0
"""


SLOW = """\
[policy]
backoff_base_s = 30
backoff_jitter = 0
"""


def install(lab: Lab, policy: str = QUICK, *, program: str = WORKER, answer: int = 0) -> None:
    path = lab.write_program("worker", program)
    lab.install(
        f'{policy}\n[pool.tag]\nworkers = 3\ncommand = ["{path}", "{answer}"]\nwatchdog_s = 3600\n'
    )
    # Without the supervisor: its part is tested with its own tests.
    lab.systemctl("start", "nomarr-controller.socket")


def account_of(lab: Lab, instance: str = "tag-0") -> Account:
    try:
        text = Path(lab.paths.state, "public", f"{instance}.json").read_text()
    except FileNotFoundError:
        return Account("worker:none:0")
    return book.from_doc(json.loads(text))


def records_of(lab: Lab, instance: str = "tag-0") -> list[Record]:
    return account_of(lab, instance).records


def kill(lab: Lab, instance: str = "tag-0", number: int = signal.SIGKILL) -> str:
    """Kill the worker; returns the invocation that died."""
    invocation = lab.get(instance, "InvocationID")
    os.kill(lab.main_pid(instance), number)
    return invocation


def wait_for_run(lab: Lab, before: str, instance: str = "tag-0") -> str:
    """Until the worker runs again in another invocation, which is returned."""

    def look() -> str:
        shown = lab.show(instance, "ActiveState", "InvocationID")
        running = shown["ActiveState"] == "active" and shown["InvocationID"] != before
        return shown["InvocationID"] if running else ""

    return lab.wait_for(look, what=f"{instance} runs again")


def wait_for_record(lab: Lab, invocation: str, effect: str, instance: str = "tag-0") -> Record:
    def look() -> Record | None:
        record = account_of(lab, instance).find(invocation)
        return record if record is not None and record.effect == effect else None

    found = lab.wait_for(look, what=f"{invocation} is {effect}")
    assert found is not None
    return found
