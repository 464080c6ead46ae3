"""Workers as values, gathered from systemd, the published ledger and the supervisor. If one of the
three does not answer or is damaged, a field says so and the others are still filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import TARGET, WANTED_PREFIX, Component
from nomarr_systemd.core.json import get_objects
from nomarr_systemd.host import clock
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.machine import is_full
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.public import KnownAccounts
from nomarr_systemd.ledger.spool import Spool
from nomarr_systemd.live import client
from nomarr_systemd.live.answers import parse_supervisor, parse_workers
from nomarr_systemd.operate.choose import choose
from nomarr_systemd.operate.worker_view import DOWN, View, explain_down, make_view
from nomarr_systemd.systemd.manager import SOON, SUPERVISOR, Manager
from nomarr_systemd.systemd.needs import find_lacking
from nomarr_systemd.systemd.running_units import read_invocation
from nomarr_systemd.systemd.stop_intent import UNIT_FACTS, WANTED_FACTS
from nomarr_systemd.systemd.timers import RESTART_TIMERS, timer_of

_STATES: Final = ("ActiveState", "SubState", "LoadState", "Job")  # in one list of all units
_RUNNING_FACTS: Final = (*_STATES, "MainPID", "ActiveEnterTimestampMonotonic")
FACTS: Final = (*_RUNNING_FACTS, "InvocationID")
# As systemd shows a unit that it has not loaded.
_NO_TIMER: Final = {"Job": "", "SubState": "dead", "NextElapseUSecMonotonic": ""}
_UNASKED: Final = dict.fromkeys(UNIT_FACTS, "")
_NOT_WANTED: Final = {**dict.fromkeys(WANTED_FACTS, ""), "ActiveState": "inactive"}
_FEW: Final = 16  # names; there may be thousands of such units


class Overview(NamedTuple):
    """The workers that were asked for. ``supervisor`` is what it says of itself; empty if it does
    not answer."""

    views: list[View]
    supervisor: dict[str, int]
    supervisor_unit: str  # its ActiveState
    user: bool
    total: int  # of workers, also if only those in trouble are shown
    spooled: int = 0  # deaths that wait for the ledger; 0 also for users who may not read them
    is_disk_full: bool = False  # of the ledger: what is published may be old
    accounts: Mapping[str, Account] = MappingProxyType({})  # by component, as published
    said: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # as the supervisor describes them


class Memory:
    """A cache for a program that looks often: the facts of runs that last, and the accounts whose
    files have not changed."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, str]] = {}  # by unit
        self.accounts = KnownAccounts()

    def show(
        self, manager: Manager, links: str, units: Sequence[str], *, brief: bool = False
    ) -> dict[str, dict[str, str]]:
        """Return FACTS of each unit; if ``brief``, those that run have only their state and run.

        ``links`` is the directory with systemd's link for each run, which is quicker to read than
        systemd is to ask: if it is the same before and after the questions, they are about this
        run.
        """
        states = manager.show(units, _STATES) if self._runs else {}
        runs = {unit: read_invocation(links, unit) for unit in units}
        same = {
            unit: self._runs[unit] | facts
            for unit, facts in states.items()
            if facts["ActiveState"] == "active"
            and not facts["Job"]
            and unit in self._runs
            and runs[unit] == self._runs[unit]["InvocationID"]
        }
        asked = _STATES if brief else _RUNNING_FACTS
        others = [unit for unit in units if unit not in same]
        shown = manager.show_each({unit: asked if runs[unit] else FACTS for unit in others})
        again = []
        for unit in filter(runs.get, others):
            shown[unit]["InvocationID"] = runs[unit]
            if shown[unit]["ActiveState"] != "active" or read_invocation(links, unit) != runs[unit]:
                again.append(unit)
        shown |= manager.show(again, FACTS) if again else {}
        shown |= same
        self._runs = {
            unit: facts
            for unit, facts in shown.items()
            if facts["ActiveState"] == "active" and facts["InvocationID"]
        }
        return {unit: shown[unit] for unit in units}


def look(
    scope: Scope,
    config: Config,
    names: Sequence[str],
    *,
    problems: bool = False,
    memory: Memory | None = None,
) -> Overview:
    """Return the named workers, or all of them; there may be none. ``problems``: only those in
    trouble."""
    workers = choose(config, names) if names else config.components()
    found = gather(scope, config, workers, memory)
    if problems:
        views = sorted((each for each in found.views if each.trouble), key=lambda each: each.rank)
        return found._replace(views=views)
    return found


def gather(
    scope: Scope,
    config: Config,
    workers: Sequence[Component],
    memory: Memory | None = None,
    *,
    brief: bool = False,
) -> Overview:
    """Ask systemd, the supervisor and the published ledger, once each. ``brief``: views of workers
    that run have no pid and no uptime."""
    memory = memory or Memory()
    manager = Manager(user=scope.user)
    units = [*(worker.unit for worker in workers), SUPERVISOR]
    shown = memory.show(manager, f"{scope.paths.runtime}/systemd/units", units, brief=brief)
    down = {each for each in workers if shown[each.unit]["ActiveState"] in DOWN}
    reasons = _ask_reasons(manager, sorted(down))
    is_looked_for = bool(down) and reasons[SOON]["ActiveState"] == "active"
    is_off = bool(down) and reasons[TARGET]["ActiveState"] == "inactive"
    unwanted = {each for each in down if reasons[each.wanted_unit]["ActiveState"] != "active"}
    may_lack = [
        each.unit
        for each in sorted(down - unwanted if is_off else down)
        if shown[each.unit]["LoadState"] != "masked"
    ]
    lacking = find_lacking(manager, may_lack)
    answer = client.ask(scope.paths.live, {"op": "snapshot"})
    live = parse_workers(answer) or {}
    held = Holds(scope.paths.hold).read_all(workers)
    now = clock.now()
    views = []
    accounts = {}
    for worker in workers:
        facts = shown[worker.unit]
        said = live.get(worker.component_id)
        known = memory.accounts.read(scope.paths.public, worker)
        accounts[worker.component_id] = known.account
        view = make_view(worker, config, facts, said, held.get(worker, ""), known, now)
        if worker in down:
            wanted, timer = (reasons[name] for name in (worker.wanted_unit, timer_of(worker)))
            about = reasons.get(worker.unit) or _UNASKED | facts
            view = explain_down(view, about, wanted, timer, is_looked_for=is_looked_for)
            view = view._replace(needs=lacking.get(worker.unit, ""))
            if is_off and worker in unwanted:
                # systemd forgets what it knew of them, also that a stop was requested.
                view = view._replace(idle="stopped", needs=f"{TARGET}, which is inactive")
        views.append(view)
    return Overview(
        views,
        parse_supervisor(answer),
        shown[SUPERVISOR].get("ActiveState", ""),
        scope.user,
        len(views),
        Spool(scope.paths.spool).count(),
        is_full(scope.paths.public),
        accounts=accounts,
        said={str(each.get("component")): each for each in get_objects(answer, "workers")},
    )


def _ask_reasons(manager: Manager, down: Sequence[Component]) -> dict[str, dict[str, str]]:
    """Ask systemd why workers are down: about each unit, its nomarr-wanted@ unit and its timer. Of
    those two it has loaded few, and is not made to load the others: that takes it long."""
    absent = {each.wanted_unit: _NOT_WANTED for each in down}
    absent |= {timer_of(each): _NO_TIMER for each in down}
    if not down:
        return {}
    patterns = list(absent) if len(absent) <= _FEW else (f"{WANTED_PREFIX}*", RESTART_TIMERS)
    loaded = manager.list_loaded(*patterns)
    questions: dict[str, Sequence[str]] = {
        unit: tuple(facts) for unit, facts in absent.items() if unit in loaded
    }
    # Which run is meant is a question only of a unit that is down and wanted.
    wanted = {unit for unit, facts in loaded.items() if facts["ActiveState"] == "active"}
    questions |= {each.unit: UNIT_FACTS for each in down if each.wanted_unit in wanted}
    questions |= dict.fromkeys((SOON, TARGET), ("ActiveState",))
    return absent | manager.show_each(questions)
