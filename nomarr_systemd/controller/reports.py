"""The files in ``pending/``: one for each death, which the controller writes when systemd shows it,
and one for each worker whose backoff is over, which ``nomarr-restart@`` writes.

A report stays until its death is booked, carried out and told. If the supervisor does not answer,
it is moved to ``untold/`` and sent again later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Final

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component, split_invocation
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.host.files import remove
from nomarr_systemd.host.layout import Paths

MAX_BYTES: Final = 4096
DUE: Final = "due-"
# Results that are not systemd's own.
NOT_BEGUN: Final = "not-begun"  # it could not be started; the invocation is its wanted unit's
OVERTAKEN: Final = "overtaken"  # it was started again before it was looked at
ENDED_UNASKED: Final = "ended"  # it ended well, without a stop request
UNTOLD_MS: Final = 600_000  # then the claims of the run have expired long ago


class Report(NamedTuple):
    """What systemd showed of one death."""

    component: Component
    invocation: str
    result: str = ""
    exit_code: str = ""
    exit_status: str = ""
    age_ms: int = 0  # by wall-clock time
    is_untold: bool = False  # it is booked, and only the supervisor has to be told


class Reports(NamedTuple):
    """All that waits for the controller."""

    deaths: list[Report]
    due: dict[Component, int]  # backoff is over; time of the file, for ``clear_bell``


def read_reports(paths: Paths, *, with_untold: bool = False) -> Reports:
    """Read every complete file. One without its last line is being written; one that is no report
    is removed: the state of the failed unit shows the failure, too."""
    found = Reports([], {})
    for name, text, written_ns in _read_all(paths.pending):
        path = os.path.join(paths.pending, name)
        if not text.endswith("\n") or "END=1" not in text.splitlines():
            continue
        try:
            report = _parse(text, written_ns)
        except BadName:
            remove(path)
            continue
        if isinstance(report, Report):
            found.deaths.append(report)
        else:
            found.due[report] = written_ns
    if with_untold:
        found.deaths.extend(_read_untold(paths.untold))
    return found


def _read_untold(directory: str) -> Iterable[Report]:
    for name, text, written_ns in _read_all(directory):
        try:
            report = _parse(text, written_ns)
        except BadName:
            report = None
        if isinstance(report, Report) and report.age_ms < UNTOLD_MS:
            yield report._replace(is_untold=True)
        else:
            remove(os.path.join(directory, name))


def _read_all(directory: str) -> Iterable[tuple[str, str, int]]:
    """Yield the name and text of each file, and when it was written."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in sorted(names):
        try:
            with open(os.path.join(directory, name), encoding="ascii", errors="replace") as file:
                written_ns = os.fstat(file.fileno()).st_mtime_ns
                yield name, file.read(MAX_BYTES), written_ns
        except OSError:
            continue  # another controller has removed it


def _parse(text: str, written_ns: int) -> Report | Component:
    """Return the failure of a file, or the worker of a bell; else raise BadName."""
    words = dict(line.partition("=")[::2] for line in text.splitlines())
    component = parse_component(words.get("INSTANCE", ""))
    if "DUE" in words:
        return component
    invocation = words.get("MONITOR_INVOCATION_ID", "")
    split_invocation(invocation)
    return Report(
        component,
        invocation,
        words.get("MONITOR_SERVICE_RESULT", ""),
        words.get("MONITOR_EXIT_CODE", ""),
        words.get("MONITOR_EXIT_STATUS", ""),
        max(0, time.time_ns() - written_ns) // 1_000_000,
    )


def write_report(paths: Paths, report: Report) -> None:
    """Write a report; the time of the file is that of the death. If /run is full, it is not
    written: the death is found again."""
    text = (
        f"MONITOR_INVOCATION_ID={report.invocation}\nMONITOR_SERVICE_RESULT={report.result}\n"
        f"MONITOR_EXIT_CODE={report.exit_code}\nMONITOR_EXIT_STATUS={report.exit_status}\n"
        f"INSTANCE={report.component.instance}\nEND=1\n"
    )
    died_ns = time.time_ns() - report.age_ms * 1_000_000
    with contextlib.suppress(OSError):
        os.makedirs(paths.pending, 0o700, exist_ok=True)
        with open(os.path.join(paths.pending, report.invocation), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.utime(file.fileno(), ns=(died_ns, died_ns))


def make_directory(paths: Paths) -> None:
    """Make the directory of reports if it is missing: ``nomarr-restart@`` cannot."""
    with contextlib.suppress(OSError):
        os.makedirs(paths.pending, 0o700, exist_ok=True)


def clear_report(paths: Paths, invocation: str) -> None:
    """Remove a report; one that cannot be removed is read again, which does no harm."""
    for directory in (paths.pending, paths.untold):
        with contextlib.suppress(OSError):
            remove(os.path.join(directory, invocation))


def keep_untold(paths: Paths, invocation: str) -> None:
    """Keep a report only for the supervisor."""
    try:
        os.makedirs(paths.untold, 0o700, exist_ok=True)
        os.rename(os.path.join(paths.pending, invocation), os.path.join(paths.untold, invocation))
    except OSError:
        return  # it is there already, or /run is full: it stays pending


def clear_bell(paths: Paths, component: Component, written_ns: int) -> None:
    """Remove the file of a backoff that is over, unless a newer one was written meanwhile."""
    path = os.path.join(paths.pending, f"{DUE}{component.instance}")
    with contextlib.suppress(OSError):
        if os.stat(path).st_mtime_ns == written_ns:
            remove(path)
