"""What a death was: systemd's words for it into a class, a record code and one line for people.

The words are MONITOR_SERVICE_RESULT, MONITOR_EXIT_CODE and MONITOR_EXIT_STATUS of the OnFailure=
hook (systemd.exec(5)); a label is the supervisor's word for the worker it killed itself.
"""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple

from nomarr_systemd.core.text import describe_ms

Reason = Literal["failure", "health", "timeout", "manual"]

UNKNOWN, HEARTBEAT_TIMEOUT, INVALID_HEARTBEAT = -1, -2, -3
EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG = 70, 75, 78

KNOWN_STATUSES = {
    EX_SOFTWARE: "too many errors in a row",
    EX_TEMPFAIL: "its supervisor is gone",
    EX_CONFIG: "configuration",
    # systemd's own, when the program could not even be started (systemd.exec(5)).
    200: "its working directory cannot be entered",
    203: "its program cannot be executed",
    216: "its group does not exist",
    217: "its user does not exist",
    218: "its capabilities cannot be set",
    226: "its name spaces cannot be set up",
    238: "its state directory cannot be made",
    243: "its credentials cannot be had",
}


class Failure(NamedTuple):
    """One death of one run, by what systemd itself knows of it.

    ``code`` is an exit status (0 and up), −N for signal N, −1 unknown, −2 heartbeat timeout,
    −3 invalid heartbeat. The last five fields are the circumstances that excuse a worker.
    """

    invocation: str  # 32 hex digits, "#n" behind it for a failed start job
    kind: str = "exit"  # the class of DESIGN §14
    code: int = -1
    run_ms: int | None = None
    stop_asked: bool = False
    shutting_down: bool = False
    held: str = ""  # why nothing may start: paused, held
    supervisor_away: bool = False  # it was inactive, or is newer than this run
    incident: str = ""  # the open incident that this death is a part of


class Outcome(NamedTuple):
    """A result word of systemd: the class and the sentence when nothing else is more exact."""

    kind: str | None  # None: the exit code decides
    line: str = ""
    code: int | None = None  # None: from the exit code


# Every word of $SERVICE_RESULT, in the order of systemd.exec(5).
RESULTS: dict[str, Outcome] = {
    "success": Outcome(None),
    "protocol": Outcome(None, "stopped before it said that it was ready"),
    "timeout": Outcome("start-timeout", "was not ready in time"),
    "exit-code": Outcome(None),
    "signal": Outcome(None),
    "core-dump": Outcome("core-dump"),
    "watchdog": Outcome("watchdog", "watchdog: no progress was reported", HEARTBEAT_TIMEOUT),
    "exec-condition": Outcome("start-job", "its start condition failed"),
    "oom-kill": Outcome("oom", "out of memory"),
    "start-limit-hit": Outcome("start-job", "was started too often for systemd's own limit"),
    "resources": Outcome("resources", "systemd lacked the resources to run it", UNKNOWN),
}

# What the supervisor says of a worker that it ended itself.
LABELS: dict[str, Outcome] = {
    "stale": Outcome("stale", "no frame came on its pipe", HEARTBEAT_TIMEOUT),
    "startup-timeout": Outcome(
        "start-timeout", "no frame came on its pipe since its start", HEARTBEAT_TIMEOUT
    ),
    "recovery-timeout": Outcome(
        "recovery-timeout", "did not recover in the time allowed", HEARTBEAT_TIMEOUT
    ),
    "unhealthy-too-long": Outcome(
        "recovery-timeout", "called itself unhealthy for too long", HEARTBEAT_TIMEOUT
    ),
    "invalid-heartbeat": Outcome(
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


class Exit(NamedTuple):
    """One death, classified."""

    kind: str  # exit, signal, core-dump, oom, watchdog, stale … (DESIGN §14)
    code: int  # exit status, −N by signal N, −1, −2, −3
    line: str
    failed: bool = True  # False: the run ended well, or has not ended

    @property
    def reason(self) -> Reason:
        return reason_for(self.kind)


def reason_for(kind: str) -> Reason:
    """The seeds' coarser word for a class."""
    return _REASONS.get(kind, "failure")


def classify(
    result: str,
    exit_code: str = "",
    exit_status: str = "",
    *,
    label: str = "",
    stop_asked: bool = False,
    start_job: bool = False,
    run_ms: int | None = None,
) -> Exit:
    """The class, code and line of a death. Words from a newer systemd are named, not refused."""
    code, how = _read_exit(exit_code, exit_status)
    after = "" if run_ms is None or start_job else f" after {describe_ms(run_ms)}"
    if start_job:
        return Exit("start-job", UNKNOWN, "its start job failed: see systemctl status")
    if label in LABELS and code in (-signal.SIGABRT, -signal.SIGKILL) and result != "oom-kill":
        # These are the supervisor's own signals: whatever else ended the worker was faster.
        outcome = LABELS[label]
    else:
        outcome = RESULTS.get(result, Outcome(None, f"result {ascii(result)[:40]}"))
    kind = outcome.kind or _kind_of(code, exit_code)
    line = "; ".join(part for part in (outcome.line, how) if part) or "ended for unknown reasons"
    if kind == "start-timeout" and stop_asked:
        kind, line = "stop-timeout", "; ".join(filter(None, ("did not stop in time", how)))
    return Exit(
        kind,
        code if outcome.code is None else outcome.code,
        line + after,
        failed=result != "success",
    )


def recall(kind: str, code: int) -> Exit:
    """The death that a record names, where systemd's own words for it are gone."""
    if kind == "start-job":
        return classify("", start_job=True)
    outcomes = (*RESULTS.values(), *LABELS.values())
    line = next((outcome.line for outcome in outcomes if outcome.kind == kind), "")
    how = ""
    if code >= 0:
        how = _read_exit("exited", str(code))[1]
    elif kind in ("signal", "core-dump", "oom"):  # elsewhere −1, −2 and −3 are no signals
        how = _read_exit("dumped" if kind == "core-dump" else "killed", name_signal(-code))[1]
    return Exit(kind, code, "; ".join(filter(None, (line, how))) or "ended for unknown reasons")


def name_signal(number: int) -> str:
    """A signal as systemd spells it: KILL, RTMIN+3."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"RTMIN+{number - signal.SIGRTMIN}"
        return str(number)


def _read_exit(exit_code: str, exit_status: str) -> tuple[int, str]:
    """The record code and the words for how the main process ended."""
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
    """systemd's name for a signal (KILL, RTMIN+3) as a number; 0 if it is none."""
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
