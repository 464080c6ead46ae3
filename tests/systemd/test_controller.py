"""The whole way of a failure under a real systemd: hook, controller, ledger, timer, mask."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from nomarr_systemd.controller.act import MAX_REPORTS
from tests.support.crashes import (
    CRASHER,
    QUICK,
    SLOW,
    WORKER,
    account_of,
    install,
    kill,
    records_of,
    wait_for_record,
    wait_for_run,
)
from tests.support.lab import CHECKOUT, Lab, unit_of


def wait_for_words(lab: Lab, words: str, match: str) -> None:
    """Until the journal, which may lag behind, has them."""
    lab.wait_for(lambda: words in lab.journal(match, "--output=cat"), what=words)


def test_a_crash_is_booked_and_restarted(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    died = kill(lab)
    wait_for_run(lab, died)
    (record,) = records_of(lab)
    assert (record.invocation, record.action, record.kind, record.code) == (
        died, "restart", "signal", -9,
    )  # fmt: skip
    assert record.delay_ms == 100
    assert record.run_ms is not None
    lab.wait_for(lambda: not os.listdir(lab.paths.pending), what="pending is cleared")
    wait_for_words(lab, "tag-0: killed by SIGKILL after", "NOMARR_DECISION=restart")


def test_a_crash_loop_ends_masked_and_reset_brings_it_back(lab: Lab) -> None:
    install(lab, program=CRASHER, answer=1)
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked", what="tag-0 is masked")
    records = records_of(lab)
    assert [record.action for record in records] == ["restart"] * 5 + ["fail"]
    assert [record.delay_ms for record in records[:5]] == [100, 200, 400, 800, 1600]
    wait_for_record(lab, records[-1].invocation, "done")
    assert account_of(lab).failure_reason == "5 restarts within 5 min, the limit is 5"
    wait_for_words(lab, "Masked: 5 restarts within 5 min", "NOMARR_DECISION=fail")


def test_configuration_is_never_restarted(lab: Lab) -> None:
    install(lab, program=CRASHER, answer=78)
    lab.systemctl("start", "nomarr-worker@tag-0.service", check=False)
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked", what="tag-0 is masked")
    (record,) = records_of(lab)
    assert (record.kind, record.code, record.text) == (
        "config", 78, "exit status 78 is never restarted",
    )  # fmt: skip


def test_a_stop_that_ends_badly_is_not_counted(lab: Lab) -> None:
    install(lab, answer=1)
    lab.start("tag-0")
    invocation = lab.get("tag-0", "InvocationID")
    lab.stop("tag-0")
    record = wait_for_record(lab, invocation, "done")
    assert (record.action, record.text) == ("ignore", "a stop was asked for")
    assert account_of(lab).restart_count == 0


@pytest.mark.parametrize("stopped", ["nomarr-worker@tag-0.service", "nomarr-workers.target"])
def test_a_stop_during_a_backoff_cancels_it(lab: Lab, stopped: str) -> None:
    install(lab, SLOW)
    lab.systemctl("start", "nomarr-workers.target", check=False)
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    lab.wait_until("nomarr-restart@tag-0.timer", "active")
    lab.systemctl("stop", stopped)
    # The stop of what is part of it may come a moment later.
    lab.wait_until("nomarr-restart@tag-0.timer", "inactive")
    # Nor does the second look bring it back.
    lab.systemctl("start", "nomarr-reconcile.service")
    assert lab.get("nomarr-restart@tag-0.timer", "ActiveState") == "inactive"
    assert lab.get("tag-0", "ActiveState") == "failed"
    wait_for_record(lab, died, "done")


def test_a_manual_start_during_a_backoff_wins(lab: Lab) -> None:
    install(lab, SLOW)
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    lab.start("tag-0")
    run = lab.get("tag-0", "InvocationID")
    # The timer fires as if it were due: the restart sees that there is nothing to do.
    lab.systemctl("start", "nomarr-restart@tag-0.service")
    wait_for_record(lab, died, "done")
    assert lab.get("tag-0", "InvocationID") == run
    assert account_of(lab).restart_count == 1


def test_a_hold_keeps_it_down_and_counts_nothing(lab: Lab) -> None:
    install(lab)
    lab.start("tag-0")
    Path(lab.paths.hold, "tag-0").write_text("paused by uid 0\n")
    died = kill(lab)
    record = wait_for_record(lab, died, "pending")
    assert (record.action, record.text) == ("hold", "paused by uid 0")
    Path(lab.paths.hold, "tag-0").unlink()


def test_reloads_do_not_delay_a_backoff(lab: Lab) -> None:
    install(lab, QUICK.replace("0.1", "1.5"))
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    before = lab.get("nomarr-restart@tag-0.timer", "NextElapseUSecMonotonic")
    for _ in range(10):
        lab.reload()
    # Or it has fired meanwhile.
    after = lab.get("nomarr-restart@tag-0.timer", "NextElapseUSecMonotonic")
    assert after in (before, "infinity")
    wait_for_run(lab, died)


def test_what_was_lost_is_reconciled(lab: Lab) -> None:
    """No line, no file: only the failed unit itself is left to tell."""
    install(lab)
    lab.start("tag-0")
    lab.systemctl("stop", "nomarr-controller.socket", "nomarr-controller.service")
    died = kill(lab)
    lab.wait_until("tag-0", "failed")
    lab.wait_until("nomarr-wakeup.service", "inactive")
    for name in os.listdir(lab.paths.pending):
        Path(lab.paths.pending, name).unlink()
    for _ in range(3):
        lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, died)
    (record,) = records_of(lab)
    assert (record.invocation, record.kind, record.code) == (died, "signal", -9)


def test_a_timer_that_fired_unheard_is_made_up_for(lab: Lab) -> None:
    """systemd merges the start of a service into one that is under way: nobody rings then."""
    install(lab)
    silent = "[Service]\nExecStart=\nExecStart=/bin/true\n"
    lab.write_unit("nomarr-restart@.service.d/90-silent.conf", silent)
    lab.reload()
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    timer = "nomarr-restart@tag-0.timer"
    lab.wait_for(lambda: lab.get(timer, "SubState") == "elapsed", what="the backoff is over")
    assert lab.get("tag-0", "ActiveState") == "failed"
    lab.systemctl("start", "nomarr-reconcile.service")
    wait_for_run(lab, died)
    wait_for_record(lab, died, "started")
    lab.wait_for(lambda: lab.get(timer, "SubState") == "dead", what="the timer is gone")


def test_word_of_an_earlier_backoff_does_not_shorten_the_next(lab: Lab) -> None:
    install(lab, SLOW)
    lab.start("tag-0")
    died = kill(lab)
    wait_for_record(lab, died, "scheduled")
    word = Path(lab.paths.pending, "due-tag-0")
    word.write_text("DUE=1\nINSTANCE=tag-0\nEND=1\n")
    lab.systemctl("start", "nomarr-reconcile.service")
    assert not word.exists()
    assert lab.get("tag-0", "ActiveState") == "failed"
    assert lab.get("nomarr-restart@tag-0.timer", "SubState") == "waiting"


MANY = 200
LONG_S = 300.0
VERY_SLOW = SLOW.replace("30", "3600") + "backoff_max_s = 3600\n"


def test_two_hundred_at_once(lab: Lab) -> None:
    """A record and a timer each; then all fail for good, and are masked in few batches."""
    program = lab.write_program("worker", WORKER)
    lab.install(
        f'{VERY_SLOW}\n[pool.tag]\nworkers = {MANY}\ncommand = ["{program}", "78"]\n'
        "watchdog_s = 3600\n[pool.tag.unit]\nLimitCORE = 0\n"
    )
    lab.systemctl("start", "nomarr-controller.socket")
    names = [f"tag-{number}" for number in range(MANY)]
    start = ("start", *map(unit_of, names))
    lab.systemctl(*start, timeout_s=LONG_S)
    died = show_all(lab, names, "InvocationID")
    # Not alike: that would be an incident.
    for number, pid in enumerate(lab.main_pids(*names)):
        os.kill(pid, (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE)[number % 3])
    lab.wait_for(
        lambda: all(_effects(lab, name) == ["scheduled"] for name in names),
        timeout_s=LONG_S,
        what="all are booked",
    )
    for name in names:
        wait_for_record(lab, died[name], "scheduled", name)
        assert len(records_of(lab, name)) == 1
    timers = lab.systemctl("list-units", "--plain", "--no-legend", "nomarr-restart@*.timer")
    assert sorted(line.split()[0] for line in timers.splitlines()) == sorted(
        f"nomarr-restart@{name}.timer" for name in names
    )

    lab.systemctl(*start, timeout_s=LONG_S)
    reloads = lab.journal("-o", "cat").count("Reloading.")
    for pid in lab.main_pids(*names):
        os.kill(pid, signal.SIGTERM)
    lab.wait_for(
        lambda: set(show_all(lab, names, "LoadState").values()) == {"masked"},
        timeout_s=LONG_S,
        what="all are masked",
    )
    for name in names:
        assert [each.action for each in records_of(lab, name)] == ["restart", "fail"]
    batches = lab.journal("-o", "cat").count("Reloading.") - reloads
    print(f"{MANY} masks with {batches} reloads")
    assert batches < MANY / 4


def _effects(lab: Lab, name: str) -> list[str]:
    return [record.effect for record in records_of(lab, name)]


def show_all(lab: Lab, names: list[str], name: str) -> dict[str, str]:
    units = [f"nomarr-worker@{each}.service" for each in names]
    text = lab.systemctl("show", f"--property={name}", "--value", *units)
    return dict(zip(names, text.split(), strict=True))


def test_a_full_disk_keeps_nobody_down_and_loses_no_failure(lab: Lab) -> None:
    """Neither the ledger nor the spool can be written: what is pending stays so."""
    install(lab, QUICK + "backoff_max_s = 0.5\n")
    lab.start("tag-0")
    ledger, spool = Path(lab.paths.state, "ledger.db"), Path(lab.paths.spool)
    ledger.mkdir()
    spool.rmdir()
    spool.touch()
    first = kill(lab)
    wait_for_run(lab, first)
    second = kill(lab)
    wait_for_run(lab, second)
    assert {first, second} <= set(os.listdir(lab.paths.pending))
    ledger.rmdir()
    spool.unlink()
    lab.systemctl("start", "nomarr-reconcile.service")
    assert sorted(each.invocation for each in records_of(lab)) == sorted([first, second])
    assert os.listdir(lab.paths.pending) == []


def test_reports_in_memory_have_a_limit(lab: Lab) -> None:
    """While nothing can be written, a worker that dies again and again would fill /run."""
    install(lab, QUICK + "backoff_max_s = 0.5\n")
    lab.start("tag-0")
    ledger, spool = Path(lab.paths.state, "ledger.db"), Path(lab.paths.spool)
    ledger.mkdir()
    spool.rmdir()
    spool.touch()
    for number in range(1, MAX_REPORTS):
        Path(lab.paths.pending, f"{number:032x}").write_text(
            "MONITOR_UNIT=nomarr-worker@tag-0.service\n"
            f"MONITOR_INVOCATION_ID={number:032x}\n"
            "MONITOR_SERVICE_RESULT=signal\nMONITOR_EXIT_CODE=killed\nMONITOR_EXIT_STATUS=KILL\n"
            "INSTANCE=tag-0\nEND=1\n"
        )
    last = kill(lab)
    for _ in range(3):  # the last one is after the longest backoff
        lab.wait_for(
            lambda: lab.get("nomarr-restart@tag-0.timer", "SubState") != "waiting",
            what="its turn",
        )
        lab.systemctl("start", "nomarr-reconcile.service")
        assert lab.get("tag-0", "ActiveState") == "failed"
    assert len(os.listdir(lab.paths.pending)) >= MAX_REPORTS
    ledger.rmdir()
    spool.unlink()
    lab.systemctl("start", "nomarr-reconcile.service")
    assert last in {each.invocation for each in records_of(lab)}
    assert lab.get("tag-0", "LoadState") == "masked", "so many are too many"
    assert os.listdir(lab.paths.pending) == []


def test_a_store_that_is_away_loses_no_failure(lab: Lab) -> None:
    install(lab, QUICK + "backoff_max_s = 0.5\n")
    lab.start("tag-0")
    state = Path(lab.paths.state)
    (state / "ledger.db").mkdir()
    died = kill(lab)
    lab.wait_for(lambda: os.listdir(lab.paths.spool), what="the failure is spooled")
    wait_for_run(lab, died)
    (state / "ledger.db").rmdir()
    lab.systemctl("start", "nomarr-reconcile.service")
    (record,) = records_of(lab)
    assert (record.invocation, record.delay_ms) == (died, 500)
    assert os.listdir(lab.paths.spool) == []


MASK = """\
import sys
sys.path.insert(0, sys.argv[1])
from nomarr_systemd.controller.act import act
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.intents import Mask
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.systemd.manager import Manager
paths = Paths(*sys.argv[2:], user=True)
site = Site(paths, read_applied(paths), Manager(user=True))
act(site, [Mask(parse_component("tag-0"))])
site.close()
"""


def test_a_mask_stops_what_was_started_meanwhile(lab: Lab) -> None:
    """It was failed when it was observed, so no intent says that it has to be stopped. It ran for
    ever, and was called masked."""
    install(lab)
    lab.start("tag-0")
    paths = (str(CHECKOUT), lab.paths.runtime, lab.paths.state)
    lab.run([sys.executable, "-c", MASK, *paths])
    assert lab.get("tag-0", "LoadState") == "masked"
    lab.wait_until("tag-0", "inactive")
    assert lab.get("nomarr-wanted@tag-0.target", "ActiveState") == "inactive"
    lab.systemctl("start", "nomarr-reconcile.service")
    assert records_of(lab) == [], "that it ended is no failure"


@pytest.mark.parametrize("gone", [False, True], ids=["waiting", "gone"])
def test_a_mask_of_what_waits_to_start_leaves_no_job(lab: Lab, gone: bool) -> None:
    """Nor a record of an end, nor one when it is unmasked. Once a unit is masked it waits for
    nothing, so that systemd itself may end the job before anybody looks."""
    install(lab)
    lab.write_unit("slow.service", "[Service]\nType=oneshot\nExecStart=/bin/sleep 1000\n")
    waits = "[Unit]\nWants=slow.service\nAfter=slow.service\n"
    lab.write_unit("nomarr-worker@tag-0.service.d/50-slow.conf", waits)
    lab.reload()
    lab.systemctl("start", "--no-block", "nomarr-worker@tag-0.service")
    lab.wait_for(lambda: lab.get("tag-0", "Job"), what="its start job waits")
    if gone:
        lab.systemctl("cancel")
    lab.run([sys.executable, "-c", MASK, str(CHECKOUT), lab.paths.runtime, lab.paths.state])
    assert lab.get("tag-0", "LoadState") == "masked"
    lab.wait_for(lambda: not lab.get("tag-0", "Job"), what="the job is gone")
    lab.wait_until("nomarr-wanted@tag-0.target", "inactive")
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.systemctl("unmask", "nomarr-worker@tag-0.service")
    lab.systemctl("start", "nomarr-reconcile.service")
    assert records_of(lab) == []
    assert lab.get("tag-0", "ActiveState") == "inactive"
