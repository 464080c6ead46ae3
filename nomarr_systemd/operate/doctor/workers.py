"""Checks of the supervisor and of the workers: each that is down must be meant to be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from nomarr_systemd.core.errors import NotPermitted
from nomarr_systemd.core.ids import TARGET, UNIT_PREFIX, UNIT_SUFFIX, Component
from nomarr_systemd.core.text import count
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import VIEWERS
from nomarr_systemd.ledger.public import list_published
from nomarr_systemd.live import client
from nomarr_systemd.operate import controlling
from nomarr_systemd.operate.doctor.installation import (
    Found,
    Installation,
    Level,
    is_fifo,
    list_some,
)
from nomarr_systemd.operate.overview import gather
from nomarr_systemd.operate.worker_view import View, describe_last_chance
from nomarr_systemd.supervisor.pipe_store import PARCEL
from nomarr_systemd.systemd.manager import SUPERVISOR

_AGAIN_S: Final = 2.0  # a death is booked and its restart scheduled by then


def check_supervisor(it: Installation) -> Found:
    restart = f"{it.systemctl} restart {SUPERVISOR}"
    try:
        client.check_access(it.paths.live)
    except NotPermitted:
        yield "warn", f"only root and the group {VIEWERS} may ask it", f"sudo {it.nomarrctl} doctor"
    else:
        if it.overview.supervisor:
            yield "ok", "the supervisor answers", ""
        else:
            yield "bad", f"the supervisor does not answer on {it.paths.live}", restart
    shown = it.manager.show([SUPERVISOR], ["NFileDescriptorStore"])[SUPERVISOR]
    parcels = int(shown.get("NFileDescriptorStore") or 0)
    stored = min(parcels * PARCEL, it.overview.supervisor.get("stored_pipes", len(it.workers)))
    if stored < len(it.workers):
        yield "bad", "systemd does not keep all pipes of the supervisor", restart
    else:
        yield "ok", f"systemd keeps the pipes of {count(len(it.workers))}", ""
    missing = [
        each.instance for each in it.workers if not is_fifo(f"{it.paths.health}/{each.instance}")
    ]
    if missing:
        # A worker keeps the pipe that was removed open: it is started again to open the new one.
        mend = f"{restart} && {it.nomarrctl} restart {' '.join(missing)}"
        yield "bad", f"no pipe for {list_some(missing)}", mend


def check_workers(it: Installation) -> Found:
    """Masks, holds and the ledger must agree, and no worker may be down without a reason."""
    _, closed = list_published(it.paths.public)
    if closed:
        yield "warn", closed, f"sudo {it.nomarrctl} doctor"
    views = it.overview.views
    for view in () if closed else views:
        name = view.worker.instance
        reset = f"{it.nomarrctl} reset --start {name}"
        is_masked = view.load == "masked"
        if view.ledger_problem:
            yield "bad", view.ledger_problem, f"{it.nomarrctl} reconcile"
        elif is_masked and not view.failure_reason:
            yield "bad", f"{name} is masked, and the ledger does not know why", reset
        elif view.failure_reason and not is_masked:
            yield "bad", f"{name} has failed for good, but is not masked", reset
        elif view.trouble and view.killed_by_jobs >= max(1, view.window_limit):
            listing = f"{it.nomarrctl} jobs list --pool {view.worker.pool}"
            text = f"{name}: jobs killed it {view.killed_by_jobs} times within an hour"
            yield "warn", text, f"{listing} --status error --status quarantined"
        elif view.last_chance:
            mend = f"{it.nomarrctl} why {name}; when mended: {it.nomarrctl} reset {name}"
            yield "warn", f"{name}: {describe_last_chance(view.last_chance)}", mend
    failed = [view.worker for view in views if view.load == "masked" and view.failure_reason]
    if failed:
        text = f"{count(len(failed))} failed for good: {_name(failed)}"
        first = failed[0].instance
        mend = f"{it.nomarrctl} reset --start {_all(failed)}"
        yield "bad", f"{text}. {it.nomarrctl} why {first} tells why; when that is mended:", mend
    yield from _check_holds(it, views)
    yield from _check_down(it, views)
    yield from _check_strangers(it)
    yield "ok", f"{count(len(it.workers))} configured", ""


def _check_holds(it: Installation, views: Iterable[View]) -> Found:
    held = [view for view in views if view.held]
    holds = Holds(it.paths.hold)
    paused = [view.worker for view in held if holds.is_paused(view.worker)]
    if paused:
        text = f"{count(len(paused))} paused: {_name(paused)}"
        yield "warn", text, f"{it.nomarrctl} resume {_all(paused)}"
    for view in held:
        name = view.worker.instance
        if view.worker in paused:
            continue
        if controlling.is_incident(view.held):
            yield (
                "warn",
                f"{name} is held: {view.held}",
                f"{it.nomarrctl} status {view.worker.pool}",
            )
        else:
            path = f"{it.paths.hold}/{name}"
            text = f"{name} is held by {path}, which nomarrctl did not write: {view.held}"
            yield "bad", text, f"rm -r {path} && {it.systemctl} start {view.worker.unit}"


def _check_down(it: Installation, views: Sequence[View]) -> Found:
    """Workers that nothing will start. Those that died just now get the time to be decided on."""
    # Of the target itself check_services knows.
    down = [view for view in views if _is_down(view) and not view.needs.startswith(TARGET)]
    if any(view.idle in ("undecided", "lost") for view in down):
        time.sleep(_AGAIN_S)
        again = gather(it.scope, it.config, [view.worker for view in down]).views
        runs = {view.worker: view.invocation for view in down}
        down = [view for view in again if _is_down(view) and view.invocation == runs[view.worker]]
    for view in views:
        if view.load not in ("loaded", "masked", ""):
            text = f"{view.worker.instance}: {view.trouble}"
            yield "bad", text, f"{it.systemctl} status {view.worker.unit}; {it.nomarrctl} apply"
    for view in down:
        if view.needs:
            units = f"{view.needs.partition(',')[0]} {view.worker.unit}"
            text = f"{view.worker.instance}: {view.trouble}"
            yield "bad", text, f"{it.systemctl} start {units}"
    for idle, why in (
        ("stopped", "stopped by hand"),
        ("finished", 'finished (on_clean_exit is "stay")'),
        ("waiting", "waiting for a unit that it needs, or for its turn"),
        ("undecided", "just went down, and not decided about yet"),
        ("lost", "down, and nothing will start "),
    ):
        workers = [view.worker for view in down if view.idle == idle and not view.needs]
        if workers:
            units = " ".join(worker.unit for worker in workers)
            it_or_them = ("it" if len(workers) == 1 else "them") if idle == "lost" else ""
            text = f"{count(len(workers))} {why}{it_or_them}: {_name(workers)}"
            level: Level = "bad" if idle == "lost" else "ok" if idle == "finished" else "warn"
            mend = (
                f"{it.nomarrctl} reconcile"
                if idle == "undecided"
                else f"{it.systemctl} start {units}"
            )
            yield level, text, "" if level == "ok" else mend


def _is_down(view: View) -> bool:
    """Return True if it does not run, and neither a hold, a mask nor a restart that is due says
    why."""
    is_told = view.held or view.failure_reason or view.idle == "restarting"
    return view.idle != "" and view.load == "loaded" and not is_told


def _check_strangers(it: Installation) -> Found:
    units = {worker.unit for worker in it.workers}
    for name in it.manager.list_failed(f"{UNIT_PREFIX}*{UNIT_SUFFIX}"):
        if name not in units:
            mend = f"{it.systemctl} reset-failed {name}"
            yield "bad", f"{name} has failed and is not configured", mend


def _name(workers: Sequence[Component]) -> str:
    return list_some([worker.instance for worker in workers])


def _all(workers: Sequence[Component]) -> str:
    return " ".join(worker.instance for worker in workers)
