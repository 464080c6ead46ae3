"""Advice after a death: for each case a sentence and, if one helps, a command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nomarr_systemd.core.death import EX_CONFIG, EX_SOFTWARE, EX_TEMPFAIL
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.postmortem.report_model import DeathFacts, Report


class Advice(NamedTuple):
    text: str
    command: str = ""


def advise(report: Report) -> list[Advice]:
    """Return the advice on a report, most useful first."""
    witnesses = report.witnesses
    ours = "nomarrctl --user" if witnesses.paths.user else "nomarrctl"
    systemctl = "systemctl --user" if witnesses.paths.user else "systemctl"
    unit, instance = witnesses.component.unit, witnesses.component.instance
    found: list[Advice] = []
    if report.death:
        found += _for_death(report, report.death, systemctl, ours)
        if report.death.invocation and report.lines:
            command = journal_command(report)
            found.append(Advice("Everything the journal has of this run:", command))
    if witnesses.is_masked and (witnesses.account.failure_reason or "").startswith(POOL_FAILED):
        found.append(
            Advice(
                "When the cause is mended, reset the counts of its pool and start it:",
                f"{ours} reset --pool {witnesses.component.pool} --start",
            )
        )
    elif witnesses.is_masked:
        found.append(
            Advice(
                "When the cause is mended, reset its counts, unmask and start it:",
                f"{ours} reset --start {instance}",
            )
        )
    elif witnesses.hold:
        pool = witnesses.component.pool
        found.append(Advice("It is held; to let it run again:", f"{ours} resume {pool}"))
    elif report.verdict == "stopped":
        found.append(Advice("Nothing keeps it down; to start it:", f"{systemctl} start {unit}"))
    elif report.record and report.record.effect == "scheduled" and witnesses.is_failed:
        found.append(Advice("To cancel the restart:", f"{systemctl} stop {unit}"))
    return found


def journal_command(report: Report) -> str:
    """Return the command that shows the whole journal of the run."""
    run = report.death.invocation.partition("#")[0] if report.death else ""
    field = "USER_INVOCATION_ID" if report.witnesses.paths.user else "INVOCATION_ID"
    return f"journalctl _SYSTEMD_INVOCATION_ID={run} + {field}={run}"


def _for_death(report: Report, death: DeathFacts, systemctl: str, ours: str) -> Iterator[Advice]:
    witnesses = report.witnesses
    unit, pool = witnesses.component.unit, witnesses.component.pool
    match death.kind:
        case "start-job":
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
        case "watchdog":
            yield Advice(
                "The stacks show where it hung. If the job is only long, have it call"
                f" self.progress() regularly, or raise stall_timeout_s or, in [pool.{pool}],"
                " watchdog_s."
            )
        case "stale" | "invalid-heartbeat":
            yield Advice(
                "Its frames stopped or were invalid. A worker whose native code keeps Python's lock"
                " sends none: raise staleness_interval_s in [health], or check what it writes to"
                " $NOMARR_HEALTH_PIPE."
            )
        case "start-timeout":
            yield Advice("If it needs that long to load, raise startup_timeout_s in [health].")
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
            yield from _for_signal(report, death)
        case _:
            yield from _for_exit(death, systemctl)


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
    else:
        yield Advice("What systemd says about it:", f"{systemctl} status --full {unit}")


def _for_signal(report: Report, death: DeathFacts) -> Iterator[Advice]:
    dump = report.coredump
    if dump is not None:
        yield Advice("The core dump, and a debugger on it:", f"coredumpctl info {dump.pid}")
        yield Advice("", f"coredumpctl debug {dump.pid}")
    elif death.code == -9:
        yield Advice(
            "SIGKILL comes from a person, from a stop that took too long, or from the kernel when"
            " memory runs out; the kernel says so:",
            "journalctl --dmesg --grep='oom|out of memory' --since=-1h",
        )
    elif death.code in (-4, -6, -7, -8, -11) and report.trace is None:
        yield Advice(
            "There is no stack. Install systemd-coredump and let the unit dump core, with"
            f' LimitCORE = "infinity" in [pool.{report.witnesses.component.pool}.unit]; a'
            " Python program of your own leaves stacks with -X faulthandler."
        )


def _for_exit(death: DeathFacts, systemctl: str) -> Iterator[Advice]:
    if death.code == EX_CONFIG:
        yield Advice(
            "It says that its configuration is wrong, so it is not restarted: correct what it"
            " names."
        )
    elif death.code == EX_TEMPFAIL:
        yield Advice(
            "Its supervisor was gone, or it uses 75 for something else:",
            f"{systemctl} status nomarr-supervisor.service",
        )
    elif death.code == EX_SOFTWARE:
        yield Advice("Too many jobs in a row failed: the traceback is that of the last one.")


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
