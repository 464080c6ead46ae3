"""One death of a worker: from systemd's values to a class, a code and one line for people.

The values are MONITOR_SERVICE_RESULT, MONITOR_EXIT_CODE and MONITOR_EXIT_STATUS of the OnFailure=
hook (systemd.exec(5)); a label says why the supervisor ended the worker.
"""

from __future__ import annotations

import signal
from typing import Final, Literal

from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import describe_ms
from nomarr_systemd.core.time import Moment

Reason = Literal["failure", "health", "timeout", "manual"]

# si_code of SIGCHLD, as systemd shows it in ExecMainCode.
_EXIT_WORDS = {"1": "exited", "2": "killed", "3": "dumped"}

UNKNOWN, HEARTBEAT_TIMEOUT, INVALID_HEARTBEAT = -1, -2, -3
EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG = 70, 75, 78
BY_SIGKILL, BY_SIGSYS = -int(signal.SIGKILL), -int(signal.SIGSYS)

KNOWN_STATUSES = {
    EX_SOFTWARE: "too many errors in a row",
    EX_TEMPFAIL: "temporary failure",
    EX_CONFIG: "configuration",
    # systemd's own, when the program could not even be started (systemd.exec(5)).
    200: "its working directory cannot be entered",
    203: "its program cannot be executed",
    216: "its group does not exist",
    217: "its user does not exist",
    218: "its capabilities cannot be set",
    226: "its name spaces cannot be set up",
    238: "its state directory cannot be made",
    243: "its credentials cannot be read",
}


class Death(NamedTuple):
    """The end of one run: what systemd shows of it, and what excuses the worker.

    ``code`` is an exit status (0 and up), −N for signal N, −1 unknown, −2 heartbeat timeout,
    −3 invalid heartbeat. The last six fields are excuses.
    """

    component_id: str
    invocation: str  # 32 hex digits, with "#n" appended for a start job that failed
    kind: str = "exit"  # the class: exit, signal, oom, watchdog … (docs/contract.md)
    code: int = UNKNOWN
    line: str = ""  # one line for people
    run_ms: int | None = None
    at: Moment | None = None  # None: not known when it happened
    failed: bool = True  # False: the run ended well, or has not ended
    stop_asked: bool = False
    shutting_down: bool = False
    held: str = ""  # why the worker may not start: paused, held, masked
    supervisor_away: bool = False  # the supervisor was inactive, or is newer than this run
    incident: str = ""  # the open incident that this death is part of
    job_at_fault: str = ""  # a job that it was blamed on: no limit applies to the restart

    @property
    def run(self) -> str:
        """The invocation of the run, also of a start job that failed after it."""
        return self.invocation.partition("#")[0]

    @property
    def is_excused(self) -> bool:
        """True if systemd itself shows that the worker is not to blame."""
        return bool(self.stop_asked or self.shutting_down or self.held or self.supervisor_away)

    @property
    def reason(self) -> Reason:
        return reason_for(self.kind)


class Meaning(NamedTuple):
    """What a result of systemd or a label means: class, text and code."""

    kind: str | None  # None: the exit code decides
    line: str = ""
    code: int | None = None  # None: from the exit code


# Every value of $SERVICE_RESULT, in the order of systemd.exec(5).
RESULTS: dict[str, Meaning] = {
    "success": Meaning(None),
    "protocol": Meaning(None, "stopped before it said that it was ready"),
    "timeout": Meaning("start-timeout", "was not ready in time"),
    "exit-code": Meaning(None),
    "signal": Meaning(None),
    "core-dump": Meaning("core-dump"),
    "watchdog": Meaning("watchdog", "watchdog: no progress was reported", HEARTBEAT_TIMEOUT),
    "exec-condition": Meaning("start-job", "its start condition failed"),
    "oom-kill": Meaning("oom", "out of memory"),
    "start-limit-hit": Meaning("start-job", "was started too often for systemd's own limit"),
    "resources": Meaning("resources", "systemd lacked the resources to run it", UNKNOWN),
}

# A clean end to systemd: exit status 0, or SIGTERM, SIGINT, SIGHUP or SIGPIPE.
ENDED: Final = Meaning("ended", "ended, although nobody asked it to")
DEPENDENCY: Final = Meaning("dependency", "a unit that it needs was not active")

# Why the supervisor ended a worker.
LABELS: dict[str, Meaning] = {
    "stale": Meaning("stale", "no frame came on its pipe", HEARTBEAT_TIMEOUT),
    "startup-timeout": Meaning(
        "start-timeout", "no frame came on its pipe since its start", HEARTBEAT_TIMEOUT
    ),
    "recovery-timeout": Meaning(
        "recovery-timeout", "did not recover in the time allowed", HEARTBEAT_TIMEOUT
    ),
    "unhealthy-too-long": Meaning(
        "recovery-timeout", "called itself unhealthy for too long", HEARTBEAT_TIMEOUT
    ),
    "invalid-heartbeat": Meaning(
        "invalid-heartbeat", "only invalid lines came on its pipe", INVALID_HEARTBEAT
    ),
}

_REASONS: dict[str, Reason] = {
    "watchdog": "health",
    "stale": "health",
    "invalid-heartbeat": "health",
    "recovery-timeout": "health",
    "start-timeout": "timeout",
    "stop-timeout": "timeout",
}


def reason_for(kind: str) -> Reason:
    """Return the coarser reason for a class: failure, health or timeout."""
    return _REASONS.get(kind, "failure")


def classify(
    result: str,
    exit_code: str = "",
    exit_status: str = "",
    *,
    component_id: str = "",
    invocation: str = "",
    label: str = "",
    stop_asked: bool = False,
    start_job: bool = False,
    lacks: str = "",
    unasked: bool = False,
    run_ms: int | None = None,
    at: Moment | None = None,
) -> Death:
    """Return the death that systemd's values describe. Values of a newer systemd are quoted.

    ``unasked``: a clean end is a death, because nobody asked for it. ``lacks``: what a start job
    that failed needed, and the state of that.
    """
    base = Death(component_id, invocation, at=at, stop_asked=stop_asked)
    if start_job and lacks:
        held = f"it needs {lacks}; it is tried again until it starts"
        return base._replace(kind="dependency", line=f"it needs {lacks}", held=held)
    if start_job:
        line = "its start job failed: see systemctl status"
        return base._replace(kind="start-job", line=line)
    code, how = _read_exit(exit_code, exit_status)
    after = "" if run_ms is None else f" after {describe_ms(run_ms)}"
    if label in LABELS and code in (-signal.SIGABRT, -signal.SIGKILL) and result != "oom-kill":
        # These are the supervisor's own signals: another cause would have ended it before them.
        meaning = LABELS[label]
    else:
        meaning = RESULTS.get(result, Meaning(None, f"result {ascii(result)[:40]}"))
        if unasked and result == "success":
            meaning = ENDED
    kind = meaning.kind or _kind_of(code, exit_code)
    line = "; ".join(part for part in (meaning.line, how) if part) or "ended for unknown reasons"
    if kind == "start-timeout" and stop_asked:
        kind, line = "stop-timeout", "; ".join(filter(None, ("did not stop in time", how)))
    return base._replace(
        kind=kind,
        code=code if meaning.code is None else meaning.code,
        line=line + after,
        run_ms=run_ms,
        failed=unasked or result != "success",
    )


def recall(kind: str, code: int) -> Death:
    """Return the death that a ledger record names, when systemd's values are gone."""
    if kind == "start-job":
        return classify("", start_job=True)
    meanings = (*RESULTS.values(), *LABELS.values(), ENDED, DEPENDENCY)
    line = next((meaning.line for meaning in meanings if meaning.kind == kind), "")
    how = ""
    if code >= 0:
        how = _read_exit("exited", str(code))[1]
    elif kind in ("signal", "core-dump", "oom", "ended"):  # elsewhere −1, −2 and −3 are no signals
        how = _read_exit("dumped" if kind == "core-dump" else "killed", name_signal(-code))[1]
    line = "; ".join(filter(None, (line, how))) or "ended for unknown reasons"
    return Death("", "", kind, code, line)


def exit_words(main_code: str, main_status: str) -> tuple[str, str]:
    """Convert ExecMainCode and ExecMainStatus, numbers, to the texts that the hook gets."""
    word = _EXIT_WORDS.get(main_code, "")
    if word in ("killed", "dumped") and main_status.isascii() and main_status.isdigit():
        return word, name_signal(int(main_status[:4]))
    return word, main_status


def name_signal(number: int) -> str:
    """Return a signal's name as systemd spells it: KILL, RTMIN+3."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"RTMIN+{number - signal.SIGRTMIN}"
        return str(number)


def _read_exit(exit_code: str, exit_status: str) -> tuple[int, str]:
    """Return the code of the record and a text that says how the main process ended."""
    if exit_code == "exited" and exit_status.isascii() and exit_status.isdigit():
        status = int(exit_status[:9])
        known = KNOWN_STATUSES.get(status)
        return status, f"exited with status {status}" + (f" ({known})" if known else "")
    if exit_code in ("killed", "dumped"):
        number = _signal_number(exit_status)
        name = f"SIG{exit_status}" if number else f"an unknown signal {ascii(exit_status)[:20]}"
        dumped = " (core dumped)" if exit_code == "dumped" else ""
        return -number or UNKNOWN, f"killed by {name}{dumped}"
    return UNKNOWN, ""


def _signal_number(name: str) -> int:
    """Return the number of a signal that systemd names (KILL, RTMIN+3); 0 if it is none."""
    base, plus, offset = name.partition("+")
    if base == "RTMIN":
        if not plus:
            return int(signal.SIGRTMIN)
        known = offset.isascii() and offset.isdigit() and int(offset[:3]) <= 30
        return int(signal.SIGRTMIN) + int(offset[:3]) if known else 0
    try:
        return int(signal.Signals["SIG" + name])
    except KeyError:
        return 0


def _kind_of(code: int, exit_code: str) -> str:
    if code == EX_CONFIG:
        return "config"
    if exit_code == "dumped":
        return "core-dump"
    return "signal" if exit_code == "killed" else "exit"
