"""No program of root's runs in an environment that a pool can set. Whoever owns a pool's
EnvironmentFile or a directory of its library path would be root otherwise.

The loader itself is the witness: ``LD_DEBUG_OUTPUT`` has it write a file for each program that is
started with it, under the same conditions under which it obeys ``LD_PRELOAD``; the file belongs to
the user whose program it was.
"""

from __future__ import annotations

import pytest

from tests.support.installed import WORKERS
from tests.support.machine import Machine, unit_of

EVIL = "/opt/evil"  # nomarr's, as an application's own tree often is
PRECIOUS = "/etc/precious"
CONFIG = f"""\
[policy]
backoff_base_s = 0.1
backoff_jitter = 0

[pool.tag]
command = ["{WORKERS}/steady", "1"]
stop_timeout_s = 5

[pool.tag.unit]
EnvironmentFile = "-{EVIL}/worker.env"
ReadWritePaths = ["{EVIL}"]

[pool.lib]
command = ["{WORKERS}/steady", "1"]

[pool.lib.unit]
Environment = ["LD_LIBRARY_PATH={EVIL}/lib", "LD_DEBUG=libs", "LD_DEBUG_OUTPUT={EVIL}/ld-lib"]
ReadWritePaths = ["{EVIL}"]
"""
TRACED = f"LD_DEBUG=libs\nLD_DEBUG_OUTPUT={EVIL}/ld-tag\nLD_PRELOAD={EVIL}/lib/missing.so\n"
JOURNALD = (
    "systemd-journald.socket", "systemd-journald-dev-log.socket", "systemd-journald-audit.socket",
    "systemd-journald.service",
)  # fmt: skip


@pytest.fixture(scope="module")
def prepared(machine: Machine) -> Machine:
    machine.run("mkdir", "-p", f"{EVIL}/lib")
    machine.run("chown", "-R", "nomarr:nomarr", EVIL)
    machine.path(PRECIOUS).write_text("kept\n")
    machine.path(f"{EVIL}/worker.env").write_text("")
    machine.apply(CONFIG)
    machine.wait_until_running("tag-0", "lib-0")
    return machine


def find_owners(machine: Machine, prefix: str) -> set[str]:
    """Who ran a program in the environment of a pool."""
    said = machine.run("find", EVIL, "-name", f"{prefix}.*", "-printf", "%u\n").stdout
    return set(said.split())


def restart(machine: Machine, name: str, environment: str) -> str:
    """Start the worker in another environment; its run."""
    before = machine.get(name, "InvocationID")
    machine.path(f"{EVIL}/worker.env").write_text(environment)
    machine.systemctl("restart", unit_of(name))
    machine.wait_until_running(name, after=before)
    return machine.get(name, "InvocationID")


def stop_in_every_way(machine: Machine, name: str) -> None:
    run = machine.get(name, "InvocationID")
    machine.systemctl("restart", unit_of(name))
    machine.wait_until_running(name, after=run)
    machine.run("nomarrctl", "pause", name)
    machine.run("nomarrctl", "resume", name)
    machine.wait_until_running(name)
    machine.run("nomarrctl", "restart", name)
    machine.wait_until_running(name, after=machine.kill(name))
    machine.systemctl("stop", unit_of(name))
    machine.systemctl("start", unit_of(name))
    machine.wait_until_running(name)


@pytest.mark.parametrize("name", ["tag-0", "lib-0"], ids=["LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_root_runs_nothing_in_a_pools_environment(prepared: Machine, name: str) -> None:
    """Variants A and B of finding 1."""
    restart(prepared, name, TRACED)
    stop_in_every_way(prepared, name)
    pool = name.partition("-")[0]
    # The worker's own programs did run in it, so the witness is awake.
    assert find_owners(prepared, f"ld-{pool}") == {"nomarr"}


def test_what_a_stop_touches_is_no_variable_of_the_pools(prepared: Machine) -> None:
    """Variant C: the pool's own INVOCATION_ID and MAINPID."""
    restart(prepared, "tag-0", "INVOCATION_ID=../../../etc/precious\nMAINPID=1\n")
    before = prepared.account("tag-0").restart_count
    prepared.systemctl("stop", unit_of("tag-0"))
    assert prepared.path(PRECIOUS).read_text() == "kept\n"
    prepared.run("nomarrctl", "reconcile")
    assert prepared.account("tag-0").restart_count == before
    prepared.systemctl("start", unit_of("tag-0"))
    prepared.wait_until_running("tag-0")


def test_a_stop_is_known_while_journald_is_stopped(prepared: Machine) -> None:
    """The worker answers SIGTERM with exit status 1, which is a failure if nobody asked."""
    run = restart(prepared, "tag-0", TRACED)
    before = prepared.account("tag-0").restart_count
    prepared.systemctl("stop", *JOURNALD)
    try:
        prepared.systemctl("stop", unit_of("tag-0"))
        prepared.wait_for(lambda: prepared.account("tag-0").find(run), "the end is on record")
        record = prepared.account("tag-0").find(run)
        assert record is not None
        assert record.action == "ignore"
        prepared.run("nomarrctl", "reconcile")
        assert prepared.account("tag-0").restart_count == before
        assert prepared.get("tag-0", "ActiveState") == "failed"
        # A crash is still one.
        prepared.systemctl("start", unit_of("tag-0"))
        died = prepared.kill("tag-0")
        prepared.wait_until_running("tag-0", after=died)
        assert prepared.account("tag-0").restart_count == before + 1
    finally:
        prepared.systemctl("start", *JOURNALD)
    assert find_owners(prepared, "ld-tag") == {"nomarr"}
