"""The programs do their work in the sandboxes of the system's units, as far as root's private
manager can make them. Who they run as, and a hidden /home and /tmp, are for a booted system.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nomarr_systemd.systemd.unit_files import find_data
from tests.support.capabilities import needs_root
from tests.support.lab import Lab
from tests.support.web_site import Client, find_port

pytestmark = needs_root  # a user namespace is a sandbox, and has no room for another

# Python, the checkout or the lab itself may be in /home or /tmp here.
ELSEWHERE = (
    *("User=", "Group=", "SupplementaryGroups=", "StateDirectory", "PrivateTmp=", "ProtectHome="),
    "LoadCredential=",
)


def close(lab: Lab, *names: str) -> None:
    """Put services into the system's sandboxes."""
    for name in names:
        dropin = f"{name}.service.d/10-system.conf"
        lines = Path(find_data("units"), dropin).read_text().splitlines()
        kept = [line for line in lines if not line.startswith(ELSEWHERE)]
        # In place of StateDirectory=.
        lab.write_unit(dropin, "\n".join([*kept, f"ReadWritePaths={lab.paths.state}\n"]))
    lab.reload()


def test_hook_controller_and_restart_work_in_their_sandboxes(lab: Lab) -> None:
    program = lab.write_program("worker", "#!/bin/sh\nsystemd-notify --ready\nexec sleep 1000\n")
    policy = "[policy]\nbackoff_base_s = 0.1\nbackoff_jitter = 0\n"
    lab.install(f'{policy}[pool.tag]\ncommand = ["{program}"]\nwatchdog_s = 3600\n')
    close(lab, *(f"nomarr-{name}" for name in ("wakeup", "controller", "restart@")))
    lab.start("tag-0")
    first = lab.get("tag-0", "InvocationID")

    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)

    def runs_again() -> bool:
        shown = lab.show("tag-0", "ActiveState", "InvocationID")
        return shown["ActiveState"] == "active" and shown["InvocationID"] != first

    lab.wait_for(runs_again, what="tag-0 runs again")


def test_the_reconciler_works_in_its_sandbox(lab: Lab) -> None:
    lab.install('[pool.tag]\ncommand = ["/bin/true"]\n')
    close(lab, "nomarr-reconcile")
    lab.systemctl("start", "nomarr-controller.socket")
    lab.systemctl("start", "nomarr-reconcile.service")


def test_the_supervisor_works_in_its_sandbox(lab: Lab) -> None:
    lab.install('[pool.tag]\ncommand = ["/bin/true"]\n')
    close(lab, "nomarr-supervisor", "nomarr-reconcile")
    lab.systemctl("start", "nomarr-supervisor.service")
    assert lab.get("nomarr-supervisor.service", "ActiveState") == "active"


def test_a_worker_runs_in_its_sandbox(lab: Lab) -> None:
    program = lab.write_program(
        "worker",
        "#!/bin/sh\nsystemd-notify --ready\ntrap 'exit 0' TERM\n"
        "while :; do sleep 1000 & wait $!; done\n",
    )
    lab.replace_controller()
    lab.install(f'[pool.tag]\ncommand = ["{program}"]\nwatchdog_s = 3600\n')
    close(lab, "nomarr-worker@")
    lab.start("tag-0")
    assert lab.get("nomarr-wanted@tag-0.target", "ActiveState") == "active"
    lab.stop("tag-0")
    assert lab.get("tag-0", "ActiveState") == "inactive"
    assert lab.get("nomarr-wanted@tag-0.target", "ActiveState") == "inactive"


def test_the_page_works_in_its_sandbox(lab: Lab) -> None:
    port = find_port()
    lab.install(f'[web]\nlisten = "127.0.0.1:{port}"\n[pool.tag]\ncommand = ["/bin/true"]\n')
    close(lab, "nomarr-web")
    lab.systemctl("start", "nomarr-supervisor.service", "nomarr-web.service")
    client = Client(port)
    lab.wait_for(lambda: client.ask("/readyz")[0] == 200, what="it is connected")
    assert [each["instance"] for each in client.json("/api/workers")["workers"]] == ["tag-0"]
    assert client.json("/api/workers/tag-0/why")["verdict"] == "stopped"
    assert client.ask("/metrics")[0] == 200
    assert client.ask("/")[0] == 200
