"""Checks of the configuration and of systemd's units: what was applied, files and programs of the
package, services, masks, and directives that a drop-in which is not ours has changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from nomarr_systemd.config.unit_directives import find_owned
from nomarr_systemd.core.ids import TARGET, UNIT_PREFIX, UNIT_SUFFIX
from nomarr_systemd.core.text import count
from nomarr_systemd.operate.apply import make_plan
from nomarr_systemd.operate.doctor.installation import Found, Installation, list_some
from nomarr_systemd.systemd import unit_files
from nomarr_systemd.systemd.manager import RECONCILER, SUPERVISOR, WAKEUP
from nomarr_systemd.systemd.portions import STARTER

_SOCKET: Final = "nomarr-supervisor.socket"
_RUNNING: Final = (
    *(SUPERVISOR, _SOCKET, "nomarr-controller.socket", "nomarr-reconcile.timer", TARGET),
)
_HELPERS: Final = (
    *(WAKEUP, "nomarr-restart@*.service", "nomarr-controller.service", RECONCILER, STARTER),
)
_PROGRAMS: Final = ("nomarr-supervisor", "nomarr-controller", "nomarr-worker")
_FACTS: Final = ("LoadState", "DropInPaths", "FragmentPath", "NeedDaemonReload")
_ASSIGNED: Final = re.compile(r"^[ \t]*([A-Z][A-Za-z0-9]*)[ \t]*=", re.MULTILINE)


def check_configuration(it: Installation) -> Found:
    file = it.scope.config_file
    if it.is_applied and not os.path.lexists(file):
        text = f"there is no {file} to compare with what was applied, which is in force"
        yield "warn", text, f"{it.nomarrctl} --config FILE doctor, with the file that was applied"
        return
    config = it.scope.read_file()
    yield "ok", f"{it.scope.config_file}: {count(len(config.components()))}", ""
    if not it.scope.user and not os.path.isdir(it.paths.state):
        mend = f"systemd-tmpfiles --create nomarr.conf; {it.nomarrctl} apply"
        yield "bad", f"the directory {it.paths.state} is gone, and the ledger with it", mend
        return
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
        names = list_some([worker.instance for worker in plan.gone])
        yield "bad", f"left of workers that are not configured: {names}", f"{mend} --yes"


def check_units(it: Installation) -> Found:
    libexec = it.scope.libexec
    missing = [name for name in _PROGRAMS if not os.access(f"{libexec}/{name}", os.X_OK)]
    if missing:
        yield "bad", f"not in {libexec}, or not executable: {list_some(missing)}", it.reinstall
    gone = [name for name in _base_units() if not os.path.exists(name)]
    if gone:
        names = list_some([os.path.basename(name) for name in gone])
        yield "bad", f"unit files of the package are gone: {names}", it.reinstall
    if not missing and not gone:
        unit_files.verify(it.config, it.paths, libexec=libexec)
        yield "ok", "systemd accepts every unit", ""


def check_services(it: Installation) -> Found:
    masked = list(_find_masks(it))
    for name, option in masked:
        start = f" && {it.systemctl} start {name}" if name in _RUNNING else ""
        mend = f"{it.systemctl} unmask{option} {name}{start}"
        yield "bad", f"{name} is masked", mend
    shown = it.manager.show(_RUNNING, ["LoadState", "ActiveState", "UnitFileState", "Job"])
    names = {name for name, _ in masked}
    for name, facts in shown.items():
        if name in names:
            continue
        if facts["LoadState"] != "loaded":
            mend = f"{it.nomarrctl} apply" if it.scope.user else it.reinstall
            yield "bad", f"{name} is {facts['LoadState']}", mend
        elif facts["ActiveState"] == "active":
            yield "ok", f"{name} is active", ""
        elif facts["Job"]:
            yield "warn", f"{name} is being started or stopped", f"{it.systemctl} list-jobs"
        else:
            yield "bad", f"{name} is {facts['ActiveState']}", _start(it, name)
    if shown[TARGET]["UnitFileState"] not in ("enabled", "enabled-runtime", "static"):
        mend = f"{it.systemctl} enable {TARGET}"
        yield "warn", "workers are not started at boot", mend
    for pattern in _HELPERS:
        for name in it.manager.list_failed(pattern):
            mend = f"{it.systemctl} reset-failed {name}"
            yield "bad", f"{name} has failed: see {it.systemctl} status {name}", mend


def _start(it: Installation, name: str) -> str:
    # systemd refuses to start a socket whose service runs; a restart of that starts both.
    verb, unit = ("restart", SUPERVISOR) if name == _SOCKET else ("start", name)
    return f"{it.systemctl} {verb} {unit}"


def _base_units() -> Iterator[str]:
    """Yield the paths of the package's unit files, drop-ins included."""
    for place, _, names in os.walk(unit_files.find_data("units")):
        yield from (os.path.join(place, name) for name in sorted(names))


def _find_masks(it: Installation) -> Iterator[tuple[str, str]]:
    """Yield the base units that are masked, each with the option that unmasks it."""
    runtime = f"{it.paths.runtime}/systemd/{'user' if it.scope.user else 'system'}"
    for directory, option in ((it.scope.unit_directory, ""), (runtime, " --runtime")):
        for path in _base_units():
            name = os.path.basename(path)
            link = os.path.join(directory, name)
            if os.path.islink(link) and os.readlink(link) == "/dev/null":
                yield name, option


class _Override(NamedTuple):
    """A directive that only we may set, in a file that is not ours."""

    file: str
    directive: str


def check_directives(it: Installation) -> Found:
    """Compare what systemd does with each worker: a file that sorts after ours overrides it. The
    workers of a pool are alike, but for those that have files of their own."""
    own = _find_own_files(it.manager.show_manager("UnitPath")["UnitPath"].split())
    like: dict[str, str] = {}  # the unit that each is like
    for worker in it.workers:
        like[worker.unit] = (
            worker.unit if worker.unit in own else like.setdefault(worker.pool, worker.unit)
        )
    asked = sorted(set(like.values()))
    shown = it.manager.show(asked, _FACTS)
    changed = {unit: _find_overrides(shown[unit]["DropInPaths"].split()) for unit in asked}
    overrides: dict[_Override, list[str]] = {}
    stale = []
    replaced = set()
    for worker in it.workers:
        facts = shown[like[worker.unit]]
        if facts["LoadState"] != "loaded":
            continue  # masked, or without a unit file: other checks say so
        if facts["NeedDaemonReload"] == "yes":
            stale.append(worker.instance)
        if _is_replaced(it, facts["FragmentPath"]):
            replaced.add(facts["FragmentPath"])
        for each in changed[like[worker.unit]]:
            overrides.setdefault(each, []).append(worker.instance)
    reload = f"{it.systemctl} daemon-reload"
    if stale:
        text = f"files changed that systemd has not read: units of {list_some(stale)}"
        yield "bad", text, reload
    for path in sorted(replaced):
        text = f"the package's unit file is replaced by {path}"
        yield "bad", text, f"mv {shlex.quote(path)} {shlex.quote(path)}.replaced && {reload}"
    for each, names in overrides.items():
        text = f"{list_some(names)}: {each.directive}= in {each.file}: {_why_owned(each)}"
        yield "bad", text, f"{_undo(it, each)} && {reload}"
    if not stale and not overrides and not replaced:
        yield "ok", "no drop-in changes what workers depend on", ""


def _find_own_files(directories: Iterable[str]) -> set[str]:
    """Return the units of workers that have a unit file, or drop-ins beside ours."""
    found = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name.startswith(UNIT_PREFIX) and not name.startswith(f"{UNIT_PREFIX}."):
                    with contextlib.suppress(NotADirectoryError):
                        if os.listdir(f"{directory}/{name}") == [unit_files.DROPIN]:
                            continue
                    found.add(name.removesuffix(".d"))
    return found


def _find_overrides(paths: Iterable[str]) -> set[_Override]:
    found: set[_Override] = set()
    for path in paths:
        if _is_shipped(path):
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue  # removed since: systemd has not read that, which is said
        if not text.startswith(unit_files.MARK):
            names = {name for name in _ASSIGNED.findall(text) if find_owned(name)}
            found.update(_Override(path, name) for name in names)
    return found


def _is_replaced(it: Installation, path: str) -> bool:
    """True if the unit file of a worker is not ours: of one worker, where no mask can be put, or in
    place of the package's. A user's own are made by apply, which compares them."""
    is_template = os.path.basename(path) == f"{UNIT_PREFIX}{UNIT_SUFFIX}"
    return not is_template or (not it.scope.user and not _is_shipped(path))


def _is_shipped(path: str) -> bool:
    return path.startswith(("/usr/lib/", "/lib/", "/usr/local/lib/"))


def _why_owned(override: _Override) -> str:
    owned = find_owned(override.directive)
    return owned.why if owned else ""


def _undo(it: Installation, override: _Override) -> str:
    """Return the command that removes the directive; a file for all services is only hidden."""
    directory, name = os.path.split(override.file)
    if os.path.basename(directory) == "service.d":
        ours = f"{it.scope.unit_directory}/{UNIT_PREFIX}{UNIT_SUFFIX}.d"
        return f"mkdir -p {ours} && ln -s /dev/null {ours}/{shlex.quote(name)}"
    pattern = shlex.quote(rf"/^[[:space:]]*{override.directive}[[:space:]]*=/d")
    return f"sed -i {pattern} {shlex.quote(override.file)}"
