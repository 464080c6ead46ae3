"""What systemd, the published ledger and the supervisor say of a worker now. If one does not
answer, a note says so and the others are still asked. The journal is read by ``run_log``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.account import Account, Statistics, statistics
from nomarr_systemd.core.errors import BadName, ConfigError, NoSuchWorker, NotPermitted
from nomarr_systemd.core.ids import TARGET, Component, split_invocation
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.core.text import ask_for, clean
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.public import list_published, read_whole
from nomarr_systemd.live import client
from nomarr_systemd.live.answers import (
    LiveWorker,
    RunSaid,
    parse_frames,
    parse_run,
    parse_worker,
)
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.stop_intent import WANTED_FACTS, was_asked_to_stop
from nomarr_systemd.systemd.systemctl import ManagerError

FACTS: Final = (
    "ActiveState", "SubState", "LoadState", "LoadError", "InvocationID", "Result", "ExecMainCode",
    "ExecMainStatus", "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic",
    "ActiveEnterTimestampMonotonic", "Requires", "Requisite", "BindsTo", "MemoryMax", "MemoryPeak",
    "Slice", "User", "ControlGroup", "ExecMainPID", "InactiveExitTimestampMonotonic",
    "InactiveEnterTimestampMonotonic", "ActiveExitTimestampMonotonic", "TasksMax",
    "WorkingDirectory", "Job",
)  # fmt: skip
_CORE_PATTERN: Final = "/proc/sys/kernel/core_pattern"
_LIVE_S: Final = 0.3
_SLOW_START_MS: Final = 10_000
Facts = dict[str, str]


class Witnesses(NamedTuple):
    """One worker as it is now. ``notes`` say what could not be read, and what to do about it."""

    component: Component
    paths: Paths
    now: Moment
    facts: Facts
    account: Account
    hold: str
    live: LiveWorker | None  # the supervisor's description; None if it does not answer
    notes: tuple[str, ...]
    is_stop_asked: bool = False  # the present or last run was asked to stop
    is_python: bool = False  # its pool has an entrypoint, so our runtime runs it
    catches_core_dumps: bool = False  # systemd-coredump does
    is_applied: bool = True  # False: it is configured, and nomarrctl apply was not run since
    window_s: float = 300.0  # of its restart policy
    is_target_active: bool = True  # False: nomarr-workers.target is inactive

    @property
    def statistics(self) -> Statistics:
        return statistics(self.account, self.window_s, self.now)

    @property
    def invocation(self) -> str:
        return self.facts.get("InvocationID", "")

    @property
    def is_failed(self) -> bool:
        return self.facts.get("ActiveState") == "failed"

    @property
    def is_running(self) -> bool:
        state = self.facts.get("ActiveState")
        return state in ("active", "activating", "reloading", "deactivating")

    @property
    def is_troubled(self) -> bool:
        """True if it runs and is not well: it starts for long, stops, or is not healthy."""
        state, said = self.facts.get("ActiveState"), self.live
        if state == "activating":
            began_ms = self.wall_ms_of("InactiveExitTimestampMonotonic")
            return self.now.wall_ms - began_ms > _SLOW_START_MS or not self.account.records
        if state != "active":
            return state == "deactivating"
        return said is not None and (
            bool(said.disagreement) or said.status in ("unhealthy", "recovering", "crashed")
        )

    @property
    def is_masked(self) -> bool:
        return self.facts.get("LoadState") == "masked"

    def wall_ms_of(self, name: str) -> int:
        """Return one of systemd's monotonic timestamps as wall time; 0 if it is not set."""
        value = int(self.facts.get(name) or 0) // 1000
        return self.now.wall_ms - (time.monotonic_ns() // 1_000_000 - value) if value else 0


def gather(paths: Paths, component: Component) -> Witnesses:
    """Ask systemd, the published ledger and the supervisor about a worker."""
    notes: list[str] = []
    facts: Facts = {}
    is_stop_asked, is_target_active = False, True
    try:
        questions = {component.unit: FACTS, component.wanted_unit: WANTED_FACTS}
        questions |= {TARGET: ("ActiveState",)}
        shown = Manager(user=paths.user).show_each(questions)
        facts = shown[component.unit]
        is_target_active = shown[TARGET]["ActiveState"] != "inactive"
        is_stop_asked = was_asked_to_stop(facts, shown[component.wanted_unit])
    except ManagerError as error:
        notes.append(f"systemd does not answer: {clean(str(error), 300)}")
    account = read_account(paths, component, notes)
    applied = _read_applied(paths)
    is_applied = component in applied.components() or bool(account.rows)
    live = ask_supervisor(paths, component) if is_applied else None
    if live is None and is_applied:
        notes.append(
            "The supervisor does not answer: frames, health and the current job are missing."
            f" See systemctl {'--user ' if paths.user else ''}status nomarr-supervisor.service"
        )
    may_read = os.access(paths.hold, os.X_OK)  # else the ledger's note says how to get access
    hold = Holds(paths.hold).read(component) if may_read else ""
    return Witnesses(
        component,
        paths,
        clock.now(),
        facts,
        account,
        hold,
        live,
        tuple(notes),
        is_stop_asked,
        any(pool.name == component.pool and pool.entrypoint for pool in applied.pools),
        _catches_core_dumps(),
        is_applied,
        applied.rules_for(component).window_s,
        is_target_active,
    )


def _catches_core_dumps() -> bool:
    try:
        with open(_CORE_PATTERN, encoding="ascii", errors="replace") as file:
            return "systemd-coredump" in file.read(512)
    except OSError:
        return False


def read_account(paths: Paths, component: Component, notes: list[str]) -> Account:
    """Return the published account with all its records; if it cannot be read, one without, and add
    a note."""
    account, problem = read_whole(paths.public, component)
    if problem:
        notes.append(problem)
    return account


def ask_supervisor(paths: Paths, component: Component) -> LiveWorker | None:
    """Return the supervisor's description of a worker; None if it does not answer in time."""
    topic = f"{component.component_id}:status"
    try:
        for event in client.subscribe(paths.live, [topic], total_s=_LIVE_S):
            if isinstance(event.get("worker"), dict):
                return parse_worker(event["worker"])
    except (client.NoSupervisor, OSError):
        pass
    return None


class RunQuestions:
    """Questions to the supervisor about runs of a worker. One that did not answer ``gather``, or
    one of these, is not asked again: ``notes`` say so then."""

    def __init__(self, witnesses: Witnesses) -> None:
        self._name = witnesses.component.component_id
        self._batch = client.Batch(witnesses.paths.live) if witnesses.live else None

    def read_frames(self, run: str) -> list[dict[str, Any]]:
        """Return the frames of a run that the supervisor still keeps, oldest first."""
        frames = parse_frames(self._ask({"op": "blackbox", "component": self._name}))
        return [fields for fields in frames if fields.get("invocation") == run]

    def ask_run(self, run: str) -> RunSaid:
        """Return what the supervisor knows of a run."""
        request = {"op": "label", "component": self._name, "invocation": run}
        return parse_run(self._ask(request))

    @property
    def is_answered(self) -> bool:
        return self._batch is not None and not self._batch.is_silent

    @property
    def notes(self) -> list[str]:
        """That an answer did not come in time."""
        if self._batch is None or self.is_answered:
            return []
        late = "The supervisor does not answer in time: frames of the run, or its job, are missing."
        return [f"{late} Ask again when the machine is less busy."]

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        return self._batch.ask(request) if self._batch else {}


def check_known(paths: Paths, config: Config | None, component: Component) -> None:
    """Raise NoSuchWorker, with the nearest name, unless the worker is configured or on record."""
    configured = config or _read_applied(paths)
    known = {each.instance for each in (*configured.components(), *list_workers(paths))}
    if component.instance in known:
        return
    near = ask_for(component.instance, known)
    listed = ", ".join(sorted(known)[:8])
    raise NoSuchWorker(
        f"{component} is neither configured nor on record",
        hint=near or (f"there are {listed}" if listed else "nomarrctl apply sets workers up"),
    )


def find_members(paths: Paths, config: Config | None, name: str) -> list[Component]:
    """Return the workers of a pool that are configured or on record; [] if it is no pool."""
    configured = config or _read_applied(paths)
    known = {*configured.components(), *list_workers(paths)}
    return sorted(each for each in known if each.pool == name)


def choose_run(witnesses: Witnesses, asked: str) -> tuple[str, Record | None]:
    """Return the run to report on and its record: the run asked for; of a worker that failed for
    good, the one that led to that; else the last that failed.

    The run is empty if none is known, or if there is more to tell of the present one; the record
    is None if the ledger has none.
    """
    records = [each for each in witnesses.account.records if each.action in DECISIONS]
    if asked:
        return _find_asked(records, asked)
    if witnesses.is_troubled:
        return "", None
    if witnesses.is_masked and witnesses.account.failure_reason:
        # The mask may have stopped a later run, which something had started before it.
        failed = next((each for each in reversed(records) if each.action == "fail"), None)
        if failed and failed.kind:  # the mark of a failed pool is no death
            return failed.invocation, failed
    known = {each.invocation.partition("#")[0] for each in records}
    if not witnesses.is_running and witnesses.invocation and witnesses.invocation not in known:
        return witnesses.invocation, None  # it was stopped, or is not booked yet
    last = find_last_death(witnesses.account)
    return (last.invocation, last) if last else ("", None)


def find_last_death(account: Account) -> Record | None:
    """Return the newest record of a run that ended or of a start that failed."""
    records = (each for each in reversed(account.records) if each.action in DECISIONS)
    return next((each for each in records if each.invocation), None)


def _find_asked(records: list[Record], asked: str) -> tuple[str, Record | None]:
    text = asked.lower()
    found = [each for each in records if each.invocation and each.invocation.startswith(text)]
    runs = {each.invocation.partition("#")[0] for each in found}
    if len(runs) > 1:
        raise BadName(
            f"{len(runs)} invocations begin with {clean(asked, 40)}", hint="write more of it"
        )
    if found:
        exact = [each for each in found if each.invocation == text]
        run_itself = [each for each in found if "#" not in each.invocation]
        record = (exact or run_itself or found)[-1]
        return record.invocation, record
    if re.fullmatch("[0-9a-f]{4,31}", text):
        return text, None  # the beginning of an id that is not on record
    run, _ = split_invocation(text)  # the journal may have a run that the ledger has dropped
    return run, None


def _read_applied(paths: Paths) -> Config:
    try:
        return read_applied(paths)
    except (ConfigError, NotPermitted):
        return Config()


def list_workers(paths: Paths, notes: list[str] | None = None) -> set[Component]:
    """Return the workers that have a published account."""
    found, problem = list_published(paths.public)
    if problem and notes is not None:
        notes.append(problem)
    return found
