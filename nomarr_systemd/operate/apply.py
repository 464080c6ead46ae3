"""``apply`` as a plan that can be shown, and the plan carried out.

If it is killed anywhere, the next apply completes it: files and leftovers of workers are compared
again, and a file lists the workers that are still to be restarted with their new settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import nomarr_systemd
from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError, StoreError
from nomarr_systemd.core.ids import (
    TARGET,
    UNIT_PREFIX,
    UNIT_SUFFIX,
    WANTED_PREFIX,
    Component,
    find_instance,
)
from nomarr_systemd.host import clock
from nomarr_systemd.host.configuration import as_stored, read_applied
from nomarr_systemd.host.files import locked, remove, write_durably
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import LIBEXEC, make_directories, make_programs
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.public import read_published
from nomarr_systemd.operate import controlling, leftovers, store_check
from nomarr_systemd.operate.waiting import (
    Tell,
    is_down,
    is_idle,
    queue,
    queue_gently,
    wait_for,
)
from nomarr_systemd.systemd import portions, unit_files
from nomarr_systemd.systemd.manager import RECONCILER, SERVING, SUPERVISOR, Manager
from nomarr_systemd.systemd.systemctl import ManagerError, Refused
from nomarr_systemd.systemd.timers import timer_of

PIPES_S = 20.0
EXTRA_S = 15.0  # beyond the time of a stop; systemd kills what does not end by then
_RUNNING = ("active", "activating", "reloading")
_EARLY = 2  # portions that systemd loads while it waits for the supervisor
_STOP_S = 90.0  # of workers whose pool is not known any more


class Plan(NamedTuple):
    """What is to be done. ``restart`` has the present run of each worker with old settings."""

    config: Config
    changes: unit_files.Changes
    settings_differ: bool  # policy, health or store: read by the programs, not by systemd
    gone: list[Component]
    restart: dict[Component, str]
    start: list[Component]
    concerns: list[store_check.Concern]  # about the store; apply refuses a bad one
    before: Config | None  # what was applied before, if that can be read

    def __bool__(self) -> bool:
        parts = (self.changes, self.settings_differ, self.gone, self.restart, self.start)
        return any(map(bool, parts))


def make_plan(scope: Scope, config: Config, tell: Tell | None = None) -> Plan:
    """Compare the configuration with what is installed; nothing is changed."""
    _check_users(scope, config)
    directory = scope.unit_directory
    changes = unit_files.plan(config, directory, scope.paths, libexec=scope.libexec)
    workers = config.components()
    before = _read_before(scope)
    # Closed before anything is started: systemd sends every change to all that are connected.
    with contextlib.closing(Manager(user=scope.user, tell=tell)) as manager:
        loaded = manager.list_loaded(*leftovers.UNITS)
        restart, idle = _sort_out(scope, manager, loaded, workers, changes)
    known = leftovers.find_workers(directory, scope.paths, loaded)
    if before is not None:
        known.update(before.components())
    start = []
    holds, now_ms = Holds(scope.paths.hold), clock.now().wall_ms
    switches = {pool.name: holds.read_switch(pool.name, now_ms) for pool in config.pools}
    for worker, run in idle.items():
        is_new = unit_files.dropin_of(worker) in changes.add
        is_held = holds.read(worker) or (is_new and switches[worker.pool])
        if not is_held and not has_finished(scope, worker, run):
            start.append(worker)
    differ = before != as_stored(config)
    concerns = store_check.find_concerns(scope, config)
    gone = sorted(known - set(workers))
    return Plan(config, changes, differ, gone, restart, start, concerns, before)


def _sort_out(
    scope: Scope,
    manager: Manager,
    loaded: Mapping[str, Mapping[str, str]],
    workers: Sequence[Component],
    changes: unit_files.Changes,
) -> tuple[dict[Component, str], dict[Component, str]]:
    """Return the workers that run with old settings, and those that are down and not masked, each
    with its present or last run. Only these are asked about one by one."""
    masked = leftovers.find_masks(changes.directory)
    owed = _read_owed(scope) or {}
    old, down, without_run = [], [], {}
    for worker in workers:
        facts = loaded.get(worker.unit)
        if facts is None:
            if worker not in masked:
                without_run[worker] = ""
        elif facts["ActiveState"] in _RUNNING:
            if changes.is_old(worker) or worker.instance in owed:
                old.append(worker)
        elif facts["ActiveState"] == "inactive" and facts["LoadState"] != "masked":
            down.append(worker)
    shown = manager.show([each.unit for each in (*old, *down)], ["InvocationID"])
    runs = {each: shown[each.unit]["InvocationID"] for each in (*old, *down)}
    restart = {
        each: runs[each]
        for each in old
        if changes.is_old(each) or owed[each.instance] == runs[each]
    }
    idle = {each: runs[each] for each in down} | without_run
    return restart, {each: idle[each] for each in workers if each in idle}


def has_finished(scope: Scope, worker: Component, run: str) -> bool:
    """True if this run ended well, and on_clean_exit lets it stay so."""
    last = read_published(scope.paths.public, worker).account.find_last(run) if run else None
    return last is not None and (last.kind, last.action) == ("ended", "ignore")


def _check_users(scope: Scope, config: Config) -> None:
    """ConfigError unless every pool's user exists, and systemd can run workers as that user."""
    for pool in config.pools:
        if not pool.user:
            continue
        where = f"[pool.{pool.name}] user"
        if scope.user:
            raise ConfigError(
                f"{where}: your own systemd runs everything as you", hint="remove the line"
            )
        try:
            facts = pwd.getpwnam(pool.user)
        except KeyError as error:
            mend = f"useradd --system {pool.user}"
            raise ConfigError(f"{where}: there is no user {pool.user}", hint=mend) from error
        if facts.pw_uid == 0:
            raise ConfigError(f"{where}: {pool.user} is root", hint="name another user")


def check_plan(scope: Scope, plan: Plan) -> None:
    """Raise what ``carry_out`` would refuse the plan with; nothing is changed. A new store on a
    server is not asked: that would make its collections."""
    store_check.refuse(plan.concerns)
    _verify(scope, plan.config)
    is_server = not isinstance(parse_store_url(plan.config.store.url), SqliteUrl)
    if is_server and plan.before is not None and plan.before.store == plan.config.store:
        store_check.refuse(list(store_check.try_stores(scope, plan.config)))


def _verify(scope: Scope, config: Config) -> None:
    """Have systemd check the units; the programs that they name may not be there yet."""
    if scope.libexec == LIBEXEC:
        unit_files.verify(config, scope.paths, libexec=LIBEXEC)
        return
    with tempfile.TemporaryDirectory(prefix="nomarr-verify-") as directory:
        make_programs(directory, search=[])
        unit_files.verify(config, scope.paths, libexec=directory)


def carry_out(scope: Scope, plan: Plan, say: Callable[[str], None], tell: Tell) -> list[Component]:
    """Carry out the plan, or refuse it before anything is changed; return the workers that go on
    with their job beyond the limit of a wait. ``say`` takes a line for each step that is done,
    ``tell`` a line that says how far a wait has got."""
    libexec = scope.libexec
    store_check.refuse(plan.concerns)
    _verify(scope, plan.config)
    make_directories(scope.paths)
    with _alone(scope):
        tried = list(store_check.try_stores(scope, plan.config))
        store_check.refuse(tried)
        for concern in tried:
            say(f"warning: {concern.text}; {concern.mend}")
        if libexec != LIBEXEC:
            package = os.path.dirname(os.path.abspath(nomarr_systemd.__file__))
            make_programs(libexec, search=[os.path.dirname(package)])
        manager = Manager(user=scope.user, tell=tell)
        if not plan and _read_owed(scope) is None and _is_in_force(scope, manager, plan.config):
            return []
        owed = {worker.instance: run for worker, run in plan.restart.items()}
        write_durably(_owed_file(scope), json.dumps(owed).encode(), mode=0o644)
        # Before their drop-ins are removed, which have the timeout of a stop.
        stopping = _stop(manager, plan, say, tell)
        gone = [worker for worker in plan.gone if worker not in stopping]
        kept = {unit_files.dropin_of(worker) for worker in stopping}
        removed = tuple(name for name in plan.changes.remove if name not in kept)
        # Before their drop-ins are there: without those the next apply takes them for new again.
        _hold_new(scope, plan)
        unit_files.install(plan.changes._replace(remove=removed))
        resolved = json.dumps(plan.config.to_dict()).encode()
        write_durably(scope.paths.resolved, resolved, mode=0o644)
        _forget(scope, plan._replace(gone=gone))
        manager.reload()
        old = _want_running(manager)
        # A sandbox changes only with a new process; the supervisor's pipes are kept by systemd. And
        # programs of an older version would take the end of its wanted units for stops.
        concerned = [each for each in unit_files.STORE_USERS if plan.changes.concern(each)]
        manager.restart_running(unit_files.STORE_USERS if old else concerned)
        queue(manager, "stop", old)
        _serve(manager, plan.config)
        _wait_for_pipes(scope, plan.config, tell)
        busy = _restart(manager, plan, say, tell)
        _start(manager, plan.start, tell)
        manager.reset_failed([portions.STARTER])  # what it has left is started
        if not busy:
            remove(_owed_file(scope))
        # It may have failed without a configuration; what was left undone is due now.
        queue(manager, "start", [RECONCILER])
    return [*stopping, *busy]


def _want_running(manager: Manager) -> list[str]:
    """Start the wanted units of workers that an older version started: it had none, or services or
    sockets in their place, which workers that wait for their restart have as well. Return these."""
    states = manager.list_loaded(f"{UNIT_PREFIX}*{UNIT_SUFFIX}", f"{WANTED_PREFIX}*")
    running = {name for name, facts in states.items() if facts["ActiveState"] in _RUNNING}
    wanted = {name.partition("@")[2].rpartition(".")[0] for name in running}
    units = [each.wanted_unit for each in map(find_instance, sorted(wanted)) if each]
    queue(manager, "start", [unit for unit in units if unit not in running])
    return sorted(name for name in running if not name.startswith((UNIT_PREFIX, *units)))


def _is_in_force(scope: Scope, manager: Manager, config: Config) -> bool:
    """True if systemd has read the files, and what serves the workers runs. The workers of a pool
    are alike: the first of each is asked about."""
    firsts = [Component(pool.name, 0).unit for pool in config.pools if pool.workers]
    serving = (TARGET, SUPERVISOR, *SERVING)
    facts = ("ActiveState", "LoadState", "NeedDaemonReload")
    shown = manager.show([*serving, *firsts], facts)
    return (
        all(each["NeedDaemonReload"] != "yes" for each in shown.values())
        and all(
            shown[unit]["ActiveState"] == "active"
            or (unit in SERVING and shown[unit]["LoadState"] == "masked")
            for unit in serving
        )
        and not _find_missing_pipes(scope, config)
    )


def _patience_s(plan: Plan, workers: list[Component]) -> float:
    """Return the seconds to wait for workers: what each may take to stop, and a little more. A
    worker that makes progress may extend its stop without end."""
    pools = {pool.name: pool for pool in [*(plan.before or plan.config).pools, *plan.config.pools]}
    found = [pools[each.pool].stop_timeout_s for each in workers if each.pool in pools]
    return max(found, default=_STOP_S) + EXTRA_S


def _stop(
    manager: Manager,
    plan: Plan,
    say: Callable[[str], None],
    tell: Tell,
) -> list[Component]:
    """Stop workers that are no longer configured; return those that still finish a job."""
    gone = plan.gone
    if not gone:
        return []
    names = [*map(timer_of, gone), *(worker.unit for worker in gone)]
    queue(manager, "stop", names)
    limit_s = _patience_s(plan, gone)
    down = wait_for(
        manager, gone, lambda _, facts: is_down(facts), "stopping", tell, limit_s=limit_s
    )
    # Before their accounts are removed: a failed unit without one would be booked as a failure.
    manager.reset_failed([worker.unit for worker in down])
    if down:
        say(f"stopped: {_list(sorted(down))}")
    return [worker for worker in gone if worker not in down]


def _forget(scope: Scope, plan: Plan) -> None:
    """Remove what else is left of workers that are no longer configured."""
    if not plan.gone:
        return
    leftovers.remove_files(plan.changes.directory, plan.gone)
    holds = Holds(scope.paths.hold)
    for worker in plan.gone:
        holds.forget(worker.instance)
    with contextlib.suppress(StoreError):
        controlling.forget(scope, plan.config, plan.gone)


def _hold_new(scope: Scope, plan: Plan) -> None:
    """Pause the workers that are added to a pool that is paused."""
    holds, now_ms = Holds(scope.paths.hold), clock.now().wall_ms
    for worker in plan.config.components():
        switch = holds.read_switch(worker.pool, now_ms)
        if switch and unit_files.dropin_of(worker) in plan.changes.add:
            holds.pause(worker, switch)


def _restart(
    manager: Manager,
    plan: Plan,
    say: Callable[[str], None],
    tell: Tell,
) -> list[Component]:
    """Restart workers whose settings changed; return those that still finish a job."""
    workers = list(plan.restart)
    if not workers:
        return []
    what = "restarting with new settings"
    queue_gently(manager, "try-restart", [worker.unit for worker in workers], what, tell)
    limit_s = _patience_s(plan, workers)
    done = wait_for(manager, workers, lambda _, facts: is_idle(facts), what, tell, limit_s=limit_s)
    if done:
        say(f"restarted: {_list(sorted(done))}")
    return [worker for worker in workers if worker not in done]


def _serve(manager: Manager, config: Config) -> None:
    """Have the supervisor read its configuration, or start it, and start the target without its
    workers: it would start all of them at once, and again one that has failed meanwhile."""
    found = portions.split(config.components())
    # Not asked about by name: systemd would load the target, and forget it again, with its workers.
    states = manager.list_loaded(SUPERVISOR, TARGET, *SERVING, f"{portions.PREFIX}*")
    active = {name for name, facts in states.items() if facts["ActiveState"] == "active"}
    masked = {name for name, facts in states.items() if facts["LoadState"] == "masked"}
    # The target may be active since a boot before the first apply, when it wanted nothing.
    queue(manager, "start", sorted({SUPERVISOR, *SERVING} - active - masked))
    # While the supervisor starts, systemd loads the workers that it will start first.
    if TARGET not in active:
        manager.start_alone(TARGET)
    for each in found[:_EARLY]:
        if each.unit not in active:
            with contextlib.suppress(Refused):  # it is masked: its workers are loaded as they start
                manager.start_alone(each.unit)
    manager.close()
    if SUPERVISOR in active:
        manager.reload_unit(SUPERVISOR)
    else:
        manager.start_and_wait(SUPERVISOR)


def _start(manager: Manager, workers: list[Component], tell: Tell) -> None:
    """Start workers that are down; failed ones are not among them, their restart is scheduled."""
    queue_gently(manager, "start", [worker.unit for worker in workers], "starting", tell)


def _wait_for_pipes(scope: Scope, config: Config, tell: Tell) -> None:
    """Wait until every worker has its pipe: systemd 252 does not wait for the end of a reload. A
    supervisor that makes none for PIPES_S is given up."""
    ends, before = time.monotonic() + PIPES_S, -1
    while missing := _find_missing_pipes(scope, config):
        if len(missing) != before:
            ends, before = time.monotonic() + PIPES_S, len(missing)
        if time.monotonic() > ends:
            raise ManagerError(
                f"the supervisor made no pipe for {missing[0].component_id} in {PIPES_S:g} s",
                hint=f"see systemctl status {SUPERVISOR}, then run nomarrctl apply again",
            )
        tell(f"waiting for the pipe of {missing[0].component_id} ({len(missing)} are missing)")
        time.sleep(0.01)


def _find_missing_pipes(scope: Scope, config: Config) -> list[Component]:
    try:
        there = set(os.listdir(scope.paths.health))
    except FileNotFoundError:
        there = set()
    return [each for each in config.components() if each.instance not in there]


@contextlib.contextmanager
def _alone(scope: Scope) -> Iterator[None]:
    """Refuse a second apply at the same time: the two would undo each other's work."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(f"{scope.paths.state}/apply.lock", 0))
        except TimeoutError as error:
            raise NomarrError(
                "another nomarrctl apply is running", hint="wait for it, then try again"
            ) from error
        yield


def _read_before(scope: Scope) -> Config | None:
    """Return what was applied before; None if there is nothing, or if it is damaged."""
    try:
        return read_applied(scope.paths)
    except ConfigError:
        return None


def _owed_file(scope: Scope) -> str:
    return f"{scope.paths.state}/apply.json"


def _read_owed(scope: Scope) -> dict[str, str] | None:
    """The runs that an interrupted apply had still to restart; None if it was not interrupted."""
    try:
        with open(_owed_file(scope), encoding="utf-8") as file:
            owed = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return owed if isinstance(owed, dict) else {}


def _list(workers: list[Component]) -> str:
    if len(workers) > 4:
        return f"{len(workers)} from {workers[0]} to {workers[-1]}"
    return ", ".join(worker.component_id for worker in workers)
