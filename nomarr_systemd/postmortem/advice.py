"""What to do next about a death: for each case a sentence and, where one helps, a command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nomarr_systemd.core.death import EX_CONFIG, EX_SOFTWARE, EX_TEMPFAIL
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.postmortem.report_model import Certificate, Death


class Advice(NamedTuple):
    text: str
    command: str = ""


def advise(certificate: Certificate) -> list[Advice]:
    """In the order in which they are worth trying."""
    scene = certificate.scene
    ours = "nomarrctl --user" if scene.paths.user else "nomarrctl"
    systemctl = "systemctl --user" if scene.paths.user else "systemctl"
    unit, instance = scene.component.unit, scene.component.instance
    found: list[Advice] = []
    if certificate.death:
        found += _for_death(certificate, certificate.death, systemctl, ours)
        if certificate.death.invocation and certificate.lines:
            command = journal_command(certificate)
            found.append(Advice("Everything the journal has of this run:", command))
    if scene.is_masked and (scene.account.failure_reason or "").startswith(POOL_FAILED):
        found.append(
            Advice(
                "When the cause is mended, begin the counts of its pool again and start it:",
                f"{ours} reset --pool {scene.component.pool} --start",
            )
        )
    elif scene.is_masked:
        found.append(
            Advice(
                "When the cause is mended, begin its counts again, unmask and start it:",
                f"{ours} reset --start {instance}",
            )
        )
    elif scene.hold:
        pool = scene.component.pool
        found.append(Advice("It is held; to let it run again:", f"{ours} resume {pool}"))
    elif certificate.verdict == "stopped":
        found.append(Advice("Nothing keeps it down; to start it:", f"{systemctl} start {unit}"))
    elif certificate.record and certificate.record.effect == "scheduled" and scene.is_failed:
        found.append(Advice("To cancel the restart:", f"{systemctl} stop {unit}"))
    return found


def journal_command(certificate: Certificate) -> str:
    """The command that shows all of the run."""
    run = certificate.death.invocation.partition("#")[0] if certificate.death else ""
    field = "USER_INVOCATION_ID" if certificate.scene.paths.user else "INVOCATION_ID"
    return f"journalctl _SYSTEMD_INVOCATION_ID={run} + {field}={run}"


def _for_death(
    certificate: Certificate, death: Death, systemctl: str, ours: str
) -> Iterator[Advice]:
    scene = certificate.scene
    unit, pool = scene.component.unit, scene.component.pool
    match death.kind:
        case "start-job":
            for broken in certificate.broken:
                name = broken.partition(":")[0]
                yield Advice(
                    f"It needs {name}, which is {broken.partition(': ')[2]}; see why:",
                    f"{systemctl} status {name}",
                )
            if not certificate.broken:
                yield Advice("What systemd says about it:", f"{systemctl} status {unit}")
        case "exit" if death.never_ran:
            yield from _for_setup(death, unit, pool, scene.facts.get("User", ""), systemctl)
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
                f" self.progress() now and then, or raise stall_timeout_s or, in [pool.{pool}],"
                " watchdog_s."
            )
        case "stale" | "invalid-heartbeat":
            yield Advice(
                "Its frames stopped or made no sense. A worker that is busy without Python's lock"
                " (native code) sends none: raise staleness_interval_s in [health], or see what"
                " it wrote to $NOMARR_HEALTH_PIPE."
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
            yield Advice("What systemd lacked is in its own words:", f"{systemctl} status {unit}")
        case "signal" | "core-dump":
            yield from _for_signal(certificate, death)
        case _:
            yield from _for_exit(death, systemctl)


def _for_setup(death: Death, unit: str, pool: str, user: str, systemctl: str) -> Iterator[Advice]:
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


def _for_signal(certificate: Certificate, death: Death) -> Iterator[Advice]:
    dump = certificate.coredump
    if dump is not None:
        yield Advice("The core dump, and a debugger on it:", f"coredumpctl info {dump.pid}")
        yield Advice("", f"coredumpctl debug {dump.pid}")
    elif death.code == -9:
        yield Advice(
            "SIGKILL comes from a person, from a stop that took too long, or from the kernel when"
            " memory runs out; the kernel says so:",
            "journalctl --dmesg --grep='oom|out of memory' --since=-1h",
        )
    elif death.code in (-4, -6, -7, -8, -11) and certificate.trace is None:
        yield Advice(
            "There is no stack. Install systemd-coredump and let the unit dump core, with"
            f' LimitCORE = "infinity" in [pool.{certificate.scene.component.pool}.unit]; a'
            " Python program of your own leaves stacks with -X faulthandler."
        )


def _for_exit(death: Death, systemctl: str) -> Iterator[Advice]:
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
    """Bytes as systemd takes them back."""
    if not text.isdigit():
        return text
    size = float(text)
    for suffix in ("", "K", "M", "G"):
        if size < 1024:
            return f"{size:.4g}{suffix}"
        size /= 1024
    return f"{size:.4g}T"
