"""What ``apply`` does, as a plan that can be shown, and the plan carried out.

Killed anywhere, the next apply completes it: files and traces of workers are compared anew, and
which workers still run with old settings stands in a file until they do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import nomarr_systemd
from nomarr_systemd.cli.common import Scope
from nomarr_systemd.cli.progress import FACTS, Progress, is_down, is_idle, wait_for
from nomarr_systemd.cli.workers import open_controller
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError, StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.files import remove, write_durably
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import make_directories, make_programs
from nomarr_systemd.operate import leftovers
from nomarr_systemd.systemd import unit_files
from nomarr_systemd.systemd.manager import (
    SUPERVISOR,
    TARGET,
    Manager,
    ManagerError,
    queue,
    timer_of,
)

PIPES_S = 20.0


class Plan(NamedTuple):
    """What is to be done. ``restart`` has the run of each worker that knows old settings."""

    config: Config
    changes: unit_files.Changes
    settings_differ: bool  # policy, health or store: read by the programs, not by systemd
    gone: list[Component]
    restart: dict[Component, str]
    start: list[Component]

    def __bool__(self) -> bool:
        parts = (self.changes, self.settings_differ, self.gone, self.restart, self.start)
        return any(map(bool, parts))


def make_plan(scope: Scope, config: Config) -> Plan:
    """Compare; nothing is touched."""
    libexec = find_libexec(scope)
    directory = unit_directory(scope)
    changes = unit_files.plan(config, directory, scope.paths, libexec=libexec)
    workers = config.components()
    before = read_resolved(scope)
    known = leftovers.find_workers(directory, scope.paths)
    if before is not None:
        known.update(before.components())
    shown = Manager(user=scope.user).show([each.unit for each in workers], FACTS)
    owed = _read_owed(scope)
    restart = {}
    start = []
    holds = Holds(scope.paths.hold)
    for worker in workers:
        facts = shown[worker.unit]
        run = facts["InvocationID"]
        if facts["ActiveState"] in ("active", "activating", "reloading"):
            if unit_files.dropin_of(worker) in changes.change or owed.get(worker.instance) == run:
                restart[worker] = run
        elif (
            facts["ActiveState"] == "inactive"
            and facts["LoadState"] != "masked"
            and not holds.read(worker)
        ):
            start.append(worker)
    differ = before is None or before.to_dict() != _as_read(config)
    return Plan(config, changes, differ, sorted(known - set(workers)), restart, start)


def carry_out(scope: Scope, plan: Plan, say: Callable[[str], None]) -> None:
    """Refused whole or done; ``say`` is told of each step."""
    libexec = find_libexec(scope)
    make_directories(scope.paths)
    with _alone(scope):
        if libexec != unit_files.LIBEXEC:
            package = os.path.dirname(os.path.abspath(nomarr_systemd.__file__))
            make_programs(libexec, search=[os.path.dirname(package)])
        unit_files.verify(plan.config, scope.paths, libexec=libexec)
        manager = Manager(user=scope.user)
        if plan.restart:
            owed = {worker.instance: run for worker, run in plan.restart.items()}
            write_durably(_owed_file(scope), json.dumps(owed).encode(), mode=0o644)
        # Before their drop-ins are gone, and with them how long a stop may take.
        _stop(scope, manager, plan.gone, say)
        unit_files.install(plan.changes)
        resolved = json.dumps(plan.config.to_dict()).encode()
        write_durably(scope.paths.resolved, resolved, mode=0o644)
        _forget(scope, plan)
        manager.reload()
        manager.reload_or_start(SUPERVISOR)
        _wait_for_pipes(scope, plan.config)
        _restart(scope, manager, list(plan.restart), say)
        remove(_owed_file(scope))
        _start(scope, manager, plan.start)


def _stop(
    scope: Scope, manager: Manager, gone: list[Component], say: Callable[[str], None]
) -> None:
    if not gone:
        return
    names = [*map(timer_of, gone), *(worker.unit for worker in gone)]
    queue("stop", names, user=scope.user)
    wait_for(manager, gone, is_down, "stopping")
    # Before the ledger forgets them: a failed unit that it does not know is a failure to book.
    manager.reset_failed([worker.unit for worker in gone])
    say(f"stopped: {_list(gone)}")


def _forget(scope: Scope, plan: Plan) -> None:
    """Whatever else a worker that is no longer configured has left."""
    if not plan.gone:
        return
    leftovers.remove_files(plan.changes.directory, plan.gone)
    holds = Holds(scope.paths.hold)
    for worker in plan.gone:
        holds.forget(worker.instance)
    with contextlib.suppress(StoreError), open_controller(scope, plan.config) as controller:
        for worker in plan.gone:
            controller.ledger.remove_restart_state(worker.component_id)


def _restart(
    scope: Scope, manager: Manager, workers: list[Component], say: Callable[[str], None]
) -> None:
    if workers:
        queue("try-restart", [worker.unit for worker in workers], user=scope.user)
        wait_for(manager, workers, is_idle, "restarting with new settings")
        say(f"restarted: {_list(workers)}")


def _start(scope: Scope, manager: Manager, workers: list[Component]) -> None:
    """Those that are down, and not the failed ones: their restart has its time."""
    shown = manager.show([TARGET], ["ActiveState"])[TARGET]
    if shown["ActiveState"] == "active":
        queue("start", [worker.unit for worker in workers], user=scope.user)
    else:
        manager.start(TARGET)


def _wait_for_pipes(scope: Scope, config: Config) -> None:
    """Until every worker has its pipe: systemd 252 calls a reload done when it was asked for."""
    ends = time.monotonic() + PIPES_S
    progress = Progress()
    for worker in config.components():
        while not os.path.exists(f"{scope.paths.health}/{worker.instance}"):
            if time.monotonic() > ends:
                raise ManagerError(
                    f"the supervisor made no pipe for {worker.component_id} in {PIPES_S:g} s",
                    hint=f"see systemctl status {SUPERVISOR}, then run nomarrctl apply again",
                )
            progress.tell(f"waiting for the pipe of {worker.component_id}")
            time.sleep(0.01)
    progress.clear()


@contextlib.contextmanager
def _alone(scope: Scope) -> Iterator[None]:
    """Two at once would undo each other's work."""
    fd = os.open(f"{scope.paths.state}/apply.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NomarrError(
                "another nomarrctl apply is running", hint="wait for it, then try again"
            ) from error
        yield
    finally:
        os.close(fd)


def read_resolved(scope: Scope) -> Config | None:
    """What was applied before; None at first, or if it cannot be read."""
    try:
        with open(scope.paths.resolved, encoding="utf-8") as file:
            return Config.from_dict(json.load(file))
    except (OSError, ValueError, ConfigError, AttributeError):
        return None


def _as_read(config: Config) -> dict[str, Any]:
    """As it is after it was written and read."""
    return Config.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict()


def _owed_file(scope: Scope) -> str:
    return f"{scope.paths.state}/apply.json"


def _read_owed(scope: Scope) -> dict[str, str]:
    """The runs that an apply which was cut off had still to restart."""
    try:
        with open(_owed_file(scope), encoding="utf-8") as file:
            owed = json.load(file)
    except (OSError, ValueError):
        return {}
    return owed if isinstance(owed, dict) else {}


def unit_directory(scope: Scope) -> str:
    if not scope.user:
        return "/etc/systemd/system"
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{config}/systemd/user"


def find_libexec(scope: Scope) -> str:
    """Where the programs are: the package's, or for a user without it their own."""
    if not scope.user or os.path.exists(f"{unit_files.LIBEXEC}/nomarr-supervisor"):
        return unit_files.LIBEXEC
    return f"{scope.paths.state}/libexec"


def _list(workers: list[Component]) -> str:
    if len(workers) > 4:
        return f"{len(workers)} from {workers[0]} to {workers[-1]}"
    return ", ".join(worker.component_id for worker in workers)
