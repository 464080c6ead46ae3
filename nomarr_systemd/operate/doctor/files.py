"""Checks of the files of an installation: reports of failures, the store, owners and modes."""

from __future__ import annotations

import grp
import os
import shlex
import stat
import time
from collections.abc import Iterator
from typing import Final

from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.core.text import count
from nomarr_systemd.host import machine
from nomarr_systemd.host.layout import VIEWERS, WORKER_USER
from nomarr_systemd.ledger.ledger import room_for
from nomarr_systemd.ledger.public import SUFFIX
from nomarr_systemd.ledger.spool import BAD_SUFFIX, Spool
from nomarr_systemd.operate import controlling, store_check
from nomarr_systemd.operate.doctor.installation import Found, Installation, is_fifo, list_some
from nomarr_systemd.systemd.manager import SUPERVISOR

_LEAST_FREE: Final = 64 << 20
_PENDING_S: Final = 60.0  # a failure is booked within seconds
_MAX_REPORT: Final = 65_536
_JOB_FILES: Final = tuple(
    f"work.db{end}" for end in ("", "-journal", "-shm", "-wal", ".lock", ".queue", ".setting-aside")
)
_TMPFILES: Final = "systemd-tmpfiles --create nomarr.conf"


def check_failures(it: Installation) -> Found:
    paths = it.paths
    restart = f"{it.systemctl} restart nomarr-controller.socket"
    if not is_fifo(paths.failures):
        yield "bad", f"{paths.failures} is not there, or is no FIFO", restart
    elif os.lstat(paths.failures).st_mode & 0o077:
        yield "bad", f"{paths.failures} is open to others", restart
    else:
        yield "ok", "the failures FIFO is there", ""
    reconcile = f"{it.nomarrctl} reconcile"
    try:
        names = os.listdir(paths.pending)
    except (FileNotFoundError, NotADirectoryError):
        yield "bad", f"there is no directory {paths.pending}: no failure can be reported", restart
        names = []
    old = [name for name in names if _age_s(paths.pending, name) > _PENDING_S]
    cut = [name for name in old if not _is_whole(os.path.join(paths.pending, name))]
    if len(old) > len(cut):
        text = f"{count(len(old) - len(cut), 'failure')} waiting to be booked"
        yield "bad", text, reconcile
    if cut:
        files = " ".join(shlex.quote(os.path.join(paths.pending, name)) for name in cut)
        yield (
            "bad",
            f"not reports of failures, in {paths.pending}: {list_some(cut, 3)}",
            f"rm {files}",
        )
    entries, unreadable = Spool(paths.spool).read()
    if entries:
        yield "bad", "failures from while the store was away are not booked yet", reconcile
    if unreadable:
        text = f"not reports of failures, in {paths.spool}: {list_some(sorted(unreadable), 3)}"
        yield "bad", text, f"{reconcile}  # sets them aside"
    bad = [name for name in _list(paths.spool) if name.endswith(BAD_SUFFIX)]
    if bad:
        files = " ".join(shlex.quote(os.path.join(paths.spool, name)) for name in bad[:3])
        text = "reports of failures that could not be read were set aside; when you have seen them"
        yield "warn", f"{text}:", f"rm {files}"


def check_store(it: Installation) -> Found:
    settings = it.config.store
    if not it.scope.user and os.geteuid() != 0:
        yield "warn", "only root may open the ledger", f"sudo {it.nomarrctl} doctor"
        return
    concerns = store_check.find_concerns(it.scope, it.config)
    yield from concerns
    if any(each.level == "bad" for each in concerns):
        return
    parsed = parse_store_url(settings.url)
    if isinstance(parsed, SqliteUrl):
        yield from _check_sqlite(it, parsed.directory)
        return
    tried = list(store_check.try_stores(it.scope, it.config))
    yield from tried
    if not tried:
        accounts = controlling.read_accounts(it.scope, it.config)
        yield "ok", f"the ledger is readable, {count(len(accounts), 'account')}", ""


def _check_sqlite(it: Installation, directory: str) -> Found:
    # Not opened as the programs do: they set a corrupt ledger aside and begin a new one.
    from nomarr_systemd.store.sqlite.inspection import inspect  # late: not for nomarrctl --help

    found = inspect(os.path.join(directory, "ledger.db"))
    match found.problem:
        case "missing":
            yield "ok", "there is no ledger yet: no worker has died", ""
        case "corrupt":
            text = f"the ledger is corrupt ({found.why}); the controller will set it aside and"
            yield "bad", f"{text} begin a new one; at once:", f"{it.nomarrctl} reconcile"
        case "locked":
            text = f"the ledger is locked by {found.why}: no failure can be booked"
            yield "bad", text, f"kill {found.holder}"
        case "unreadable":
            yield "bad", f"the ledger cannot be read: {found.why}", f"ls -l {directory}"
        case _:
            yield "ok", f"the ledger is readable, {count(found.rows, 'account')}", ""
            yield from _check_room(it, directory, found.room)
    if machine.is_volatile(directory):
        kind = machine.filesystem_of(directory)
        text = f"{directory} is on {kind}: a reboot forgets every restart"
        yield "bad", text, "set [store] url in nomarr.toml to a disk"
    if machine.share_disk(directory, f"{directory}/work"):
        text = f"jobs are on the ledger's disk: workers could fill it ({directory}/work)"
        yield "ok", text, ""
    free = machine.free_bytes(directory)
    if free < _LEAST_FREE:
        yield "bad", f"only {free >> 20} MiB are free in {directory}", "make room"
    aside = sorted(name for name in os.listdir(directory) if ".corrupt-" in name)
    if aside:
        text = f"a corrupt database was set aside: {list_some(aside, 3)}; when it is kept elsewhere"
        yield "warn", f"{text}:", f"rm {shlex.quote(directory)}/*.corrupt-*"


def _check_room(it: Installation, directory: str, room: int) -> Found:
    """The room that the ledger keeps for a disk that workers have filled."""
    wanted = room_for(len(it.config.components()))
    if room >= wanted // 2:
        yield "ok", f"the ledger has {room >> 20} MiB of its own, should its disk be full", ""
    else:
        text = f"the ledger has only {room >> 20} of {wanted >> 20} MiB of its own, should its disk"
        mend = f"{it.nomarrctl} reconcile  # with {8 * wanted >> 20} MiB free in {directory}"
        yield "warn", f"{text} be full", mend


def check_rights(it: Installation) -> Found:
    owner = os.getuid() if it.scope.user else 0
    is_well = True
    for path in (it.paths.state, it.paths.hold, it.paths.spool, it.paths.pending):
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            continue  # made when it is needed; check_failures knows of pending
        if facts.st_uid != owner:
            is_well = False
            yield "bad", f"{path} belongs to uid {facts.st_uid}", f"chown {owner} {path}"
        elif facts.st_mode & 0o022:
            is_well = False
            yield "bad", f"{path} can be changed by others", f"chmod go-w {path}"
    for text, mend in [*_check_ledger(it), *_check_jobs(it), *_check_public(it)]:
        is_well = False
        yield "bad", text, mend
    if not it.scope.user:
        try:
            group = grp.getgrnam(VIEWERS)
        except KeyError:
            # tmpfiles fails for files of the jobs that others than their directory's owner made.
            mend = f"systemd-sysusers; {_TMPFILES}; {it.systemctl} restart {SUPERVISOR}"
            yield "bad", f"there is no group {VIEWERS}", mend
            return
        if os.getuid() and group.gr_gid not in os.getgroups():
            yield "warn", f"you are not in the group {VIEWERS}", f"usermod -aG {VIEWERS} YOUR-NAME"
    if is_well:
        yield "ok", "files and directories have the right owners and modes", ""


def _check_ledger(it: Installation) -> Iterator[tuple[str, str]]:
    ledger = f"{_store_directory(it)}/ledger.db"
    if os.path.exists(ledger) and os.stat(ledger).st_mode & 0o077:
        yield f"{ledger} is open to others", f"chmod 600 {ledger}"


def _check_jobs(it: Installation) -> Iterator[tuple[str, str]]:
    """Workers and supervisor are different users, and use the files by their group."""
    directory = f"{_store_directory(it)}/work"
    try:
        place = os.stat(directory)
    except FileNotFoundError:
        return
    if not it.scope.user:
        try:
            gid = grp.getgrnam(WORKER_USER).gr_gid
        except KeyError:
            yield f"there is no group {WORKER_USER}", f"systemd-sysusers; {_TMPFILES}"
            return
        if place.st_gid != gid or place.st_mode & 0o070 != 0o070:
            mend = f"chown {WORKER_USER}:{WORKER_USER} {directory} && chmod 2770 {directory}"
            yield f"workers cannot use {directory}, where their jobs are", mend
            return  # its files are judged by its group
    wanted, words = (0o600, "u=rw") if it.scope.user else (0o660, "660")
    for name in _JOB_FILES:  # no other name: the directory is the workers', and root pastes these
        path = os.path.join(directory, name)
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            continue
        is_kind = stat.S_ISFIFO if name.endswith(".queue") else stat.S_ISREG
        if not is_kind(facts.st_mode) or facts.st_nlink > 1:
            # What mends a file would mend what it leads to, and give that to the workers.
            yield f"a link is in place of the jobs' store: {path}", f"rm {shlex.quote(path)}"
            continue
        is_right = facts.st_uid == place.st_uid if it.scope.user else facts.st_gid == place.st_gid
        if not is_right or facts.st_mode & wanted != wanted:
            where, file = shlex.quote(directory), shlex.quote(path)
            owner = f"chown -h --reference={where} {file} && chmod {words} {file}"
            yield f"the jobs' store cannot be used by all who need it: {path}", owner


def _check_public(it: Installation) -> Iterator[tuple[str, str]]:
    """Members of the group must be able to read what is published."""
    public = it.paths.public
    if it.scope.user or not os.path.isdir(public):
        return
    try:
        gid = grp.getgrnam(VIEWERS).gr_gid
    except KeyError:
        return  # check_rights says so
    place = os.stat(public)
    if place.st_uid or place.st_gid != gid or place.st_mode & 0o777 != 0o750:
        mend = f"chown root:{VIEWERS} {public} && chmod 2750 {public}"
        yield f"the group {VIEWERS} cannot read {public}, or others can", mend
    closed = []
    for name in _list(public):
        if not name.endswith(SUFFIX):
            continue  # one that is being written
        try:
            facts = os.stat(os.path.join(public, name))
        except FileNotFoundError:
            continue  # its worker was removed meanwhile
        if facts.st_gid != gid or facts.st_mode & 0o777 != 0o640:
            closed.append(name)
    if closed:
        mend = f"chown root:{VIEWERS} {public}/*.json && chmod 640 {public}/*.json"
        names = list_some(sorted(closed), 3)
        yield f"the group {VIEWERS} cannot read, or others can: {names} in {public}", mend


def _store_directory(it: Installation) -> str:
    parsed = parse_store_url(it.config.store.url)
    return parsed.directory if isinstance(parsed, SqliteUrl) else it.paths.state


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_whole(path: str) -> bool:
    """Return True if the hook wrote the report to its end."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_REPORT).rstrip().endswith(b"END=1")
    except FileNotFoundError:
        return True  # booked meanwhile
    except OSError:
        return False


def _age_s(directory: str, name: str) -> float:
    try:
        return time.time() - os.lstat(os.path.join(directory, name)).st_mtime
    except FileNotFoundError:
        return 0.0  # booked meanwhile
