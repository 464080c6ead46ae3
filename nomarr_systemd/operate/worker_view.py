"""One worker as a value, made from what systemd, the published ledger and the supervisor say of it,
and why it is down. Nothing is asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account, Statistics
from nomarr_systemd.core.death import ENDED
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import find_failed, find_quarantined
from nomarr_systemd.core.ledger_record import DECISIONS, Record, crash_word
from nomarr_systemd.core.policy import LastChance, Rules, find_last_chance
from nomarr_systemd.core.start_table import due_in_ms
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.host import clock
from nomarr_systemd.ledger.public import Published
from nomarr_systemd.live.answers import LiveWorker
from nomarr_systemd.systemd import stop_intent
from nomarr_systemd.systemd.manager import monotonic_ms
from nomarr_systemd.systemd.timers import read_timer

# Why a worker is down: a person stopped it; it ended well and may; something has to come first; a
# restart is due; it failed just now, and the reconciler will look; nothing will start it.
Idle = Literal["", "stopped", "finished", "waiting", "restarting", "undecided", "lost"]
DOWN: Final = ("inactive", "failed")
_SICK: Final = ("unhealthy", "recovering", "crashed", "failed")
_HOUR_MS: Final = 3_600_000


class View(NamedTuple):
    """One worker. ``health``, ``phase``, ``job`` and ``disagreement`` come from the supervisor.

    With a ``ledger_problem`` nothing is known of its restarts: fields that come from the ledger
    are empty.
    """

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
    ledger_problem: str = ""
    last_chance: LastChance = ""  # the limit that the next failure would break: then it is masked
    last_frame_wall_ms: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})  # of its last frame
    statistics: Statistics = Statistics(0, 0, 0, 0.0, 0)
    note: str = ""  # of its last frame: why it is not healthy
    idle: Idle = ""
    killed_by_jobs: int = 0  # restarts within the last hour that were refunded for a job
    needs: str = ""  # of one that is down: a unit that it requires and that is not active

    @property
    def state(self) -> str:
        """One word: why it does not run, or systemd's state, or else its health."""
        if self.load == "masked":
            return "masked"
        if self.held and self.active != "active":
            return "paused" if self.held.startswith("paused") else "held"
        if self.active == "active":
            return self.health or "active"
        return self.active if self.idle in ("", "undecided", "lost") else self.idle

    @property
    def is_healthy(self) -> bool:
        return self.active == "active" and self.health == "healthy" and not self.disagreement

    @property
    def trouble(self) -> str:
        """What is wrong with it, in one sentence; empty if it runs well, or is down because a
        person, its settings or its end want that."""
        if self.load == "masked":
            if not self.failure_reason:
                return "masked, but not by a decision on record: it was masked by hand"
            return f"failed for good: {self.failure_reason}"
        if self.load not in ("loaded", ""):
            return f"systemd cannot load its unit: {self.load}"
        if self.held.startswith("paused"):
            return ""
        if self.held:
            return f"held: {self.held}"
        if self.active in DOWN:
            return self._explain_down()
        if self.ledger_problem:
            return self.ledger_problem
        if self.disagreement:
            return f"systemd and its pipe disagree: {self.disagreement}"
        if self.active == "active" and self.health in _SICK:
            why = ": ".join(each for each in (self.phase, self.note) if each)
            return f"{self.health}, {why}" if why else self.health
        if self.killed_by_jobs >= max(1, self.window_limit):
            return f"jobs killed it {self.killed_by_jobs} times within an hour"
        return describe_last_chance(self.last_chance) if self.last_chance else ""

    def _explain_down(self) -> str:
        match self.idle:
            case "restarting":
                return "it failed, and its restart is due"
            case "waiting":
                needed = f"it needs {self.needs}" if self.needs else ""
                return f"it waits: {needed or (self.last.text if self.last else '')}"
            case "stopped":
                return f"it was stopped with {self.needs}" if self.needs else ""
            case "finished":
                return ""
            case "undecided":
                return f"it has just become {self.active}, and what follows is not decided yet"
            case _:
                return f"it is {self.active}, and nothing will start it"

    @property
    def rank(self) -> int:
        """Its place among others, the worst first."""
        if self.trouble:
            is_up = self.active not in DOWN and self.load != "masked"
            return 2 if is_up else 1 if self.state in ("restarting", "held", "waiting") else 0
        return 5 if self.is_healthy else 4 if self.active in DOWN else 3

    def to_json(self) -> dict[str, Any]:
        worker, last = self.worker, self.last
        return {
            "component": worker.component_id,
            "pool": worker.pool,
            "instance": worker.instance,
            "unit": worker.unit,
            "state": self.state,
            "trouble": self.trouble or None,
            "load": self.load,
            "active": self.active,
            "sub": self.sub,
            "pid": self.pid or None,
            "invocation": self.invocation or None,
            "uptime_s": None if self.uptime_ms is None else self.uptime_ms / 1000,
            "health": self.health or None,
            "phase": self.phase or None,
            "note": self.note or None,
            "job": self.job or None,
            "disagreement": self.disagreement or None,
            "held": self.held or None,
            "window": {
                "used": None if self.ledger_problem else self.window_used,
                "limit": self.window_limit,
                "window_s": self.window_s,
            },
            "lifetime": {
                "used": None if self.ledger_problem else self.lifetime_used,
                "limit": self.lifetime_limit or None,
            },
            "last_chance": self.last_chance or None,
            "next_restart_in_s": None
            if self.next_restart_ms is None
            else self.next_restart_ms / 1000,
            "failure_reason": self.failure_reason or None,
            "ledger_problem": self.ledger_problem or None,
            "last_frame_wall_ms": self.last_frame_wall_ms,
            "metrics": dict(self.metrics) or None,
            "statistics": None if self.ledger_problem else self.statistics.to_json(),
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


def _last_failure(account: Account) -> Record | None:
    """Return the newest record of a death."""
    records = map(Record.read, reversed(account.rows))
    return next((each for each in records if each.action in DECISIONS and each.kind), None)


def _count_blamed_jobs(account: Account, now: Moment) -> int:
    """Count the restarts within the last hour that were refunded because of a job."""
    rows = [Record.read(row) for row in account.rows if "|refund|" in row]
    return sum(
        each.action == "refund"
        and bool(find_failed(each.text) or find_quarantined(each.text))
        and age_ms(each.moment, now) < _HOUR_MS
        for each in rows
    )


def _last_chance_of(stats: Statistics, lifetime_used: int, rules: Rules) -> LastChance:
    """Return the limit that the next failure would break; "" for a worker that never failed."""
    if not stats.lifetime_restarts:
        return ""
    return find_last_chance(stats.window_restarts, lifetime_used, rules)


def describe_last_chance(limit: LastChance) -> str:
    """Return what a failure would lead to that breaks this limit."""
    soon = "another failure too soon" if limit == "window" else "the next failure"
    where = "in its window" if limit == "window" else "of its lifetime"
    return f"no restart is left {where}, and {soon} masks it"


def make_view(
    worker: Component,
    config: Config,
    facts: dict[str, str],
    said: LiveWorker | None,
    held: str,
    published: Published,
    now: Moment,
) -> View:
    account = published.account
    rules = config.rules_for(worker)
    stats = book_keeping.statistics(account, rules.window_s, now)
    lifetime_used = book_keeping.count_lifetime(account, rules, now)
    is_masked = facts["LoadState"] == "masked"
    last = _last_failure(account)
    is_up = facts["ActiveState"] == "active"
    since_ms = int(facts.get("ActiveEnterTimestampMonotonic") or 0) // 1000
    return View(
        worker,
        facts["LoadState"],
        facts["ActiveState"],
        facts["SubState"],
        int(facts.get("MainPID") or 0),
        facts["InvocationID"],
        monotonic_ms() - since_ms if is_up and since_ms else None,
        said.status if said else "",
        said.phase if said and is_up else "",
        said.job if said and is_up else "",
        (said.disagreement or _compare(facts, said)) if said else "",
        held,
        stats.window_restarts,
        rules.max_restarts,
        rules.window_s,
        lifetime_used,
        rules.max_lifetime_restarts,
        None,
        account.failure_reason or "",
        last,
        age_ms(last.moment, now) if last else None,
        published.problem,
        "" if is_masked or published.problem else _last_chance_of(stats, lifetime_used, rules),
        now.wall_ms - round(said.frame_age_s * 1000)
        if said and is_up and said.frame_age_s is not None
        else None,
        said.metrics if said and is_up else {},
        stats,
        said.note if said and is_up else "",
        killed_by_jobs=_count_blamed_jobs(account, now),
    )


def explain_down(
    view: View,
    facts: dict[str, str],
    wanted: dict[str, str],
    timer: dict[str, str],
    *,
    is_looked_for: bool,
) -> View:
    """Say why a worker is down, by what systemd shows and by the last decision about its run.
    ``is_looked_for``: the reconciler looks for such workers within a minute."""
    last = view.last
    run = stop_intent.find_run(facts, wanted)
    if last is not None and last.invocation.partition("#")[0] != run:
        last = None
    is_owed = last is not None and last.effect != "done"
    idle: Idle = "lost"
    if not stop_intent.is_wanted(wanted):
        idle = "stopped"
    elif last and last.action == "ignore" and last.kind == ENDED.kind:
        idle = "finished"
    elif last and last.action == "restart" and is_owed:
        idle = "restarting"
    elif last and last.action == "hold" and is_owed:
        idle = "waiting"
    elif read_timer(timer) == "waiting":  # decided without the ledger, which was away
        idle = "restarting"
    elif is_looked_for and not last and stop_intent.has_begun(facts, wanted):
        idle = "undecided"
    is_due = idle == "restarting" and not view.held
    due_ms = max(0, due_in_ms(last, clock.now())) if last and is_due else None
    elapses = timer["NextElapseUSecMonotonic"]
    if is_due and due_ms is None and elapses.isdigit():
        due_ms = max(0, int(elapses) // 1000 - monotonic_ms())
    return view._replace(idle=idle, next_restart_ms=due_ms)


def _compare(facts: dict[str, str], said: LiveWorker) -> str:
    """``supervisor-blind`` for a run that systemd shows and the supervisor does not see."""
    unseen = not said.invocation and facts["SubState"] == "running"
    return "supervisor-blind" if unseen else ""
