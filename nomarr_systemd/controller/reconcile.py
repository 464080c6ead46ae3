"""The second look: failures whose line was lost, effects that were not finished, spooled records.

Safe at any time, any number of times, and beside the controller: what it finds goes through the
same ledger, which counts nothing twice, and effects are idempotent by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

from nomarr_systemd.controller.complaints import apart, complain
from nomarr_systemd.controller.death import Death
from nomarr_systemd.controller.failures import Controller
from nomarr_systemd.controller.pending import Pending, Waiting, read_pending
from nomarr_systemd.controller.stops import Facts
from nomarr_systemd.core.death import EX_TEMPFAIL, Failure, classify
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import (
    UNIT_PREFIX,
    UNIT_SUFFIX,
    Component,
    find_instance,
    next_start_job,
    parse_component,
)
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.time import age_ms
from nomarr_systemd.host import clock
from nomarr_systemd.host.files import remove
from nomarr_systemd.systemd.manager import SUPERVISOR, Masked, monotonic_ms

START_JOB_GRACE_MS: Final = 10_000
SETTLING_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.05
STOP_MARK_S: Final = 3600.0  # longer than any stop may take
EXIT_FACTS: Final = ("InvocationID", "Result", "ExecMainCode", "ExecMainStatus")
STATE_FACTS: Final = (
    *("ActiveState", "LoadState", "InvocationID", "Job"),
    *("ConditionResult", "ConditionTimestampMonotonic"),
)
# What SIGCHLD says: si_code as systemd shows it.
_EXIT_CODES: Final = {"1": "exited", "2": "killed", "3": "dumped"}


def reconcile(controller: Controller) -> None:
    """Look after everything that may have been left undone.

    A supervisor that came back meanwhile has asked for this run, which may have been past its
    workers already: then once more.
    """
    begun_ms = -1
    while _came_back(controller, begun_ms):
        begun_ms = monotonic_ms()
        with controller.alone():
            look_over(controller)
    # The supervisor may settle this moment what it was asked about.
    until = time.monotonic() + SETTLING_S
    while controller.outcomes.awaited and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN_S)
        with controller.alone():
            controller.outcomes.ask_again()


def _came_back(controller: Controller, since_ms: int) -> bool:
    if since_ms < 0:
        return True
    shown = controller.manager.show([SUPERVISOR], ["ActiveEnterTimestampMonotonic"])[SUPERVISOR]
    return int(shown["ActiveEnterTimestampMonotonic"] or 0) // 1000 > since_ms


def look_over(controller: Controller) -> None:
    """One pass."""
    controller.store.publish_all()
    controller.spool.replay(
        controller.ledger, lambda name: controller.config.find_rules(parse_component(name))
    )
    controller.handle(read_pending(controller.paths.pending))
    controller.handle(Waiting(find_failed(controller), []))
    controller.incidents.look_after()
    controller.outcomes.ask_all()
    finish_all(controller)
    clear_stop_marks(controller.paths.stop)


def finish_all(controller: Controller) -> None:
    for account, record in controller.ledger.unfinished():
        component = parse_component(account.component_id)
        with apart(component):
            finish(controller, component, record)


def end_incident(controller: Controller, pool: str, why: str) -> bool:
    """A person's word: start all that the incident holds. False if there is none."""
    with controller.alone():
        ended = controller.incidents.close(pool, why)
        controller.incidents.look_after()
        finish_all(controller)
    return ended


def see_to_the_rest(controller: Controller) -> bool:
    """Whatever takes longer than a decision: open incidents, and jobs that are being settled.
    Whether it has to be looked at again soon."""
    try:
        controller.outcomes.ask_again()
        is_open = _see_to_incidents(controller)
    except StoreError as error:
        complain(f"not looked after, since the store is away: {error}")
        return False
    return is_open or bool(controller.outcomes.awaited)


def _see_to_incidents(controller: Controller) -> bool:
    """Start what an incident that has ended held; whether any is open."""
    if not controller.incidents.were_open():
        return False
    is_open = controller.incidents.look_after()
    finish_all(controller)
    return is_open


def clear_stop_marks(directory: str) -> None:
    """Remove marks of stops that ended well: nobody else asks for them."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > STOP_MARK_S:
                remove(entry.path)


def find_failed(controller: Controller) -> list[Pending]:
    """Failed units, each as its hook would have reported it."""
    units = controller.manager.list_failed(f"{UNIT_PREFIX}*{UNIT_SUFFIX}")
    found = []
    for name, facts in controller.manager.show(units, EXIT_FACTS).items():
        component = find_instance(name.removeprefix(UNIT_PREFIX).removesuffix(UNIT_SUFFIX))
        if component is None:
            continue  # anybody can start our template with any name
        invocation = facts["InvocationID"]
        known = controller.ledger.account(component.component_id).find(invocation)
        if invocation and known is None:
            found.append(_as_pending(component, facts))
    return found


def _as_pending(component: Component, facts: Facts) -> Pending:
    exit_code = _EXIT_CODES.get(facts["ExecMainCode"], "")
    status = facts["ExecMainStatus"]
    if exit_code in ("killed", "dumped"):
        status = _signal_name(status)
    return Pending(component, facts["InvocationID"], facts["Result"], exit_code, status)


def _signal_name(number: str) -> str:
    try:
        return signal.Signals(int(number)).name.removeprefix("SIG")
    except ValueError:
        return number


def finish(controller: Controller, component: Component, record: Record) -> None:
    """Carry out, or see to have been carried out, one decision."""
    if record.action == "fail":
        # A power cut may have come before the mask, and the boot have started it: a unit that is
        # masked while it starts keeps its start job, and with it the boot, for ever.
        controller.manager.begin_stop(component.unit)
        controller.carry_out([(component, record)])
        return
    facts = controller.manager.show([component.unit, SUPERVISOR], STATE_FACTS)
    unit, supervisor = facts[component.unit], facts[SUPERVISOR]
    if unit["Job"] or controller.read_hold(component):
        return  # about to start, or not to
    base = record.invocation.partition("#")[0]
    is_as_left = unit["ActiveState"] == "failed" and unit["InvocationID"] == base
    if unit["LoadState"] == "masked":
        controller.ledger.set_effect(component.component_id, record.invocation, "done")
        return
    if not is_as_left or record.action == "hold":
        is_awaited = record.code == EX_TEMPFAIL and supervisor["ActiveState"] != "active"
        if is_as_left and is_awaited:
            return
        if is_as_left or _was_kept_down(unit):
            with contextlib.suppress(Masked):
                controller.manager.start(component.unit)
        controller.ledger.set_effect(component.component_id, record.invocation, "done")
        return
    state = controller.manager.timer_state(component)
    if state in ("waiting", "running"):
        return
    now = clock.now()
    if record.effect == "pending" or record.boot_id != now.boot_id:
        # Killed before it was scheduled, or the timer went with the last boot.
        controller.carry_out([(component, record._replace(effect="pending"))])
    elif record.effect == "started":
        if age_ms(record.due, now) > START_JOB_GRACE_MS:
            book_start_job(controller, component, record)
    elif state == "elapsed":
        # It fired, and the controller has not heard of it.
        controller.finish_backoff(component)
    else:
        # It was scheduled, it has not begun, and its timer is gone: somebody cancelled it.
        controller.ledger.set_effect(component.component_id, record.invocation, "done")


def _was_kept_down(unit: Facts) -> bool:
    """Whether a start, the boot's perhaps, met the hold: nothing has failed then."""
    asked = int(unit["ConditionTimestampMonotonic"] or 0) > 0
    return unit["ActiveState"] == "inactive" and asked and unit["ConditionResult"] == "no"


def book_start_job(controller: Controller, component: Component, record: Record) -> None:
    """The start was due and the unit is as it was: its start job failed, a failure of its own."""
    death = classify("", start_job=True)
    failure = Failure(next_start_job(record.invocation), death.kind, death.code)
    controller.book([Death(component, failure, death)])
