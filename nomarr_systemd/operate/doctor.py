"""The checks of ``nomarrctl doctor``. Each yields facts with the commands that mend them, and
changes nothing; a check that is not possible says why.
"""

from __future__ import annotations

import grp
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, UNIT_SUFFIX, Component
from nomarr_systemd.core.text import count
from nomarr_systemd.host import clock, machine
from nomarr_systemd.host.configuration import NotApplied, read_applied
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import VIEWERS
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger.public import list_published, read_published
from nomarr_systemd.ledger.spool import BAD_SUFFIX, Spool
from nomarr_systemd.live import client
from nomarr_systemd.operate import controlling, leftovers, store_check
from nomarr_systemd.operate.apply import make_plan
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


class Installation:
    """The installation under examination; what several checks need is read once."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.paths = scope.paths
        self.manager = Manager(user=scope.user)
        self.systemctl = "systemctl --user" if scope.user else "systemctl"
        self.nomarrctl = "nomarrctl --user" if scope.user else "nomarrctl"

    @cached_property
    def _applied(self) -> Config | ConfigError:
        try:
            return read_applied(self.paths)
        except ConfigError as error:
            return error

    @property
    def config(self) -> Config:
        """What was applied; raises the same ConfigError each time if it cannot be read."""
        if isinstance(self._applied, ConfigError):
            raise self._applied
        return self._applied

    @property
    def is_applied(self) -> bool:
        return not isinstance(self._applied, NotApplied)

    @cached_property
    def workers(self) -> Sequence[Component]:
        return self.config.components()


def examine(scope: Scope) -> list[Finding]:
    """Run every check; before the first apply only the checks in _ALWAYS."""
    it = Installation(scope)
    found: list[Finding] = []
    told: set[NomarrError] = set()  # several checks may fail with the same error
    for name, check in CHECKS.items():
        if name not in _ALWAYS and not it.is_applied:
            continue
        try:
            found.extend(Finding(name, *each) for each in check(it))  # keeps those before an error
        except NomarrError as error:
            closed = isinstance(error.__cause__, PermissionError)
            if error not in told:
                found.append(Finding(name, "warn" if closed else "bad", str(error), error.hint))
            told.add(error)
        except PermissionError as error:
            mend = f"sudo {it.nomarrctl} doctor"
            found.append(Finding(name, "warn", f"this user may not check it: {error}", mend))
        except OSError as error:
            found.append(Finding(name, "bad", str(error)))
    return found


def check_systemd(it: Installation) -> Found:
    version = machine.systemd_version()
    if version < LEAST_SYSTEMD:
        text = f"systemd {version or 'is missing'}; {LEAST_SYSTEMD} or newer is needed"
        yield "bad", text, "upgrade the system"
        return
    it.manager.show_manager("Version")
    kind = "cgroup v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "cgroup v1"
    yield "ok", f"systemd {version} answers, {kind}", ""


def check_configuration(it: Installation) -> Found:
    config = it.scope.read_file()
    yield "ok", f"{it.scope.config_file}: {count(len(config.components()))}", ""
    if not it.is_applied:
        yield "bad", "nothing has been applied yet", f"{it.nomarrctl} apply"
        return
    _ = it.config  # a ConfigError if it cannot be read
    plan = make_plan(it.scope, config)
    differ = len(plan.changes.add) + len(plan.changes.change) + len(plan.changes.remove)
    mend = f"{it.nomarrctl} apply"
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


def check_units(it: Installation) -> Found:
    libexec = it.scope.libexec
    unit_files.verify(it.config, it.paths, libexec=libexec)
    yield "ok", "systemd accepts every unit", ""
    programs = ("nomarr-supervisor", "nomarr-controller", "nomarr-worker")
    missing = [name for name in programs if not os.access(f"{libexec}/{name}", os.X_OK)]
    if missing:
        text = f"not in {libexec}: {', '.join(missing)}"
        mend = f"{it.nomarrctl} apply" if it.scope.user else "install the package again"
        yield "bad", text, mend


def check_services(it: Installation) -> Found:
    shown = it.manager.show(_RUNNING, ["LoadState", "ActiveState", "UnitFileState"])
    for name, facts in shown.items():
        if facts["LoadState"] != "loaded":
            yield "bad", f"{name} is {facts['LoadState']}", f"{it.nomarrctl} apply"
        elif facts["ActiveState"] != "active":
            mend = f"{it.systemctl} start {name}"
            yield "bad", f"{name} is {facts['ActiveState']}", mend
        else:
            yield "ok", f"{name} is active", ""
    if shown[TARGET]["UnitFileState"] not in ("enabled", "enabled-runtime", "static"):
        mend = f"{it.systemctl} enable {TARGET}"
        yield "warn", "workers are not started at boot", mend
    for pattern in _HELPERS:
        for name in it.manager.list_failed(pattern):
            mend = f"{it.systemctl} status {name}; {it.systemctl} reset-failed {name}"
            yield "bad", f"{name} has failed", mend


def check_supervisor(it: Installation) -> Found:
    if not client.ask(it.paths.live, {"op": "snapshot"}):
        mend = f"{it.systemctl} restart {SUPERVISOR}; are you root, or in group {VIEWERS}?"
        yield "bad", f"the supervisor does not answer on {it.paths.live}", mend
    else:
        yield "ok", "the supervisor answers", ""
    shown = it.manager.show([SUPERVISOR], ["NFileDescriptorStore"])[SUPERVISOR]
    stored = int(shown.get("NFileDescriptorStore") or 0)
    wanted = len(it.workers)
    restart = f"{it.systemctl} restart {SUPERVISOR}"
    if stored < wanted:
        yield "bad", f"systemd keeps {stored} of the supervisor's {wanted} pipes", restart
    else:
        yield "ok", f"systemd keeps {stored} pipes for the supervisor", ""
    missing = [each for each in it.workers if not _is_fifo(_pipe(it, each))]
    if missing:
        names = ", ".join(worker.instance for worker in missing[:5])
        yield "bad", f"no pipe for {names}", f"{it.systemctl} reload {SUPERVISOR}"


def check_failures(it: Installation) -> Found:
    paths = it.paths
    restart = f"{it.systemctl} restart nomarr-controller.socket"
    if not _is_fifo(paths.failures):
        yield "bad", f"{paths.failures} is not there, or is no FIFO", restart
    elif os.lstat(paths.failures).st_mode & 0o077:
        yield "bad", f"{paths.failures} is open to others", restart
    else:
        yield "ok", "the failures FIFO is there", ""
    reconcile = f"{it.nomarrctl} reconcile"
    old = [name for name in os.listdir(paths.pending) if _age_s(paths.pending, name) > _PENDING_S]
    if old:
        yield "bad", f"{count(len(old), 'failure')} waiting to be booked", reconcile
    try:
        names = os.listdir(paths.spool)
    except FileNotFoundError:
        names = []
    bad = [name for name in names if name.endswith(BAD_SUFFIX)]
    if Spool(paths.spool).read()[0]:
        yield "bad", "failures from while the store was away are not booked yet", reconcile
    if bad:
        yield (
            "warn",
            f"unreadable failures were set aside in {paths.spool}: {', '.join(bad[:3])}",
            "inspect them, then remove them",
        )


def check_store(it: Installation) -> Found:
    settings = it.config.store
    if not it.scope.user and os.geteuid() != 0:
        yield "warn", "only root may open the ledger", f"sudo {it.nomarrctl} doctor"
        return
    concerns = store_check.find_concerns(it.scope, it.config)
    if not any(each.level == "bad" for each in concerns):
        concerns += store_check.try_stores(it.scope, it.config)
    yield from concerns
    if any(each.level == "bad" for each in concerns):
        return  # it was not opened, or cannot be
    accounts = controlling.read_accounts(it.scope, it.config)
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
    if machine.share_disk(parsed.directory, f"{parsed.directory}/work"):
        text = f"jobs are on the ledger's disk: workers could fill it ({parsed.directory}/work)"
        yield "ok", text, ""
    free = machine.free_bytes(parsed.directory)
    if free < _LEAST_FREE:
        yield "bad", f"only {free >> 20} MiB are free in {parsed.directory}", "make room"
    aside = [name for name in os.listdir(parsed.directory) if ".corrupt-" in name]
    if aside:
        text = f"a corrupt database was set aside: {', '.join(sorted(aside)[:3])}"
        yield "warn", text, f"keep it elsewhere or remove it: ls {parsed.directory}"


def check_rights(it: Installation) -> Found:
    paths = it.paths
    owner = os.getuid() if it.scope.user else 0
    for path in (paths.state, paths.hold, paths.pending):
        facts = os.stat(path)
        if facts.st_uid != owner:
            yield "bad", f"{path} belongs to uid {facts.st_uid}", f"chown {owner} {path}"
        elif facts.st_mode & 0o022:
            yield "bad", f"{path} can be changed by others", f"chmod go-w {path}"
    parsed = parse_store_url(it.config.store.url)
    ledger = f"{parsed.directory if isinstance(parsed, SqliteUrl) else paths.state}/ledger.db"
    if os.path.exists(ledger) and os.stat(ledger).st_mode & 0o077:
        yield "bad", f"{ledger} is open to others", f"chmod 600 {ledger}"
    if not it.scope.user:
        try:
            group = grp.getgrnam(VIEWERS)
        except KeyError:
            yield "bad", f"there is no group {VIEWERS}", "systemd-sysusers"
            return
        if os.getuid() and group.gr_gid not in os.getgroups():
            yield "warn", f"you are not in the group {VIEWERS}", f"usermod -aG {VIEWERS} YOUR-NAME"
    yield "ok", "files and directories have the right owners and modes", ""


def check_workers(it: Installation) -> Found:
    """Masks and the ledger must agree."""
    masked = leftovers.find_masks(it.scope.unit_directory)
    holds = Holds(it.paths.hold)
    failed = 0
    _, closed = list_published(it.paths.public)
    if closed:
        yield "warn", closed, f"sudo {it.nomarrctl} doctor"
    for worker in () if closed else it.workers:
        account, problem = read_published(it.paths.public, worker)
        name = worker.instance
        if problem:
            yield "bad", problem, f"{it.nomarrctl} reconcile"
        elif worker in masked and not account.failure_reason:
            mend = f"{it.nomarrctl} reset {name}"
            yield "bad", f"{name} is masked, and the ledger does not know why", mend
        elif account.failure_reason and worker not in masked:
            mend = f"{it.nomarrctl} reset {name}"
            yield "bad", f"{name} has failed for good, but is not masked", mend
        elif worker in masked:
            failed += 1
    if failed:
        mend = f"{it.nomarrctl} status; when mended: {it.nomarrctl} reset --start WORKER"
        yield "warn", f"{count(failed)} failed for good", mend
    held = [worker for worker in it.workers if holds.read(worker)]
    if held:
        yield "warn", f"{count(len(held))} paused or held", f"{it.nomarrctl} resume"
    for name in it.manager.list_failed(f"{UNIT_PREFIX}*{UNIT_SUFFIX}"):
        if name not in {worker.unit for worker in it.workers}:
            mend = f"{it.nomarrctl} apply"
            yield "bad", f"{name} has failed and is not configured", mend
    yield "ok", f"{count(len(it.workers))} configured", ""


def check_journal(it: Installation) -> Found:  # noqa: ARG001  # as all checks
    if machine.is_journal_persistent():
        yield "ok", "the journal outlasts a reboot", ""
    else:
        mend = "mkdir -p /var/log/journal && systemctl restart systemd-journald"
        yield "warn", "the journal is lost at a reboot, and with it why workers died", mend


def check_clock(it: Installation) -> Found:  # noqa: ARG001  # as all checks
    synchronised = machine.is_clock_synchronised()
    if synchronised is False:
        text = "the clock is not synchronised: restarts before a reboot may be judged wrongly"
        yield "warn", text, "timedatectl set-ntp true"
    elif synchronised is None:
        yield "warn", "it is not known whether the clock is synchronised", "timedatectl"
    else:
        yield "ok", "the clock is synchronised", ""


def _pipe(it: Installation, worker: Component) -> str:
    return f"{it.paths.health}/{worker.instance}"


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


CHECKS: Final[dict[str, Callable[[Installation], Found]]] = {
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
