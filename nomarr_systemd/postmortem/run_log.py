"""The journal of one run: lines of the worker, lines of systemd about it, and what was dropped.

A line belongs to the run whose invocation journald recorded with it. journald does not always know
the invocation: not in a user manager whose cgroups it cannot place, and not for lines that it read
after the process had gone. Such lines are assigned by unit, cgroup or process, and by time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from nomarr_systemd.core.death import name_signal
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.text import clean, clean_lines
from nomarr_systemd.postmortem.stack_traces import Trace, recognise
from nomarr_systemd.systemd.journal_reader import (
    COREDUMP,
    DROPPED,
    EXITED,
    FAILED,
    RESOURCES,
    Entry,
    Journal,
    Terms,
)

_MAX_LINES: Final = 2000
_MAX_TEXT: Final = 1000
_GRACE_US: Final = 5_000_000  # a line may be late; that of systemd-coredump always is
_COREDUMP_SLICE: Final = r"_SYSTEMD_SLICE=system-systemd\x2dcoredump.slice"
_INVOCATION: Final = re.compile(r"^INVOCATION_ID=[0-9a-f]{32}$", re.MULTILINE)
_KILLING: Final = re.compile(r"\S+: Killing process [0-9]+ \(.*\) with signal ")


class JournalTerms(NamedTuple):
    """The journal matches for one worker, in the system or in a user manager."""

    component: Component
    user: bool
    cgroup: str = ""  # of the unit, in a user manager
    pid: str = ""  # of the last main process, in a user manager

    def of_worker(self) -> Terms:
        """Lines of any run of the unit."""
        unit = self.component.unit
        if not self.user:
            return [[f"_SYSTEMD_UNIT={unit}"]]
        mine = f"_UID={os.getuid()}"
        terms = [[mine, f"_SYSTEMD_USER_UNIT={unit}"]]
        if self.cgroup:
            terms.append([mine, f"_SYSTEMD_CGROUP={self.cgroup}"])
        if self.pid:
            terms.append([mine, f"_PID={self.pid}"])
        return terms

    def of_systemd(self) -> Terms:
        """Lines of systemd about any run of the unit."""
        if self.user:
            return [[f"_UID={os.getuid()}", f"USER_UNIT={self.component.unit}"]]
        return [["_PID=1", f"UNIT={self.component.unit}"]]

    def of_systemd_about(self, run: str) -> Terms:
        """Lines of systemd about one run."""
        if self.user:
            return [[f"_UID={os.getuid()}", f"USER_INVOCATION_ID={run}"]]
        return [["_PID=1", f"INVOCATION_ID={run}"]]

    def is_of_systemd(self, entry: Entry) -> bool:
        """Return True if systemd wrote the entry, by a field of journald: any program can send a
        MESSAGE_ID."""
        if self.user:
            return entry.get("_COMM") == "systemd"
        return entry.get("_PID") == "1"

    def of_controller_about(self, run: str) -> Terms:
        """Entries of our controller about one run."""
        uid = os.getuid() if self.user else 0
        return [[f"_UID={uid}", f"NOMARR_INVOCATION_ID={run}"]]

    def of_coredump(self) -> Terms:
        """Entries of systemd-coredump. It writes them as another user than root, so they are known
        by the slice that it runs in: journald adds that, and no worker can be there."""
        field = "COREDUMP_USER_UNIT" if self.user else "COREDUMP_UNIT"
        return [[_COREDUMP_SLICE, f"MESSAGE_ID={COREDUMP}", f"{field}={self.component.unit}"]]

    def of_dropping(self) -> Terms:
        return [["_TRANSPORT=driver", f"MESSAGE_ID={DROPPED}"]]


class Line(NamedTuple):
    """One line of the run, without control characters."""

    wall_us: int
    source: str
    pid: int | None
    priority: int
    text: str


class Coredump(NamedTuple):
    pid: int
    file: str  # "": the dump was not kept
    executable: str


class RunLog(NamedTuple):
    """What the journal has of one run. A missing value is empty, 0 or None."""

    lines: tuple[Line, ...] = ()
    traces: tuple[Trace, ...] = ()
    began_us: int = 0
    ended_us: int = 0
    result: str = ""  # systemd's values, as core.death takes them
    exit_code: str = ""
    exit_status: str = ""
    memory_peak: int = 0
    dropped: int = 0
    coredump: Coredump | None = None
    pids: frozenset[int] = frozenset()  # processes of the worker that logged something


def read_run(
    journal: Journal, terms: JournalTerms, invocation: str, *, near_us: int = 0, limit: int = 600
) -> RunLog:
    """Read the last lines of a run; ``near_us`` is when it was booked, if that is known."""
    run = invocation.partition("#")[0]
    managed = journal.read_back(terms.of_systemd_about(run), limit=60)
    began_us = managed[0].wall_us if managed else 0
    until_us = _find_end(journal, terms, run, managed, near_us)
    # First by invocation, whatever the clock did; then lines without one, by time.
    placed = [[f"_SYSTEMD_INVOCATION_ID={run}"], *terms.of_systemd_about(run)]
    entries = journal.read_back([*placed, *terms.of_controller_about(invocation)], limit=limit)
    if began_us:
        others = journal.read_back(
            terms.of_worker(),
            limit=limit,
            until_us=until_us,
            since_us=began_us,
            wanted=lambda entry: _is_unplaced(terms, entry),
        )
        if others:
            entries = sorted([*entries, *others], key=lambda entry: entry.wall_us)[-limit:]
    log = _collect(terms, entries, began_us)
    since_us = began_us or (entries[0].wall_us if entries else near_us)
    if since_us:
        log = _add_losses(journal, terms, log, run, since_us, until_us)
    return log


def read_end(
    journal: Journal, terms: JournalTerms, run: str, *, since_us: int, until_us: int
) -> RunLog | None:
    """Read what a fingerprint needs; None if the journal has nothing of that run."""
    managed = journal.read_back(terms.of_systemd_about(run), limit=60)
    entries = journal.read_back([[f"_SYSTEMD_INVOCATION_ID={run}"]], limit=300)
    # Not before its start: a part of the previous trace would make another fingerprint.
    since_us = max(since_us, managed[0].wall_us if managed else 0)
    entries += journal.read_back(
        terms.of_worker(),
        limit=300,
        since_us=since_us,
        until_us=until_us,
        wanted=lambda entry: _is_unplaced(terms, entry),
    )
    if not entries and not managed:
        return None
    log = _collect(terms, entries, since_us)
    if dump := _find_coredump(journal, terms, run, since_us, until_us):
        log = log._replace(traces=(*log.traces, *recognise(clean_lines(dump.text))))
    return log


def _is_unplaced(terms: JournalTerms, entry: Entry) -> bool:
    """Return True if the entry has no invocation, or that of another manager."""
    if entry.get("USER_INVOCATION_ID") or entry.get("INVOCATION_ID"):
        return False  # systemd's own entry, which is found by its invocation
    if entry.get("_SYSTEMD_INVOCATION_ID"):
        return terms.user and not entry.get("_SYSTEMD_USER_UNIT")
    return True


def find_failed_job(journal: Journal, terms: JournalTerms) -> Entry | None:
    """Return systemd's entry about the last job of the unit, if that job failed."""
    jobs = journal.read_back(
        terms.of_systemd(), limit=1, wanted=lambda entry: bool(entry.get("JOB_RESULT"))
    )
    if not jobs or jobs[0].get("JOB_RESULT") in ("done", "canceled", "skipped"):
        return None
    return jobs[0]


def _find_end(
    journal: Journal, terms: JournalTerms, run: str, managed: list[Entry], near_us: int
) -> int | None:
    """Return when the next run of the unit began; None if there is none yet."""
    if not managed:
        return near_us + _GRACE_US if near_us else None
    field = "USER_INVOCATION_ID" if terms.user else "INVOCATION_ID"
    following = journal.find_after(
        terms.of_systemd(), managed[-1].wall_us, lambda entry: entry.get(field) not in ("", run)
    )
    return following.wall_us if following else None


def _collect(terms: JournalTerms, entries: list[Entry], began_us: int) -> RunLog:
    lines: list[Line] = []
    by_process: dict[str, list[str]] = {}
    pids = set()
    killings = 0  # lines of systemd, one for each process that is left of a run
    log = RunLog(began_us=began_us)
    for entry, texts in zip(entries, _read_texts(entries), strict=True):
        is_killing = False
        if terms.is_of_systemd(entry):
            log = _take_facts(log, entry)
            is_killing = bool(_KILLING.match(entry.text))
        elif not entry.get("NOMARR_INVOCATION_ID"):  # those of the controller have it
            pids.add(_number(entry.get("_PID")))
        killings = killings + 1 if is_killing else 0
        if killings > 1:
            if killings > 2:
                lines.pop()
            lines.append(_make_line(entry, f"… and {killings - 1} more processes of this run"))
            continue
        lines += [_make_line(entry, text) for text in texts]
        by_process.setdefault(entry.get("_PID"), []).extend(texts)
    traces = [trace for texts in by_process.values() for trace in recognise(texts)]
    return log._replace(lines=tuple(lines), traces=tuple(traces), pids=frozenset(pids - {0}))


def _read_texts(entries: list[Entry]) -> list[list[str]]:
    """Return the lines of each entry: the last _MAX_LINES of all, each cut to _MAX_TEXT. An entry
    may have thousands of lines, and a worker must not be able to make this slow."""
    found = []
    left = _MAX_LINES
    for entry in reversed(entries):
        found.append(clean_lines(entry.text, _MAX_TEXT, left))
        left -= len(found[-1])
    found.reverse()
    return found


def _take_facts(log: RunLog, entry: Entry) -> RunLog:
    match entry.message_id:
        case message_id if message_id == EXITED and entry.get("COMMAND") in ("", "ExecStart"):
            return log._replace(
                exit_code=entry.get("EXIT_CODE"),
                exit_status=_name_status(entry.get("EXIT_CODE"), entry.get("EXIT_STATUS")),
                ended_us=entry.wall_us,
            )
        case message_id if message_id == FAILED:
            return log._replace(
                result=entry.get("UNIT_RESULT"), ended_us=log.ended_us or entry.wall_us
            )
        case message_id if message_id == RESOURCES:
            return log._replace(memory_peak=_number(entry.get("MEMORY_PEAK")))
    return log


def _add_losses(
    journal: Journal,
    terms: JournalTerms,
    log: RunLog,
    run: str,
    since_us: int,
    until_us: int | None,
) -> RunLog:
    """Add core dumps and dropped messages; systemd-coredump and journald report them."""
    late_us = None if until_us is None else until_us + _GRACE_US
    if entry := _find_coredump(journal, terms, run, since_us, until_us):
        texts = clean_lines(entry.text)
        log = log._replace(
            coredump=Coredump(
                _number(entry.get("COREDUMP_PID")),
                clean(entry.get("COREDUMP_FILENAME")),
                clean(entry.get("COREDUMP_EXE")),
            ),
            traces=(*log.traces, *recognise(texts)),
        )
    unit = terms.component.unit
    drops = journal.read_back(
        terms.of_dropping(),
        limit=100,
        until_us=late_us,
        since_us=since_us,
        wanted=lambda entry: (
            unit in (entry.get("OBJECT_SYSTEMD_UNIT"), entry.get("OBJECT_SYSTEMD_USER_UNIT"))
            or unit in entry.text
        ),
    )
    return log._replace(dropped=sum(_number(entry.get("N_DROPPED")) or 1 for entry in drops))


def _find_coredump(
    journal: Journal, terms: JournalTerms, run: str, since_us: int, until_us: int | None
) -> Entry | None:
    late_us = None if until_us is None else until_us + _GRACE_US
    dumps = journal.read_back(terms.of_coredump(), limit=5, until_us=late_us, since_us=since_us)
    return choose_coredump(dumps, run, until_us)


def choose_coredump(dumps: Iterable[Entry], run: str, until_us: int | None) -> Entry | None:
    """Return the entry about the last core dump of a run. It comes late, perhaps in the next run,
    which may have dumped, too: the environment of the process names its run."""
    mine = f"INVOCATION_ID={run}"
    found = None
    for entry in dumps:
        named = _INVOCATION.search(entry.get("COREDUMP_ENVIRON"))
        made_us = _number(entry.get("COREDUMP_TIMESTAMP"))
        if named[0] == mine if named else until_us is None or made_us <= until_us:
            found = entry
    return found


def _make_line(entry: Entry, text: str) -> Line:
    source = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or "?"
    pid = _number(entry.get("_PID")) or None
    return Line(entry.wall_us, clean(source, 40), pid, _number(entry.get("PRIORITY"), 6), text)


def _name_status(code: str, status: str) -> str:
    """Return an exit status as core.death takes it: for a signal, its name."""
    is_signal = code in ("killed", "dumped") and status.isdigit()
    return name_signal(_number(status)) if is_signal else status


def _number(text: str, default: int = 0) -> int:
    return int(text[:18]) if text.isascii() and text.isdigit() else default
