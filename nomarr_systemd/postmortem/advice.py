"""Advice after a death: for each case a sentence and, if one helps, a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from nomarr_systemd.core.death import BY_SIGKILL, BY_SIGSYS, EX_CONFIG, EX_SOFTWARE, EX_TEMPFAIL
from nomarr_systemd.core.ids import TARGET
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.core.job import (
    POOL_FAILED,
    find_failed,
    find_quarantined,
    release_command,
    retry_command,
)
from nomarr_systemd.host.holds import PAUSED
from nomarr_systemd.postmortem.report_model import DeathFacts, Report
from nomarr_systemd.postmortem.witnesses import Witnesses

CONTRACT: Final = "man nomarr-worker@.service"
# What the exit statuses of systemd are about, when it could not execute the program.
SETUP_DIRECTIVES: Final = {
    200: "WorkingDirectory =",
    218: "CapabilityBoundingSet = or AmbientCapabilities =",
    226: "the paths of ReadWritePaths =, BindPaths = and the like",
    238: "StateDirectory =",
    243: "LoadCredential =",
}
_CRASHES: Final = (-4, -5, -6, -7, -8, -11)
_NOT_READY: Final = "did not say READY=1 to systemd in time, and no frame of it is known"
_OURS: Final = ("systemd", "nomarr-controller")
_MANY_TASKS: Final = 1 << 20
_NO_FORK: Final = re.compile(
    r"[Cc]annot fork|fork: |can't start new thread|Resource temporarily unavailable"
)


class Advice(NamedTuple):
    text: str
    command: str = ""


def advise(report: Report) -> list[Advice]:
    """Return the advice on a report, most useful first."""
    witnesses = report.witnesses
    ours = witnesses.paths.nomarrctl
    systemctl = "systemctl --user" if witnesses.paths.user else "systemctl"
    if not witnesses.is_applied:
        return [Advice("It is configured, but has no unit yet:", f"{ours} apply")]
    found: list[Advice] = []
    if report.death:
        found += _for_quarantine(report, report.death.invocation, ours)
        found += _for_death(report, report.death, systemctl, ours)
        if report.death.invocation and report.lines:
            command = journal_command(report)
            found.append(Advice("Everything the journal has of this run:", command))
    elif report.verdict == "alive":
        found += _for_living(report, systemctl)
    elif report.verdict == "stopped" and report.broken:
        name = report.broken[0].partition(":")[0]
        command = f"{systemctl} start {name} {witnesses.component.unit}"
        return [Advice(f"When {name} can run again, start both:", command)]
    return [*found, *_for_state(report, systemctl, ours)]


def _for_state(report: Report, systemctl: str, ours: str) -> Iterator[Advice]:
    """Yield what changes the state that the worker is in now."""
    witnesses = report.witnesses
    unit, instance, pool = (
        witnesses.component.unit,
        witnesses.component.instance,
        witnesses.component.pool,
    )
    reason = witnesses.account.failure_reason or ""
    is_for_good = witnesses.is_masked or bool(reason and not witnesses.is_running)
    if is_for_good and reason.startswith(POOL_FAILED):
        yield Advice(
            "When the cause is mended, reset the counts of its pool and start it:",
            f"{ours} reset --pool {pool} --start",
        )
    elif is_for_good:
        yield Advice(
            "When the cause is mended, reset its counts, unmask and start it:",
            f"{ours} reset --start {instance}",
        )
    elif witnesses.hold:
        yield _for_hold(witnesses, systemctl, ours)
    elif not witnesses.is_target_active and not witnesses.is_running:
        yield Advice("All workers are stopped; to start them:", f"{systemctl} start {TARGET}")
    elif report.verdict == "stopped":
        yield Advice("Nothing keeps it down; to start it:", f"{systemctl} start {unit}")
    elif report.record and report.record.is_scheduled and not witnesses.is_running:
        yield Advice("To cancel the restart:", f"{systemctl} stop {unit}")


def _for_hold(witnesses: Witnesses, systemctl: str, ours: str) -> Advice:
    component, text = witnesses.component, "It is held; to let it run again:"
    if witnesses.hold.startswith(PAUSED):
        return Advice(text, f"{ours} resume {component.instance}")
    if witnesses.hold.startswith(INCIDENT):
        return Advice(text, f"{ours} resume {component.pool}")
    path = f"{witnesses.paths.hold}/{component.instance}"
    start = f"{systemctl} start {component.unit}"
    return Advice(
        "nomarrctl did not write its hold; to let it run again:", f"rm -r {path} && {start}"
    )


def _for_living(report: Report, systemctl: str) -> Iterator[Advice]:
    witnesses = report.witnesses
    state, said = witnesses.facts.get("ActiveState"), witnesses.live
    kill = f"{systemctl} kill --signal=ABRT --kill-whom=main {witnesses.component.unit}"
    if state == "activating":
        yield Advice(
            "It has not said READY=1 yet. While it makes progress it may take as long as it needs;"
            " if it hangs, end it: a Python worker leaves its stacks."
            if witnesses.is_python
            else "It has not said READY=1 yet. If it hangs, end it:",
            kill,
        )
    elif said and said.disagreement == "hung-but-pinging":
        yield Advice(
            "systemd ends it when stall_timeout_s and the watchdog have passed. To end it now, and"
            " to see where it hangs:",
            kill,
        )
    elif said and said.status == "unhealthy":
        yield Advice(
            "It runs, and says that it is unhealthy. It is left alone, unless max_unhealthy_s in"
            " [health] sets a limit."
        )


def _for_quarantine(report: Report, invocation: str, ours: str) -> Iterator[Advice]:
    """Yield advice if the restart after this death was refunded because of its job."""
    refund = report.witnesses.account.find(invocation, ("refund",))
    text = refund.text if refund else ""
    if key := find_failed(text):
        text = f"Its job {key} failed for it, and the restart is refunded. To see the job:"
        yield Advice(text, f"{ours} jobs show {key}")
        yield Advice(
            "When it is mended, have it tried again:",
            retry_command(key).replace("nomarrctl", ours, 1),
        )
    elif key := find_quarantined(text):
        text = f"Its job {key} was quarantined, and the restart is refunded. To see the job:"
        yield Advice(text, f"{ours} jobs show {key}")
        release = release_command(key).replace("nomarrctl", ours, 1)
        yield Advice("When it is mended, let it run again:", release)


def journal_command(report: Report) -> str:
    """Return the command that shows the whole journal of the run."""
    run = report.death.invocation.partition("#")[0] if report.death else ""
    field = "USER_INVOCATION_ID" if report.witnesses.paths.user else "INVOCATION_ID"
    return f"journalctl _SYSTEMD_INVOCATION_ID={run} + {field}={run}"


def _for_death(report: Report, death: DeathFacts, systemctl: str, ours: str) -> Iterator[Advice]:
    witnesses = report.witnesses
    unit, pool = witnesses.component.unit, witnesses.component.pool
    match death.kind:
        case "start-job" | "dependency":
            for broken in report.broken:
                name = broken.partition(":")[0]
                yield Advice(
                    f"It needs {name}, which is {broken.partition(': ')[2]}; see why:",
                    f"{systemctl} status {name}",
                )
            if not report.broken:
                yield Advice("What systemd says about it:", f"{systemctl} status {unit}")
        case "exit" if death.never_ran:
            yield from _for_setup(death, unit, pool, witnesses.facts.get("User", ""), systemctl)
        case "oom":
            limit = f" (now {_size(death.memory_max)})" if death.memory_max else ""
            yield Advice(
                f"Give it more memory: MemoryMax ={limit} in [pool.{pool}.unit] of nomarr.toml; or"
                " run fewer workers at a time. Then:",
                f"{ours} apply",
            )
        case "ended" | "finished":
            yield from _for_clean_end(death, pool, ours)
        case "watchdog":
            yield from _for_watchdog(report, pool)
        case "stale":
            yield from _for_silence(report)
        case "invalid-heartbeat":
            yield Advice(
                "Correct what it writes to $NOMARR_HEALTH_PIPE: HEALTH|{json} in each line, with"
                f" its component_id ({witnesses.component}) and a status. The contract:",
                CONTRACT,
            )
        case "start-timeout":
            yield from _for_slow_start(report, death.line, ours)
        case "recovery-timeout" if "unhealthy" in death.line:
            yield Advice(
                "It kept saying that it is unhealthy: mend what it waits for. If that may take"
                " longer, raise max_unhealthy_s in [health] (0: for ever)."
            )
        case "recovery-timeout":
            yield Advice("If recovery may take longer, raise max_recovery_s in [health].")
        case "stop-timeout":
            yield Advice(
                f"If its jobs take longer than it may take to stop, raise stop_timeout_s in"
                f" [pool.{pool}]."
            )
        case "resources":
            yield Advice("systemd says which resource was missing:", f"{systemctl} status {unit}")
        case "signal" | "core-dump":
            yield from _for_tasks(report, death, ours)
            yield from _for_signal(report, death)
        case _:
            yield from _for_tasks(report, death, ours)
            yield from _for_exit(report, death, systemctl)


def _for_setup(
    death: DeathFacts, unit: str, pool: str, user: str, systemctl: str
) -> Iterator[Advice]:
    if death.code == 203:
        yield Advice(
            f"Is the program there, executable, and its first line right? Correct command = in"
            f" [pool.{pool}] of nomarr.toml, then nomarrctl apply. What systemd runs:",
            f"{systemctl} cat {unit}",
        )
    elif death.code in (216, 217):
        name = user or "nomarr"
        yield Advice(f"Is the user {name} there? If not, make it:", f"getent passwd {name}")
        if name == "nomarr":
            yield Advice("The package's own user is made by:", "systemd-sysusers")
    elif death.code in SETUP_DIRECTIVES:
        yield Advice(
            f"Correct {SETUP_DIRECTIVES[death.code]} in [pool.{pool}.unit] of nomarr.toml, then"
            " nomarrctl apply. What systemd says about it:",
            f"{systemctl} status --full {unit}",
        )
    else:
        yield Advice("What systemd says about it:", f"{systemctl} status --full {unit}")


def _for_clean_end(death: DeathFacts, pool: str, ours: str) -> Iterator[Advice]:
    if death.code < 0:
        yield Advice(
            "A person or a program sent it that signal: kill, systemctl kill, or a program that"
            " frees memory."
            " To stop it so that it stays down:",
            f"{ours} pause {pool}",
        )
    elif death.kind == "ended":
        yield Advice(
            "A worker runs until it is asked to stop. If this program may finish, say"
            f' on_clean_exit = "stay" in [pool.{pool}.policy].'
        )


def _for_watchdog(report: Report, pool: str) -> Iterator[Advice]:
    if report.witnesses.is_python:
        stacks = "The stacks show where it hung. " if report.trace_is_cause else ""
        yield Advice(
            f"{stacks}If the job is only long, have it call self.progress() regularly, or raise"
            f" stall_timeout_s in [health] or, in [pool.{pool}], watchdog_s."
        )
        return
    yield Advice(
        "It sent systemd no WATCHDOG=1 in time. Have the loop that does the work send it, at least"
        f" twice per watchdog_s; if a step may take longer, raise watchdog_s in [pool.{pool}]."
    )
    if report.trace is None:
        yield _want_stacks(report)


def _for_silence(report: Report) -> Iterator[Advice]:
    if report.witnesses.is_python:
        yield Advice(
            "Its frames stopped. Code that holds Python's lock for that long (a regular expression,"
            " an extension in C) keeps the thread from sending them: mend it, or raise"
            " staleness_interval_s in [health]."
        )
        return
    yield Advice(
        "It wrote no frame to $NOMARR_HEALTH_PIPE for staleness_interval_s times max_misses: it"
        " hung, was stopped, or writes none while it works. It has to, or raise"
        " staleness_interval_s in [health]."
    )
    if report.trace is None:
        yield _want_stacks(report)


def _for_slow_start(report: Report, line: str, ours: str) -> Iterator[Advice]:
    if report.trace_is_cause:
        yield Advice("The stacks show where it was when its time was over.")
    if not report.witnesses.is_python and not report.frames:
        silent = "wrote no frame to $NOMARR_HEALTH_PIPE" if "no frame" in line else _NOT_READY
        yield Advice(
            f"It {silent}. A program has to say READY=1 and to write frames. The contract:",
            CONTRACT,
        )
    yield Advice(
        "If it needs that long to load, raise startup_timeout_s in [health], then:", f"{ours} apply"
    )


def _for_signal(report: Report, death: DeathFacts) -> Iterator[Advice]:
    dump = report.coredump
    if dump is not None:
        yield Advice("The core dump, and a debugger on it:", f"coredumpctl info {dump.pid}")
        yield Advice("", f"coredumpctl debug {dump.pid}")
    elif death.code == BY_SIGKILL:
        yield Advice(
            "Neither systemd (it would say so) nor, as far as its log is here, the kernel sent"
            " SIGKILL. A person or a program did, an out-of-memory daemon for example; which is not"
            " on record anywhere. The kernel's own log:",
            "journalctl --dmesg --grep='oom|out of memory' --since=-1h",
        )
    elif death.code == BY_SIGSYS:
        number = "" if death.system_call is None else f" (number {death.system_call})"
        pool = report.witnesses.component.pool
        yield Advice(
            f"It made a system call{number} that is forbidden. Allow it with SystemCallFilter = in"
            f" [pool.{pool}.unit], unless it forbids it itself. The kernel's log, if it audits:",
            "journalctl _TRANSPORT=audit _TRANSPORT=kernel --grep='type=1326|SECCOMP' --since=-1h",
        )
    elif death.code in _CRASHES and report.trace is None:
        yield _want_stacks(report)


def _want_stacks(report: Report) -> Advice:
    if report.witnesses.catches_core_dumps and report.death and report.death.kind == "core-dump":
        return Advice(
            "Its core dump is not in the journal yet, or was not kept:", "coredumpctl list"
        )
    return Advice(
        "There is no stack. Install systemd-coredump and let the unit dump core, with"
        f' LimitCORE = "infinity" in [pool.{report.witnesses.component.pool}.unit]; a'
        " Python program of your own leaves stacks with -X faulthandler."
    )


def _for_tasks(report: Report, death: DeathFacts, ours: str) -> Iterator[Advice]:
    """Advise if it could not make a process or a thread; the kernel's log is not always here."""
    said = any(_NO_FORK.search(line.text) for line in report.lines)
    limit = report.witnesses.facts.get("TasksMax", "")
    if not death.forks_refused and not (said and limit.isdigit() and int(limit) < _MANY_TASKS):
        return
    how = "The kernel refused it" if death.forks_refused else "It seems to have been refused"
    yield Advice(
        f"{how} another process or thread: TasksMax = (now {limit}) in"
        f" [pool.{report.witnesses.component.pool}.unit] limits them. Raise it, or find out why it"
        " makes so many. Then:",
        f"{ours} apply",
    )


def _for_exit(report: Report, death: DeathFacts, systemctl: str) -> Iterator[Advice]:
    record = report.record
    if death.code == EX_CONFIG:
        yield Advice(
            "It says that its configuration is wrong, so it is not restarted: correct what it"
            " names."
        )
    elif death.code == EX_TEMPFAIL and record and record.action == "hold":
        yield Advice(
            "Its supervisor was not there; it is started again as soon as that is active:",
            f"{systemctl} status nomarr-supervisor.service",
        )
    elif report.trace and "[Errno 28]" in report.trace.headline:
        yield Advice("A disk is full: make room where it writes.", "df -h")
    elif death.code == EX_SOFTWARE and report.witnesses.is_python:
        yield Advice("Too many jobs in a row failed: the traceback is that of the last one.")
    elif report.trace:
        yield Advice("Mend what the traceback names.")
    elif any(line.pid and line.source not in _OURS for line in report.lines):
        yield Advice("What it printed last, below, is all that it said about the cause.")
    else:
        yield Advice(
            "It printed nothing: have it say on standard error what is wrong before it exits."
        )


def _size(text: str) -> str:
    """Return a number of bytes in the form that systemd accepts."""
    if not text.isdigit():
        return text
    size = float(text)
    for suffix in ("", "K", "M", "G"):
        if size < 1024:
            return f"{size:.4g}{suffix}"
        size /= 1024
    return f"{size:.4g}T"
