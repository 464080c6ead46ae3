"""What ``nomarrctl doctor`` looks at. Each check finds facts and says what mends them; it changes
nothing, and one that cannot look says why.
"""

from __future__ import annotations

import grp
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

from nomarr_systemd.cli.common import Scope, count, load_config
from nomarr_systemd.cli.workers import open_controller
from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, UNIT_SUFFIX, Component
from nomarr_systemd.host import clock, machine
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.ledger.spool import BAD_SUFFIX, Spool
from nomarr_systemd.live import client
from nomarr_systemd.operate import leftovers
from nomarr_systemd.operate.apply import find_libexec, make_plan, read_resolved, unit_directory
from nomarr_systemd.operate.overview import read_account
from nomarr_systemd.systemd import unit_files
from nomarr_systemd.systemd.manager import SUPERVISOR, TARGET, Manager

Level = Literal["ok", "warn", "bad"]
LEAST_SYSTEMD: Final = 252
_LEAST_FREE: Final = 64 << 20
_PENDING_S: Final = 60.0  # a failure is booked within seconds
_RUNNING: Final = (SUPERVISOR, "nomarr-controller.socket", "nomarr-reconcile.timer", TARGET)
_HELPERS: Final = ("nomarr-onfailure@*", "nomarr-controller.service", "nomarr-reconcile.service")
_FUTURE_MS: Final = 60_000
_ALWAYS: Final = ("systemd", "configuration", "journal", "clock")


class Finding(NamedTuple):
    """One fact; ``mend`` is the command for it, if it needs one."""

    check: str
    level: Level
    text: str
    mend: str = ""


Found = Iterator[tuple[Level, str, str]]


class Patient:
    """The installation, looked at once for all checks."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.paths = scope.paths
        self.manager = Manager(user=scope.user)
        self.systemctl = "systemctl --user" if scope.user else "systemctl"
        self.nomarrctl = "nomarrctl --user" if scope.user else "nomarrctl"

    @cached_property
    def config(self) -> Config:
        """What is in force; what the file says before anything is."""
        return read_resolved(self.scope) or load_config(self.scope)

    @cached_property
    def workers(self) -> Sequence[Component]:
        return self.config.components()

    @property
    def directory(self) -> str:
        return unit_directory(self.scope)


def examine(scope: Scope) -> list[Finding]:
    """Every check in turn; before the first apply only those that make sense then."""
    patient = Patient(scope)
    found = []
    for name, check in CHECKS.items():
        if name not in _ALWAYS and read_resolved(scope) is None:
            continue
        try:
            found += [Finding(name, *each) for each in check(patient)]
        except NomarrError as error:
            found.append(Finding(name, "bad", str(error), error.hint))
        except PermissionError as error:
            mend = f"sudo {patient.nomarrctl} doctor"
            found.append(Finding(name, "warn", f"not for you to look at: {error}", mend))
        except OSError as error:
            found.append(Finding(name, "bad", str(error)))
    return found


def check_systemd(patient: Patient) -> Found:
    version = machine.systemd_version()
    if version < LEAST_SYSTEMD:
        text = f"systemd {version or 'is missing'}; {LEAST_SYSTEMD} or newer is needed"
        yield "bad", text, "upgrade the system"
        return
    patient.manager.show_manager("Version")
    kind = "cgroup v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "cgroup v1"
    yield "ok", f"systemd {version} answers, {kind}", ""


def check_configuration(patient: Patient) -> Found:
    config = load_config(patient.scope)
    yield "ok", f"{patient.scope.config_file}: {count(len(config.components()))}", ""
    if read_resolved(patient.scope) is None:
        yield "bad", "nothing has been applied yet", f"{patient.nomarrctl} apply"
        return
    plan = make_plan(patient.scope, config)
    differ = len(plan.changes.add) + len(plan.changes.change) + len(plan.changes.remove)
    mend = f"{patient.nomarrctl} apply"
    if differ or plan.settings_differ:
        text = f"the file is not what was applied ({count(differ, 'unit file')} would change)"
        yield "bad", text, mend
    else:
        yield "ok", "applied", ""
    if plan.restart:
        yield "bad", f"{count(len(plan.restart))} still run with old settings", mend
    if plan.gone:
        names = ", ".join(worker.instance for worker in plan.gone[:5])
        yield "bad", f"left of workers that are not configured: {names}", mend


def check_units(patient: Patient) -> Found:
    libexec = find_libexec(patient.scope)
    unit_files.verify(patient.config, patient.paths, libexec=libexec)
    yield "ok", "systemd accepts every unit", ""
    programs = ("nomarr-supervisor", "nomarr-controller", "nomarr-worker")
    missing = [name for name in programs if not os.access(f"{libexec}/{name}", os.X_OK)]
    if missing:
        text = f"not in {libexec}: {', '.join(missing)}"
        mend = f"{patient.nomarrctl} apply" if patient.scope.user else "install the package again"
        yield "bad", text, mend


def check_services(patient: Patient) -> Found:
    shown = patient.manager.show(_RUNNING, ["LoadState", "ActiveState", "UnitFileState"])
    for name, facts in shown.items():
        if facts["LoadState"] != "loaded":
            yield "bad", f"{name} is {facts['LoadState']}", f"{patient.nomarrctl} apply"
        elif facts["ActiveState"] != "active":
            mend = f"{patient.systemctl} start {name}"
            yield "bad", f"{name} is {facts['ActiveState']}", mend
        else:
            yield "ok", f"{name} is active", ""
    if shown[TARGET]["UnitFileState"] not in ("enabled", "enabled-runtime", "static"):
        mend = f"{patient.systemctl} enable {TARGET}"
        yield "warn", "workers are not started at boot", mend
    for pattern in _HELPERS:
        for name in patient.manager.list_failed(pattern):
            mend = f"{patient.systemctl} status {name}; {patient.systemctl} reset-failed {name}"
            yield "bad", f"{name} has failed", mend


def check_supervisor(patient: Patient) -> Found:
    if not client.ask(patient.paths.live, {"op": "snapshot"}):
        mend = f"{patient.systemctl} restart {SUPERVISOR}; are you root, or in group nomarr?"
        yield "bad", f"the supervisor does not answer on {patient.paths.live}", mend
    else:
        yield "ok", "the supervisor answers", ""
    shown = patient.manager.show([SUPERVISOR], ["NFileDescriptorStore"])[SUPERVISOR]
    stored = int(shown.get("NFileDescriptorStore") or 0)
    wanted = len(patient.workers) + 1
    restart = f"{patient.systemctl} restart {SUPERVISOR}"
    if stored < wanted:
        yield "bad", f"systemd keeps {stored} of its {wanted} descriptors", restart
    else:
        yield "ok", f"systemd keeps {stored} descriptors for it", ""
    missing = [each for each in patient.workers if not _is_fifo(_pipe(patient, each))]
    if missing:
        names = ", ".join(worker.instance for worker in missing[:5])
        yield "bad", f"no pipe for {names}", f"{patient.systemctl} reload {SUPERVISOR}"


def check_failures(patient: Patient) -> Found:
    paths = patient.paths
    restart = f"{patient.systemctl} restart nomarr-controller.socket"
    if not _is_fifo(paths.failures):
        yield "bad", f"{paths.failures} is not there, or is no FIFO", restart
    elif os.lstat(paths.failures).st_mode & 0o077:
        yield "bad", f"{paths.failures} is open to others", restart
    else:
        yield "ok", "the failures FIFO is there", ""
    reconcile = f"{patient.nomarrctl} reconcile"
    old = [name for name in os.listdir(paths.pending) if _age_s(paths.pending, name) > _PENDING_S]
    if old:
        yield "bad", f"{count(len(old), 'failure')} waiting to be booked", reconcile
    try:
        names = os.listdir(paths.spool)
    except FileNotFoundError:
        names = []
    bad = [name for name in names if name.endswith(BAD_SUFFIX)]
    if Spool(paths.spool).read()[0]:
        yield "bad", "failures of a time without the store are not booked yet", reconcile
    if bad:
        yield (
            "warn",
            f"set aside in {paths.spool}: {', '.join(bad[:3])}",
            "look at them, remove them",
        )


def check_store(patient: Patient) -> Found:
    settings = patient.config.store
    if not patient.scope.user and os.geteuid() != 0:
        yield "warn", "only root may open the ledger", f"sudo {patient.nomarrctl} doctor"
        return
    with open_controller(patient.scope, patient.config) as controller:
        accounts = controller.ledger.accounts()
    yield "ok", f"the ledger is readable, {count(len(accounts), 'account')}", ""
    now_ms = clock.now().wall_ms
    newest = max((account.updated_at_wall_ms or 0 for account in accounts), default=0)
    if newest > now_ms + _FUTURE_MS:
        yield "bad", "the ledger has records of the future: the clock was set back", "set the clock"
    parsed = parse_store_url(settings.url)
    if not isinstance(parsed, SqliteUrl):
        return
    if machine.is_volatile(parsed.directory):
        kind = machine.filesystem_of(parsed.directory)
        text = f"{parsed.directory} is on {kind}: a reboot forgets every restart"
        yield "bad", text, "set [store] url in nomarr.toml to a disk"
    free = machine.free_bytes(parsed.directory)
    if free < _LEAST_FREE:
        yield "bad", f"only {free >> 20} MiB are free in {parsed.directory}", "make room"
    aside = [name for name in os.listdir(parsed.directory) if ".corrupt-" in name]
    if aside:
        text = f"a corrupt database was set aside: {', '.join(sorted(aside)[:3])}"
        yield "warn", text, f"keep it elsewhere or remove it: ls {parsed.directory}"


def check_rights(patient: Patient) -> Found:
    paths = patient.paths
    owner = os.getuid() if patient.scope.user else 0
    for path in (paths.state, paths.hold, paths.pending, paths.stop):
        facts = os.stat(path)
        if facts.st_uid != owner:
            yield "bad", f"{path} belongs to uid {facts.st_uid}", f"chown {owner} {path}"
        elif facts.st_mode & 0o022:
            yield "bad", f"{path} can be changed by others", f"chmod go-w {path}"
    ledger = f"{paths.state}/ledger.db"
    if os.path.exists(ledger) and os.stat(ledger).st_mode & 0o077:
        yield "bad", f"{ledger} is open to others", f"chmod 600 {ledger}"
    if not patient.scope.user:
        try:
            group = grp.getgrnam("nomarr")
        except KeyError:
            yield "bad", "there is no group nomarr", "systemd-sysusers"
            return
        if os.getuid() and group.gr_gid not in os.getgroups():
            yield "warn", "you are not in the group nomarr", "usermod -aG nomarr YOUR-NAME"
    yield "ok", "files and directories belong to whom they should", ""


def check_workers(patient: Patient) -> Found:
    """Masks and the ledger must say the same."""
    masked = leftovers.find_masks(patient.directory)
    holds = Holds(patient.paths.hold)
    failed = 0
    for worker in patient.workers:
        account = read_account(patient.scope, worker)
        name = worker.instance
        if worker in masked and not account.failure_reason:
            mend = f"{patient.nomarrctl} reset {name}"
            yield "bad", f"{name} is masked, and the ledger does not know why", mend
        elif account.failure_reason and worker not in masked:
            mend = f"{patient.nomarrctl} reset {name}"
            yield "bad", f"{name} has failed for good, but is not masked", mend
        elif worker in masked:
            failed += 1
    if failed:
        mend = f"{patient.nomarrctl} status; when mended: {patient.nomarrctl} reset --start WORKER"
        yield "warn", f"{count(failed)} failed for good", mend
    held = [worker for worker in patient.workers if holds.read(worker)]
    if held:
        yield "warn", f"{count(len(held))} paused or held", f"{patient.nomarrctl} resume"
    for name in patient.manager.list_failed(f"{UNIT_PREFIX}*{UNIT_SUFFIX}"):
        if name not in {worker.unit for worker in patient.workers}:
            mend = f"{patient.nomarrctl} apply"
            yield "bad", f"{name} has failed and is not configured", mend
    yield "ok", f"{count(len(patient.workers))} configured", ""


def check_journal(patient: Patient) -> Found:  # noqa: ARG001  # as all checks
    if machine.is_journal_persistent():
        yield "ok", "the journal outlasts a reboot", ""
    else:
        mend = "mkdir -p /var/log/journal && systemctl restart systemd-journald"
        yield "warn", "the journal is lost at a reboot, and with it why workers died", mend


def check_clock(patient: Patient) -> Found:  # noqa: ARG001  # as all checks
    synchronised = machine.is_clock_synchronised()
    if synchronised is False:
        text = "the clock is not synchronised: restarts before a reboot may be judged wrongly"
        yield "warn", text, "timedatectl set-ntp true"
    elif synchronised is None:
        yield "warn", "it is not known whether the clock is synchronised", "timedatectl"
    else:
        yield "ok", "the clock is synchronised", ""


def _pipe(patient: Patient, worker: Component) -> str:
    return f"{patient.paths.health}/{worker.instance}"


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _age_s(directory: str, name: str) -> float:
    try:
        return time.time() - os.lstat(os.path.join(directory, name)).st_mtime
    except FileNotFoundError:
        return 0.0  # booked meanwhile


CHECKS: Final[dict[str, Callable[[Patient], Found]]] = {
    "systemd": check_systemd,
    "configuration": check_configuration,
    "units": check_units,
    "services": check_services,
    "supervisor": check_supervisor,
    "failures": check_failures,
    "store": check_store,
    "rights": check_rights,
    "workers": check_workers,
    "journal": check_journal,
    "clock": check_clock,
}
