"""What is known of workers, gathered from systemd, the published ledger and the supervisor; as
values, for status and whoever else shows them. Whichever of the three is away, the rest is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.cli.common import Scope, choose
from nomarr_systemd.config.values import Config
from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.host import clock
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.live import client
from nomarr_systemd.systemd.manager import SUPERVISOR, Manager

FACTS: Final = (
    "ActiveState",
    "SubState",
    "LoadState",
    "Result",
    "MainPID",
    "InvocationID",
    "ActiveEnterTimestampMonotonic",
)


class View(NamedTuple):
    """One worker. ``health``, ``phase``, ``job`` and ``disagreement`` are the supervisor's."""

    worker: Component
    load: str
    active: str
    sub: str
    pid: int
    invocation: str
    uptime_ms: int | None
    health: str
    phase: str
    job: str
    disagreement: str
    held: str
    window_used: int
    window_limit: int
    window_s: float
    lifetime_used: int
    lifetime_limit: int
    next_restart_ms: int | None
    failure_reason: str
    last: Record | None
    last_age_ms: int | None

    @property
    def state(self) -> str:
        """One word for all of it: systemd's where it does not run, else its health."""
        if self.load == "masked":
            return "masked"
        if self.held and self.active != "active":
            return "paused" if self.held.startswith("paused") else "held"
        if self.active == "active":
            return self.health or "active"
        if self.active == "failed" and self.next_restart_ms is not None:
            return "restarting"
        return self.active

    def to_json(self) -> dict[str, Any]:
        worker, last = self.worker, self.last
        return {
            "component": worker.component_id,
            "pool": worker.pool,
            "instance": worker.instance,
            "unit": worker.unit,
            "state": self.state,
            "load": self.load,
            "active": self.active,
            "sub": self.sub,
            "pid": self.pid or None,
            "invocation": self.invocation or None,
            "uptime_s": None if self.uptime_ms is None else self.uptime_ms / 1000,
            "health": self.health or None,
            "phase": self.phase or None,
            "job": self.job or None,
            "disagreement": self.disagreement or None,
            "held": self.held or None,
            "window": {
                "used": self.window_used,
                "limit": self.window_limit,
                "window_s": self.window_s,
            },
            "lifetime": {"used": self.lifetime_used, "limit": self.lifetime_limit or None},
            "next_restart_in_s": None
            if self.next_restart_ms is None
            else self.next_restart_ms / 1000,
            "failure_reason": self.failure_reason or None,
            "last_crash": last
            and {
                "class": last.kind,
                "code": last.code,
                "word": crash_word(last),
                "wall_ms": last.wall_ms,
                "invocation": last.invocation,
                "run_ms": last.run_ms,
                "decision": last.action,
                "reason": last.text,
            },
        }


class Overview(NamedTuple):
    """All that were asked for. ``supervisor`` is empty when it does not answer."""

    views: list[View]
    supervisor: dict[str, Any]
    supervisor_unit: str  # systemd's word for it
    user: bool


def look(scope: Scope, config: Config, names: Sequence[str]) -> Overview:
    """The workers that a person named, or all of them; there may be none."""
    return gather(scope, config, choose(config, names) if names else config.components())


def gather(scope: Scope, config: Config, workers: Sequence[Component]) -> Overview:
    """Everything, as it is at this moment."""
    manager = Manager(user=scope.user)
    shown = manager.show([*(worker.unit for worker in workers), SUPERVISOR], FACTS)
    answer = client.ask(scope.paths.live, {"op": "snapshot"})
    live = {each["component"]: each for each in _list(answer, "workers") if "component" in each}
    holds = Holds(scope.paths.hold)
    now = clock.now()
    monotonic_us = time.monotonic_ns() // 1000
    views = []
    for worker in workers:
        facts = shown[worker.unit]
        said = live.get(worker.component_id, {})
        held = holds.read(worker)
        account = read_account(scope, worker)
        views.append(_view(worker, config, facts, said, held, account, now, monotonic_us))
    about = answer.get("supervisor")
    return Overview(
        views,
        about if isinstance(about, dict) else {},
        shown[SUPERVISOR].get("ActiveState", ""),
        scope.user,
    )


def read_account(scope: Scope, worker: Component) -> Account:
    """The worker's account as it is published; an empty one if nothing is."""
    path = f"{scope.paths.state}/public/{worker.instance}.json"
    try:
        with open(path, encoding="utf-8") as file:
            return book_keeping.from_doc(json.load(file))
    except (OSError, ValueError):
        return Account(worker.component_id)


def last_failure(account: Account) -> Record | None:
    """The newest decision about a death."""
    found = (each for each in reversed(account.records) if each.action in DECISIONS and each.kind)
    return next(found, None)


def due_in_ms(record: Record, now: Moment) -> int:
    """What is left of a backoff; one of an earlier boot goes by wall time."""
    if record.boot_id == now.boot_id:
        left = record.due.boottime_ms - now.boottime_ms
    else:
        left = min(record.due.wall_ms - now.wall_ms, record.delay_ms)
    return max(0, left)


def crash_word(record: Record) -> str:
    """A death in a word: ``exit 1``, ``SIGSEGV``, ``oom``, ``watchdog``."""
    if record.kind == "exit":
        return f"exit {record.code}"
    if record.kind in ("signal", "core-dump"):
        import signal

        try:
            return signal.Signals(-record.code).name
        except ValueError:
            return f"signal {-record.code}"
    return record.kind


def _view(
    worker: Component,
    config: Config,
    facts: dict[str, str],
    said: dict[str, Any],
    held: str,
    account: Account,
    now: Moment,
    monotonic_us: int,
) -> View:
    rules = config.rules_for(worker)
    stats = book_keeping.statistics(account, rules.window_s, now)
    last = last_failure(account)
    is_waiting = (
        facts["ActiveState"] == "failed"
        and not held
        and last is not None
        and last.action == "restart"
        and last.effect in ("pending", "scheduled")
        and last.invocation.partition("#")[0] == facts["InvocationID"]
    )
    is_up = facts["ActiveState"] == "active"
    since_us = int(facts.get("ActiveEnterTimestampMonotonic") or 0)
    health = _text(said, "status")
    return View(
        worker,
        facts["LoadState"],
        facts["ActiveState"],
        facts["SubState"],
        int(facts.get("MainPID") or 0),
        facts["InvocationID"],
        (monotonic_us - since_us) // 1000 if is_up and since_us else None,
        health,
        _text(said, "phase") if is_up else "",
        _text(said, "current_job") if is_up else "",
        _text(said, "disagreement") or _compare(facts, said),
        held,
        stats.window_restarts,
        rules.max_restarts,
        rules.window_s,
        stats.lifetime_restarts,
        rules.max_lifetime_restarts,
        due_in_ms(last, now) if is_waiting and last else None,
        account.failure_reason or "",
        last,
        age_ms(last.moment, now) if last else None,
    )


def _compare(facts: dict[str, str], said: dict[str, Any]) -> str:
    """A run that systemd shows and the supervisor does not see at all."""
    unseen = said and not said.get("invocation") and facts["SubState"] == "running"
    return "supervisor-blind" if unseen else ""


def _list(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Objects in an answer that may be anything."""
    found = answer.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _text(said: dict[str, Any], name: str) -> str:
    value = said.get(name)
    return "" if value is None or value == "" else str(value)[:500]
