"""What must not keep the controller from its work: other people's units, a store or a manager that
is away, settings that changed under its feet."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from nomarr_systemd.controller.main import run
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core import start_table
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.files import locked, write_durably
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.open import open_store
from nomarr_systemd.systemd.manager import Manager, monotonic_ms
from tests.support.crashes import (
    SLOW,
    account_of,
    install,
    kill,
    records_of,
    wait_for_record,
    wait_for_run,
)
from tests.support.lab import CHECKOUT, Lab
from tests.support.moments import death

AT_ONCE = "[policy]\nbackoff_base_s = 0\n"
STUBBORN = """\
#!/bin/sh
# Never ready; a stop ends it badly.
trap "exit 1" TERM
echo $$ > {begun}
while :; do sleep 1000 & wait $!; done
"""


def silence(lab: Lab) -> None:
    """No controller until the test starts the reconciler."""
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")


def die_unheard(lab: Lab, instance: str, number: int = signal.SIGKILL) -> str:
    died = kill(lab, instance, number)
    lab.wait_until(instance, "failed")
    lab.wait_until("nomarr-wakeup.service", "inactive")
    return died


def test_a_unit_that_names_no_worker_stops_nobody(lab: Lab) -> None:
    install(lab)
    lab.systemctl("start", "nomarr-worker@No-Worker.service", check=False)
    assert "No-Worker" in lab.systemctl("list-units", "--failed")
    lab.systemctl("start", "nomarr-reconcile.service")


def test_a_controller_that_hangs_is_replaced(lab: Lab) -> None:
    install(lab, AT_ONCE)
    quick = "[Service]\nWatchdogSec=5s\nTimeoutAbortSec=1s\n"
    lab.write_unit("nomarr-controller.service.d/99-quick.conf", quick)
    lab.reload()
    lab.start("tag-0", "tag-1")
    wait_for_run(lab, kill(lab))
    hung = lab.get("nomarr-controller.service", "InvocationID")
    os.kill(lab.main_pid("nomarr-controller.service"), signal.SIGSTOP)
    wait_for_run(lab, kill(lab, "tag-1"), "tag-1")
    assert lab.get("nomarr-controller.service", "InvocationID") != hung
    # One that only waits is left alone.
    waiting = lab.get("nomarr-controller.service", "InvocationID")
    lab.wait_for(lambda: idle_ms(lab) > 12_000, what="it waits for longer than its watchdog")
    assert lab.get("nomarr-controller.service", "InvocationID") == waiting


def idle_ms(lab: Lab) -> int:
    """How long the controller's present run has lasted."""
    began = int(lab.get("nomarr-controller.service", "ActiveEnterTimestampMonotonic"))
    return monotonic_ms() - began // 1000


def test_a_program_that_keeps_the_lock_is_named(lab: Lab) -> None:
    """Its watchdog would only begin the wait anew."""
    install(lab, AT_ONCE)
    quick = "[Service]\nWatchdogSec=45s\nTimeoutAbortSec=1s\n"
    lab.write_unit("nomarr-controller.service.d/99-quick.conf", quick)
    lab.reload()
    lab.start("tag-0")
    with locked(lab.paths.lock):
        died = kill(lab)
        said = "another program keeps this one from acting"
        lab.wait_for(lambda: lab.journal("-o", "cat").count(said) >= 1, what=said)
        waiting = lab.get("nomarr-controller.service", "InvocationID")
    wait_for_run(lab, died)
    assert lab.get("nomarr-controller.service", "InvocationID") == waiting


def test_a_worker_that_is_not_configured_is_nobodys(lab: Lab) -> None:
    """Masked, it would stay down if it were configured later."""
    install(lab)
    lab.systemctl("start", "nomarr-worker@tag-9.service", check=False)
    lab.wait_until("tag-9", "failed")
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_for(lambda: not os.listdir(lab.paths.pending), what="pending is cleared")
    assert lab.get("tag-9", "LoadState") == "loaded"
    assert records_of(lab, "tag-9") == []


def test_a_worker_that_somebody_masked_stops_nobody(lab: Lab) -> None:
    install(lab, AT_ONCE)
    lab.start("tag-0", "tag-1")
    silence(lab)
    masked, other = die_unheard(lab, "tag-0"), die_unheard(lab, "tag-1", signal.SIGUSR1)
    lab.systemctl("mask", "nomarr-worker@tag-0.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, other, "tag-1")
    assert wait_for_record(lab, masked, "done").action == "hold"
    assert lab.get("tag-0", "ActiveState") == "failed"


def test_a_worker_that_cannot_be_masked_stops_nobody(lab: Lab) -> None:
    install(lab, AT_ONCE, answer=78)
    # What systemctl edit --full makes: no link may be put in its place.
    own = Path(lab.units, "nomarr-worker@tag-0.service")
    own.write_text(Path(CHECKOUT, "units", "nomarr-worker@.service").read_text())
    lab.reload()
    lab.start("tag-0", "tag-1", "tag-2")
    silence(lab)
    failed = die_unheard(lab, "tag-0", signal.SIGTERM)
    die_unheard(lab, "tag-1", signal.SIGTERM)
    other = die_unheard(lab, "tag-2")
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, other, "tag-2")
    assert lab.get("tag-1", "LoadState") == "masked"
    assert wait_for_record(lab, failed, "pending").action == "fail"
    assert wait_for_masks(lab, 1) == [("tag-0", False), ("tag-1", True)]
    own.unlink()
    lab.reload()
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_record(lab, failed, "done")
    assert lab.get("tag-0", "LoadState") == "masked"
    assert wait_for_masks(lab, 2) == [("tag-0", False), ("tag-0", True), ("tag-1", True)]


def wait_for_masks(lab: Lab, count: int) -> list[tuple[str, bool]]:
    """Which workers the journal says have failed for good, and whether it calls them masked, when
    ``count`` entries say so."""

    def look() -> list[tuple[str, bool]]:
        lines = lab.journal("-o", "cat", "NOMARR_DECISION=fail").splitlines()
        found = [(line.partition(":")[0], "Masked:" in line) for line in lines]
        return sorted(found) if sum(masked for _, masked in found) == count else []

    return lab.wait_for(look, what="the journal tells of masks")


def test_a_backoff_ends_while_the_store_is_away(lab: Lab) -> None:
    install(lab, SLOW)
    lab.start("tag-0", "tag-1")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    lab.stop("tag-1")
    lab.systemctl("stop", "nomarr-controller.service")
    aside = Path(lab.directory, "aside")
    aside.mkdir()
    for path in Path(lab.paths.state).glob("ledger.db*"):
        path.rename(aside / path.name)
    Path(lab.paths.state, "ledger.db").mkdir()
    lab.systemctl("start", "nomarr-restart@tag-0.service")
    wait_for_run(lab, died)


def test_new_settings_are_used_at_once(lab: Lab) -> None:
    install(lab, SLOW)
    lab.start("tag-0", "tag-1")
    wait_for_record(lab, kill(lab, "tag-1"), "scheduled", "tag-1")
    assert lab.get("nomarr-controller.service", "ActiveState") == "active"
    text = json.dumps(lab.config.to_dict()).replace(
        '"backoff_base_s": 30.0', '"backoff_base_s": 0.1'
    )
    write_durably(lab.paths.resolved, text.encode())
    died = kill(lab)
    wait_for_run(lab, died)
    assert records_of(lab)[0].delay_ms == 100


def test_a_start_that_waits_for_something_else_has_not_failed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab.write_program("slow", "#!/bin/sh\nexec sleep 1000\n")
    lab.write_unit("slow.service", f"[Service]\nType=oneshot\nExecStart={program}\n")
    worker = '["/bin/sh", "-c", "systemd-notify --ready; exec sleep 1000"]'
    lab.install(
        f"{AT_ONCE}[pool.tag]\ncommand = {worker}\nwatchdog_s = 3600\n"
        '[pool.tag.unit]\nAfter = "slow.service"\n'
    )
    lab.systemctl("start", "nomarr-controller.socket")
    lab.start("tag-0")
    lab.systemctl("start", "--no-block", "slow.service")
    died = kill(lab)
    wait_for_record(lab, died, "started")
    assert lab.get("tag-0", "Job")
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start_table, "START_JOB_GRACE_MS", -1)
    manager = Manager(user=True)
    with contextlib.closing(Site(lab.paths, lab.config, manager)) as site, site.alone():
        run(site, everybody=True)
    assert [record.invocation for record in records_of(lab)] == [died]
    lab.systemctl("kill", "--signal=KILL", "slow.service")
    wait_for_run(lab, died)


def test_a_stop_while_it_starts_is_not_counted(lab: Lab) -> None:
    begun = Path(lab.directory, "begun")
    install(lab, program=STUBBORN.replace("{begun}", str(begun)))
    lab.systemctl("start", "--no-block", "nomarr-worker@tag-0.service")
    lab.wait_for(lambda: begun.exists() and begun.read_text(), what="it begins")
    run = lab.get("tag-0", "InvocationID")
    lab.stop("tag-0")
    assert lab.get("tag-0", "Result") == "exit-code"
    record = wait_for_record(lab, run, "done")
    assert (record.action, record.text) == ("ignore", "a stop was asked for")
    # Without a stop the same end counts.
    begun.unlink()
    lab.systemctl("start", "--no-block", "nomarr-worker@tag-0.service")
    lab.wait_for(lambda: begun.exists() and begun.read_text(), what="it begins")
    run = lab.get("tag-0", "InvocationID")
    os.kill(lab.main_pid("tag-0"), signal.SIGTERM)
    lab.wait_for(lambda: account_of(lab).find(run), what="it is booked")
    assert account_of(lab).restart_count == 1


def test_a_slow_stop_holds_nobody_up(lab: Lab) -> None:
    """Failed for good, but started again before the mask, as a boot after a power cut does it."""
    text = "trap : TERM\nsystemd-notify --ready\nwhile :; do sleep 1000 & wait; done\n"
    program = lab.write_program("worker", f"#!/bin/sh\n{text}")
    lab.install(f'[pool.tag]\ncommand = ["{program}"]\nwatchdog_s = 3600\n')
    lab.start("tag-0")
    component = parse_component("tag-0")
    with contextlib.closing(open_store(lab.config.store.url, "policy")) as store:
        failure = death("0" * 32, "config", 78)
        rules = lab.config.find_rules(component)
        Ledger(store).record_failure(failure, rules)
    lab.systemctl("start", "nomarr-reconcile.service")
    assert lab.get("tag-0", "LoadState") == "masked"
    assert lab.get("tag-0", "ActiveState") == "deactivating"
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    lab.wait_until("tag-0", "failed", "inactive")


@pytest.mark.parametrize("name", ["controller", "supervisor"])
def test_a_program_that_is_gone_is_not_tried_without_a_pause(lab: Lab, name: str) -> None:
    """As after a purge of the package, which leaves the units of users alone."""
    install(lab)
    unit = f"nomarr-{name}.service"
    lab.systemctl("start", unit)
    Path(lab.libexec, f"nomarr-{name}").unlink()
    lab.systemctl("kill", "--signal=KILL", unit)

    def pauses() -> bool:
        with contextlib.suppress(OSError):
            pid = lab.show(unit, "ControlPID")["ControlPID"]
            return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        return False

    lab.wait_for(pauses, what="it pauses before it is tried again")
