"""The death certificate: what killed a worker, when, with what in hand, what was decided about it
and why, and how often it died like that before.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.exits import LABELS, Exit, classify, recall
from nomarr_systemd.core.model import age_ms
from nomarr_systemd.core.plaintext import clean, clean_lines
from nomarr_systemd.core.record import DECISIONS, Record
from nomarr_systemd.core.traces import Trace, fingerprint
from nomarr_systemd.core.words import describe_ms
from nomarr_systemd.forensics import runlog
from nomarr_systemd.forensics.runlog import Coredump, Line, RunLog, Where
from nomarr_systemd.forensics.scene import Scene, ask_label, read_frames, spell_status
from nomarr_systemd.host.journalread import Journal
from nomarr_systemd.host.manager import Manager, ManagerError

PATIENCE_S: Final = 0.6  # for the journal: the whole report is to take less than a second
MAX_FRAMES: Final = 12
SLICE: Final = "nomarr.slice"
_NEVER_RAN: Final = range(200, 244)  # systemd's own statuses: the program was not even started


class Death(NamedTuple):
    """One bad end."""

    invocation: str  # with "#n" for a start job that failed
    kind: str
    code: int
    line: str
    at_ms: int
    run_ms: int | None
    job: str
    memory_peak: int  # bytes; 0: unknown
    memory_max: str
    progress_age_s: float | None

    @property
    def never_ran(self) -> bool:
        return self.kind == "start-job" or (self.kind == "exit" and self.code in _NEVER_RAN)


class Repeats(NamedTuple):
    """How often the same crash is on record, this one included."""

    times: int
    deaths: int  # on record in all
    unknown: int  # alike in class, and nothing more is known of them
    first_ms: int
    last_ms: int


class Certificate(NamedTuple):
    """Everything the report shows."""

    scene: Scene
    verdict: str  # died, alive, stopped
    headline: str
    now: str
    death: Death | None = None
    trace: Trace | None = None
    trace_is_cause: bool = False
    fingerprint: str = ""
    frames: tuple[dict[str, Any], ...] = ()
    lines: tuple[Line, ...] = ()
    coredump: Coredump | None = None
    record: Record | None = None
    repeats: Repeats | None = None
    broken: tuple[str, ...] = ()  # units that it needs and that are not there
    notes: tuple[str, ...] = ()


def issue(scene: Scene, invocation: str, record: Record | None) -> Certificate:
    """The report on one run, or on a worker that never died."""
    with Journal(deadline=time.monotonic() + PATIENCE_S) as journal:
        where = Where(scene.component, scene.paths.user, _cgroup_of(scene))
        if scene.paths.user and scene.invocation == invocation:
            where = where._replace(pid=scene.facts.get("ExecMainPID", "").removeprefix("0"))
        certificate = _report(scene, journal, where, invocation, record)
        return certificate._replace(
            notes=(*scene.notes, *_journal_notes(scene, journal, certificate), *certificate.notes)
        )


def _report(
    scene: Scene, journal: Journal, where: Where, invocation: str, record: Record | None
) -> Certificate:
    now = describe_now(scene)
    if not invocation:
        failed = None if _is_running(scene) else runlog.find_failed_job(journal, where)
        if failed is None:
            return _without_death(scene, now)
        lines = tuple(
            Line(failed.wall_us, "systemd", None, 4, text) for text in clean_lines(failed.text)
        )
        ended = classify("", start_job=True)
        death = Death("", *ended[:3], failed.wall_us // 1000, None, "", 0, "", None)
        log = RunLog(lines=lines)
        label_job = ""
    else:
        run = invocation.partition("#")[0]
        near_us = record.wall_ms * 1000 if record else 0
        log = runlog.read_run(journal, where, invocation, near_us=near_us)
        if record is None and not log.lines and run != scene.invocation:
            note = f"Neither the ledger nor the journal knows the run {run}."
            return _without_death(scene, now)._replace(verdict="unknown-run", notes=(note,))
        label, label_job = ask_label(scene, run)
        ended = judge(scene, log, record, run, label)
        if not ended.failed and record is None:
            return _without_death(scene, now)._replace(
                lines=log.lines, notes=(f"The run {run} has not ended badly: {ended.line}.",)
            )
        death = _make_death(scene, log, record, invocation, ended)
        if death.kind == "oom" and not death.memory_peak:
            peak = runlog.find_kernel_oom(journal, where, death.at_ms * 1000)
            death = death._replace(memory_peak=peak)
    frames = read_frames(scene, death.invocation) if scene.live and death.invocation else []
    last = frames[-1] if frames else {}
    job = label_job or ("" if last.get("job") is None else clean(str(last["job"]), 500))
    age = last.get("progress_age_s")
    is_start_job = death.kind == "start-job"
    trace, is_cause = (None, False) if is_start_job else choose_trace(death.kind, log.traces)
    mark = fingerprint(death.kind, death.code, trace if is_cause else None)
    verb = "could not be started" if death.never_ran else "died"
    return Certificate(
        scene,
        "died",
        f"{scene.component} {verb}: {death.line}",
        now,
        death._replace(
            job="" if is_start_job else job,
            progress_age_s=float(age) if isinstance(age, (int, float)) else None,
        ),
        trace,
        is_cause,
        mark,
        () if is_start_job else tuple(frames[-MAX_FRAMES:]),
        log.lines,
        log.coredump,
        record,
        count_repeats(scene, journal, where, death, mark),
        _find_broken(scene) if is_start_job else (),
        (_say_dropped(log.dropped),) if log.dropped else (),
    )


def judge(scene: Scene, log: RunLog, record: Record | None, run: str, label: str) -> Exit:
    """How the run ended: the ledger's class, in systemd's words where they are left."""
    if record is not None and record.kind == "start-job":
        return classify("", start_job=True)
    words = ("", "", "")
    if log.result or log.exit_code:
        words = (log.result, log.exit_code, spell_status(log.exit_code, log.exit_status))
    elif scene.invocation == run:
        words = scene.exit_words()
    if record is not None:
        # What the class says beyond systemd's words was the supervisor's label at that time.
        labels = [name for name, outcome in LABELS.items() if outcome.kind == record.kind]
        label = label if label in labels else (labels[0] if labels else "")
    stop_asked = record is not None and record.kind == "stop-timeout"
    ended = classify(*words, label=label, stop_asked=stop_asked)
    if record is not None and (not words[0] or ended.kind != record.kind):
        return recall(record.kind, record.code)
    if not words[0] and words[1] == "":
        return ended._replace(failed=scene.is_failed)
    return ended


def choose_trace(kind: str, traces: tuple[Trace, ...]) -> tuple[Trace | None, bool]:
    """The trace that tells most, and whether it is the death's own.

    A program that leaves by itself printed its traceback last. One that is killed may have logged
    some long before; its own are the stacks that faulthandler or systemd-coredump left.
    """
    last = {trace.kind: trace for trace in traces}
    if kind in ("exit", "config"):
        trace = last.get("traceback") or last.get("stacks") or last.get("native")
        return trace, trace is not None
    if own := last.get("stacks") or last.get("native"):
        return own, True
    return last.get("traceback"), False


def count_repeats(
    scene: Scene, journal: Journal, where: Where, death: Death, mark: str
) -> Repeats | None:
    """Compare with every death on record, as far as the journal and the time allowed reach."""
    records = [each for each in scene.account.records if each.action in DECISIONS and each.kind]
    deaths = len(records)
    if not records:
        return None
    if all(each.invocation != death.invocation for each in records):
        deaths += 1
    count, unknown = 1, 0
    first_ms = last_ms = death.at_ms
    for each in reversed(records):
        if each.invocation == death.invocation or each.kind != death.kind:
            continue
        if each.code != death.code:
            continue
        same = _is_same(journal, where, each, mark)
        if same is None:
            unknown += 1
        elif same:
            count += 1
            first_ms, last_ms = min(first_ms, each.wall_ms), max(last_ms, each.wall_ms)
    return Repeats(count, deaths, unknown, first_ms, last_ms)


def _is_same(journal: Journal, where: Where, record: Record, mark: str) -> bool | None:
    """None if nothing is left to compare with."""
    if record.kind == "start-job":
        return True
    if journal.cut_short:
        return None
    where = where._replace(pid="")  # which was this run's alone
    run_ms = 60_000 if record.run_ms is None else record.run_ms + 1500
    log = runlog.read_end(
        journal,
        where,
        record.invocation,
        since_us=(record.wall_ms - run_ms) * 1000,
        # Not into the next run, which begins after the backoff.
        until_us=(record.wall_ms + min(record.delay_ms, 1000)) * 1000,
    )
    if log is None:
        return None
    if not log.lines and mark != fingerprint(record.kind, record.code, None):
        return None  # it may have said something that is lost
    trace, is_cause = choose_trace(record.kind, log.traces)
    return fingerprint(record.kind, record.code, trace if is_cause else None) == mark


def describe_now(scene: Scene) -> str:
    """What has become of the worker, in one line."""
    state = scene.facts.get("ActiveState", "")
    if scene.is_masked:
        reason = scene.account.failure_reason
        if reason:
            return f"masked, and stays down until it is reset: {clean(reason)}"
        return "masked, but not by a decision on record: somebody masked it by hand"
    if scene.facts.get("LoadState") == "not-found":
        return "there is no unit of that name: nomarrctl apply installs it"
    if _is_running(scene):
        since_ms = scene.wall_ms_of("ActiveEnterTimestampMonotonic")
        ago = f" for {describe_ms(max(0, scene.now.wall_ms - since_ms))}" if since_ms else ""
        health = scene.live.get("status")
        said = f", {clean(str(health), 40)}" if health else ""
        return f"{'running' if state == 'active' else state}{ago}{said}"
    if scene.hold:
        return f"held: {scene.hold}"
    last = next((each for each in reversed(scene.account.records) if each.kind), None)
    if last and (last.action, last.effect) == ("restart", "scheduled") and scene.is_failed:
        left_ms = last.delay_ms - age_ms(last.moment, scene.now)
        return f"failed; it is restarted in {describe_ms(max(0, left_ms))}"
    return {"failed": "failed", "inactive": "not running"}.get(state, state or "unknown")


def _without_death(scene: Scene, now: str) -> Certificate:
    running = _is_running(scene)
    masked = scene.is_masked
    what = "is masked" if masked else "is running" if running else "is not running"
    headline = f"{scene.component} {what}, and no death of it is on record"
    return Certificate(scene, "alive" if running else "stopped", headline, now)


def _make_death(
    scene: Scene, log: RunLog, record: Record | None, invocation: str, ended: Exit
) -> Death:
    is_current = scene.invocation == invocation.partition("#")[0]
    at_ms = log.ended_us // 1000
    if record is not None and (not at_ms or ended.kind == "start-job"):
        at_ms = record.wall_ms
    if not at_ms and is_current:
        at_ms = scene.wall_ms_of("ExecMainExitTimestampMonotonic")
    run_ms = record.run_ms if record else None
    if run_ms is None and log.began_us and log.ended_us and ended.kind != "start-job":
        run_ms = (log.ended_us - log.began_us) // 1000
    peak = log.memory_peak
    if not peak and is_current and scene.facts.get("MemoryPeak", "").isdigit():
        peak = int(scene.facts["MemoryPeak"])
        peak = 0 if peak >= 1 << 63 else peak
    limit = scene.facts.get("MemoryMax", "")
    return Death(
        invocation, *ended[:3], at_ms or scene.now.wall_ms, run_ms, "", peak,
        "" if limit in ("infinity", "[not set]") else limit, None,
    )  # fmt: skip


def _journal_notes(scene: Scene, journal: Journal, certificate: Certificate) -> list[str]:
    notes = []
    if not journal.is_there or (not scene.paths.user and not journal.is_readable):
        notes.append(
            "The journal cannot be read, so the run's own words are missing: be root, or join the"
            " group systemd-journal (usermod -aG systemd-journal USER, then log in again)."
        )
        return notes
    if journal.is_volatile:
        notes.append(
            "The journal is kept in memory only and is lost at a reboot: mkdir /var/log/journal,"
            " then systemctl restart systemd-journald."
        )
    if certificate.death and certificate.death.invocation and not certificate.lines:
        notes.append("The journal has nothing of this run any more: it was vacuumed or rotated.")
    if journal.cut_short:
        notes.append("The journal is large: not all of it was searched for the same crash.")
    return notes


def _say_dropped(count: int) -> str:
    return (
        f"journald dropped {count} messages of this run (rate limit): what is shown is not all."
        " LogRateLimitIntervalSec = 0 in [pool.NAME.unit] lifts the limit."
    )


def _find_broken(scene: Scene) -> tuple[str, ...]:
    """What the unit needs and does not get."""
    names: list[str] = []
    for relation in ("Requires", "Requisite", "BindsTo"):
        names += scene.facts.get(relation, "").split()
    try:
        shown = Manager(user=scene.paths.user).show(names, ["ActiveState", "LoadState", "Result"])
    except (ManagerError, ValueError):
        return ()
    return tuple(
        f"{name}: {facts['LoadState'] if facts['LoadState'] != 'loaded' else facts['ActiveState']}"
        for name, facts in shown.items()
        if facts["LoadState"] not in ("loaded", "") or facts["ActiveState"] == "failed"
    )


def _is_running(scene: Scene) -> bool:
    return scene.facts.get("ActiveState") in ("active", "activating", "reloading", "deactivating")


def _cgroup_of(scene: Scene) -> str:
    """Where the unit's processes are or would be: journald may know nothing else of them."""
    if not scene.paths.user:
        return ""
    if known := scene.facts.get("ControlGroup"):
        return known
    # A masked unit has no properties of its own left: then the slice is the template's.
    parts = (scene.facts.get("Slice") or SLICE).removesuffix(".slice").split("-")
    slices = ["-".join(parts[: n + 1]) + ".slice" for n in range(len(parts))]
    try:
        top = Manager(user=True).show_manager("ControlGroup")["ControlGroup"]
    except (ManagerError, KeyError):
        return ""
    return "/".join([top, *slices, scene.component.unit])
