"""The kernel's OOM killer takes a worker, for real: on record with the class that systemd can know.

With cgroup v2 systemd sees ``memory.events`` and says ``oom-kill``; that is tested in a booted
system. By cgroup v1 it hears of nothing but a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.capabilities import NOT_HERE
from tests.support.crashes import account_of, records_of, wait_for_run
from tests.support.lab import Lab

LIMIT = 48 << 20
GLUTTON = """\
#!/usr/bin/python3 -IS
import os, signal, socket
go = [signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, go)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
signal.sigwait(go)
eaten = []
while True:
    eaten.append(b"x" * (1 << 20))
"""
CONFIG = """\
[policy]
backoff_base_s = 0.1

[pool.tag]
command = ["{glutton}"]
watchdog_s = 3600
"""


@pytest.fixture
def memory(lab: Lab) -> Iterator[Path]:
    """A memory cgroup with little room."""
    hierarchy = Path("/sys/fs/cgroup/memory")
    if not (hierarchy / "memory.oom_control").exists():
        pytest.skip(NOT_HERE + "the memory controller is not in a cgroup v1 hierarchy")
    place = hierarchy / Path(lab.directory).name
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"needs a writable memory cgroup: {error}")
    try:
        (place / "memory.limit_in_bytes").write_text(str(LIMIT))
        with contextlib.suppress(OSError):  # where swap is not accounted for
            (place / "memory.memsw.limit_in_bytes").write_text(str(LIMIT))
        yield place
    finally:
        lab.end()  # nobody is in it then
        place.rmdir()


def test_the_kernels_oom_killer_under_cgroup_v1(lab: Lab, memory: Path) -> None:
    glutton = lab.write_program("glutton", GLUTTON)
    lab.install(CONFIG.replace("{glutton}", glutton))
    lab.systemctl("start", "nomarr-controller.socket")
    lab.start("tag-0")
    died, pid = lab.get("tag-0", "InvocationID"), lab.main_pid("tag-0")
    (memory / "cgroup.procs").write_text(str(pid))
    os.kill(pid, signal.SIGUSR1)
    wait_for_run(lab, died)
    assert "oom_kill 1" in (memory / "memory.oom_control").read_text()
    (record,) = records_of(lab)
    assert (record.invocation, record.kind, record.code) == (died, "signal", -9)
    assert (record.action, account_of(lab).restart_count) == ("restart", 1)
