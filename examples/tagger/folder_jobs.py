"""Jobs from a folder: every new or changed file in it is a job. No database is needed. An example
of a source of jobs of one's own: copy it, and see below what it is not.

    class Tagger(Worker):
        def source(self) -> FolderJobs:
            return FolderJobs("/srv/music", "*.flac", "*.wav")

The state of each job is a file in a state folder, which is the workers' own: below systemd's
$STATE_DIRECTORY, or where the user's state is, unless another is given. Other users that may
write the folder of the jobs cannot change it. A claim is a kernel lock on that file, so it ends
with its process. Any number of workers of one user may share a folder.

It is no queue: crash_policy, job_max_crashes and the refunds of docs/policy.md do not hold for its
jobs, the supervisor does not settle them, and ``nomarrctl jobs`` does not show them. For all that,
feed the pool's queue: ``find FOLDER -name '*.flac' -print0 | nomarrctl jobs add -0 -``.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from typing import Any, Final

from nomarr_systemd.core.errors import ConfigError, NotReady
from nomarr_systemd.core.job import describe_error
from nomarr_systemd.core.json import JsonError, decode

STATE: Final = ".nomarr"  # in the folder of the jobs, where earlier versions kept it
_MAX_BYTES: Final = 1 << 20


class FolderJobs:
    """A ``Source`` of the files below ``folder`` whose names match one of ``patterns``.

    A file is taken when it was not written to for ``quiet_s``: until then it may be incomplete. One
    that was begun ``max_crashes`` times and never ended has killed its workers: it is quarantined.
    """

    def __init__(
        self,
        folder: str,
        *patterns: str,
        state: str = "",
        quiet_s: float = 2.0,
        max_crashes: int = 2,
    ) -> None:
        self._folder = os.path.abspath(folder)
        self._patterns = patterns or ("*",)
        self._state = os.path.abspath(state) if state else _find_state(self._folder)
        self._quiet_s = quiet_s
        self._max_crashes = max_crashes
        self._found: Iterator[str] = iter(())
        self._held: dict[str, int] = {}  # locks, by job
        try:
            os.makedirs(self._state, 0o750, exist_ok=True)
            # Kept open: another folder put in its place is not used.
            self._place = _open_own(self._state)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self._state} as the state folder: {error.strerror}",
                hint="make it a folder of this user's that nobody else may write,"
                " or give another as state=",
            ) from error

    def discover(self) -> str | None:
        job = self._next()
        if job is None:
            self._found = self._walk()
            job = self._next()
        return job

    def claim(self, job: str) -> bool:
        name = self._name(job)
        try:
            fd = self._open(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise NotReady(f"cannot write the state of {job!r}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        note = _parse(os.pread(fd, _MAX_BYTES, 0))
        stamp = _stamp(job)
        begun = note.get("begun") if note.get("stamp") == stamp else 0
        if not isinstance(begun, int):  # not written by this program
            begun = 0
        free = stamp is not None and not _is_over(note, stamp)
        if free and begun >= self._max_crashes:
            why = f"{begun} workers began it and none finished it"
            _write(fd, {"path": job, "stamp": stamp, "status": "quarantined", "error": why})
            free = False
        if not free:
            os.close(fd)
            return False
        try:
            # Written before the work, so that a kill during it is counted.
            _write(fd, {"path": job, "stamp": stamp, "status": "running", "begun": begun + 1})
        except OSError as error:
            os.close(fd)
            raise NotReady(f"cannot write the state of {job!r}: {error.strerror}") from error
        self._held[job] = fd
        return True

    def complete(self, job: str, result: object) -> None:
        self._end(job, {"status": "done", "result": result})

    def fail(self, job: str, error: Exception) -> None:
        self._end(job, {"status": "error", "error": describe_error(error)})

    def release(self, job: str) -> None:
        self._end(job, {"status": "pending"})

    def _end(self, job: str, note: dict[str, Any]) -> None:
        """Write the state, then unlock: no worker takes the job before its end is recorded."""
        fd = self._held.pop(job)
        try:
            kept = _parse(os.pread(fd, _MAX_BYTES, 0))
            # The stamp of the beginning: if the file was changed meanwhile, it is a new job.
            _write(fd, {"path": job, "stamp": kept.get("stamp"), **note})
        except OSError as error:
            raise NotReady(f"cannot write the state of {job!r}: {error.strerror}") from error
        finally:
            os.close(fd)

    def _next(self) -> str | None:
        """The next file that is not finished. Another worker may claim it first."""
        for job in self._found:
            stamp = _stamp(job)
            if stamp is None or time.time() - stamp[1] / 1e9 < self._quiet_s:
                continue
            try:
                with open(self._open(self._name(job), os.O_RDONLY), "rb") as file:
                    note = _parse(file.read(_MAX_BYTES))
            except OSError:
                return job  # no state yet; if it cannot be written, claim() says why
            if not _is_over(note, stamp):
                return job
        return None

    def _walk(self) -> Iterator[str]:
        """Files in the order of names; none if the folder does not exist."""
        for place, folders, files in os.walk(self._folder):
            folders[:] = sorted(
                name for name in folders if os.path.join(place, name) != self._state
            )
            for name in sorted(files):
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
                    yield os.path.join(place, name)

    def _name(self, job: str) -> str:
        return f"{_digest(job)}.json"

    def _open(self, name: str, flags: int) -> int:
        """Open a state file without following a link; OSError, and no wait, if it is not plain."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, 0o640, dir_fd=self._place)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", name)


def _find_state(folder: str) -> str:
    """The state folder of this folder's jobs, which other users cannot change."""
    before = os.path.join(folder, STATE)
    try:
        os.close(_open_own(before))
    except OSError:
        given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return os.path.join(given or f"{home}/nomarr/work", "folders", _digest(folder))
    return before


def _open_own(folder: str) -> int:
    """A descriptor of the folder; OSError unless it is ours and nobody else may write it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, "it is another user's, or others may write it", folder)


def _digest(path: str) -> str:
    return hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()


def _stamp(job: str) -> list[int] | None:
    """Size and modification time; None if there is no such plain file."""
    try:
        status = os.stat(job)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return [status.st_size, status.st_mtime_ns]


def _is_over(note: dict[str, Any], stamp: list[int] | None) -> bool:
    return note.get("stamp") == stamp and note.get("status") in ("done", "error", "quarantined")


def _parse(text: bytes) -> dict[str, Any]:
    """The state; {} if it is incomplete or not an object."""
    try:
        note = decode(text)
    except JsonError:
        return {}
    return note if isinstance(note, dict) else {}


def _write(fd: int, note: dict[str, Any]) -> None:
    """Write in place, because the lock is on this file; what a kill cuts off is read as {}."""
    try:
        text = json.dumps(note)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps({**note, "result": None, "not_kept": "the result is not JSON"})
    data = text.encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    os.fdatasync(fd)
