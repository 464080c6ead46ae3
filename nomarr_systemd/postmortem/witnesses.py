"""What is known at this moment, from everyone but the journal: systemd, the ledger's published
account, the supervisor. Each of them may be away; then that is said and the rest is shown.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import name_signal
from nomarr_systemd.core.errors import BadName, ConfigError, NoSuchWorker
from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.core.ids import Component, split_invocation
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.core.text import ask_for, clean
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger.public import list_published, read_published
from nomarr_systemd.live import client
from nomarr_systemd.systemd.manager import Manager, ManagerError

FACTS: Final = (
    "ActiveState", "SubState", "LoadState", "LoadError", "InvocationID", "Result", "ExecMainCode",
    "ExecMainStatus", "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic",
    "ActiveEnterTimestampMonotonic", "Requires", "Requisite", "BindsTo", "MemoryMax", "MemoryPeak",
    "Slice", "User", "ControlGroup", "ExecMainPID",
)  # fmt: skip
_EXIT_CODES: Final = {"1": "exited", "2": "killed", "3": "dumped"}
_LIVE_S: Final = 0.3
Facts = dict[str, str]


class Scene(NamedTuple):
    """One worker as it is now. ``notes`` say what could not be had, and how it could."""

    component: Component
    paths: Paths
    now: Moment
    facts: Facts
    account: Account
    hold: str
    live: dict[str, Any]  # the supervisor's word; {} if it is away
    notes: tuple[str, ...]

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
    def is_masked(self) -> bool:
        return self.facts.get("LoadState") == "masked"

    def wall_ms_of(self, name: str) -> int:
        """One of systemd's monotonic timestamps as wall time; 0 if there is none."""
        value = int(self.facts.get(name) or 0) // 1000
        return self.now.wall_ms - (time.monotonic_ns() // 1_000_000 - value) if value else 0

    def exit_words(self) -> tuple[str, str, str]:
        """Result, code and status of the last run, as core.exits has them."""
        code = _EXIT_CODES.get(self.facts.get("ExecMainCode", ""), "")
        status = self.facts.get("ExecMainStatus", "")
        return self.facts.get("Result", ""), code, spell_status(code, status)


def spell_status(code: str, status: str) -> str:
    """systemd's number for how a process ended; signals by their names."""
    if code in ("killed", "dumped") and status.isascii() and status.isdigit():
        return name_signal(int(status[:4]))
    return status


def gather(paths: Paths, component: Component) -> Scene:
    """Ask everyone, briefly."""
    notes: list[str] = []
    facts: Facts = {}
    try:
        facts = Manager(user=paths.user).show([component.unit], FACTS)[component.unit]
    except ManagerError as error:
        notes.append(f"systemd does not answer: {clean(str(error), 300)}")
    account = read_account(paths, component, notes)
    live = ask_supervisor(paths, component)
    if not live:
        notes.append(
            "The supervisor does not answer: frames, health and the job in hand are missing."
            f" See systemctl {'--user ' if paths.user else ''}status nomarr-supervisor.service"
        )
    hold = clean(Holds(paths.hold).read(component), 200)
    return Scene(component, paths, clock.now(), facts, account, hold, live, tuple(notes))


def read_account(paths: Paths, component: Component, notes: list[str]) -> Account:
    """The account as it is published; an empty one, and a note if that is not the truth."""
    account, problem = read_published(paths.public, component)
    if problem:
        notes.append(clean(problem, 400))
    return account


def ask_supervisor(paths: Paths, component: Component) -> dict[str, Any]:
    """What it knows of this worker now; {} if it does not answer in time."""
    topic = f"{component.component_id}:status"
    try:
        for event in client.subscribe(paths.live, [topic], timeout_s=_LIVE_S):
            if isinstance(event.get("worker"), dict):
                return {str(name): value for name, value in event["worker"].items()}
    except (client.NoSupervisor, OSError):
        pass
    return {}


def read_frames(scene: Scene, run: str) -> list[dict[str, Any]]:
    """The frames of this run in the supervisor's black box, oldest first.

    Those of a worker that names no invocation in its frames are this run's only if no later one
    can have sent them.
    """
    request = {"op": "blackbox", "component": scene.component.component_id}
    lines = client.ask(scene.paths.live, request).get("frames")
    is_last = scene.invocation == run
    found = []
    for line in lines if isinstance(lines, list) else []:
        try:
            fields = json.loads(str(line)[len(PREFIX) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and fields.get("invocation", run if is_last else "") == run:
            found.append(fields)
    return found


def ask_label(scene: Scene, run: str) -> tuple[str, str]:
    """The supervisor's word for a run that it ended itself, and the job that was in hand."""
    request = {
        "op": "label",
        "component": scene.component.component_id,
        "invocation": run,
    }
    answer = client.ask(scene.paths.live, request)
    label, job = answer.get("label"), answer.get("job")
    return str(label or ""), "" if job is None else clean(str(job), 500)


def check_known(paths: Paths, config: Config | None, component: Component) -> None:
    """NoSuchWorker, with the nearest name, unless it is configured, or was and is on record."""
    configured = config or _read_applied(paths)
    workers = {*configured.components(), *list_workers(paths)}
    known = {worker.instance for worker in workers}
    if component.instance in known:
        return
    near = ask_for(component.instance, known)
    listed = ", ".join(sorted(known)[:8])
    raise NoSuchWorker(
        f"{component} is neither configured nor on record",
        hint=near or (f"there are {listed}" if listed else "nomarrctl apply sets workers up"),
    )


def choose(scene: Scene, asked: str) -> tuple[str, Record | None]:
    """The run to report on and its record: the one asked for, or the last that ended badly.
    An empty one means that none is known."""
    records = [each for each in scene.account.records if each.action in DECISIONS]
    if asked:
        return _find_asked(records, asked)
    known = {each.invocation.partition("#")[0] for each in records}
    if scene.is_failed and scene.invocation not in known:
        return scene.invocation, None  # not booked yet
    last = next((each for each in reversed(records) if each.invocation), None)
    return (last.invocation, last) if last else ("", None)


def _find_asked(records: list[Record], asked: str) -> tuple[str, Record | None]:
    text = asked.lower()
    found = [each for each in records if each.invocation and each.invocation.startswith(text)]
    runs = {each.invocation.partition("#")[0] for each in found}
    if len(runs) > 1:
        raise BadName(f"{clean(asked, 40)} begins {len(runs)} invocations", hint="write more of it")
    if found:
        exact = [each for each in found if each.invocation == text]
        run_itself = [each for each in found if "#" not in each.invocation]
        record = (exact or run_itself or found)[-1]
        return record.invocation, record
    run, _ = split_invocation(text)  # the journal may know one that the ring has forgotten
    return run, None


def _read_applied(paths: Paths) -> Config:
    try:
        return read_applied(paths)
    except ConfigError:
        return Config()


def list_workers(paths: Paths, notes: list[str] | None = None) -> set[Component]:
    """The workers that have a published account."""
    found, problem = list_published(paths.public)
    if problem and notes is not None:
        notes.append(problem)
    return found
