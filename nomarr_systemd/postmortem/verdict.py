"""The inquest: the witnesses are heard, and a certificate is issued."""

from __future__ import annotations

import time
from typing import Final

from nomarr_systemd.core.death import LABELS, classify, recall
from nomarr_systemd.core.death import Death as Ended
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import clean, clean_lines
from nomarr_systemd.postmortem import run_log
from nomarr_systemd.postmortem.repeats import choose_trace, count_repeats
from nomarr_systemd.postmortem.report import describe_now
from nomarr_systemd.postmortem.report_model import Certificate, Death
from nomarr_systemd.postmortem.run_log import Line, RunLog, Where
from nomarr_systemd.postmortem.stack_traces import fingerprint
from nomarr_systemd.postmortem.witnesses import Scene, ask_label, read_frames, spell_status
from nomarr_systemd.systemd.journal_reader import Journal
from nomarr_systemd.systemd.manager import Manager, ManagerError

PATIENCE_S: Final = 0.6  # for the journal: the whole report is to take less than a second
MAX_FRAMES: Final = 12
SLICE: Final = "nomarr.slice"


def issue(scene: Scene, invocation: str, record: Record | None) -> Certificate:
    """The report on one run, or on a worker that never died."""
    with Journal(deadline=time.monotonic() + PATIENCE_S) as journal:
        where = Where(scene.component, scene.paths.user, _cgroup_of(scene))
        if scene.paths.user and scene.invocation == invocation:
            where = where._replace(pid=scene.facts.get("ExecMainPID", "").removeprefix("0"))
        certificate = _hear(scene, journal, where, invocation, record)
        return certificate._replace(
            notes=(*scene.notes, *_journal_notes(scene, journal, certificate), *certificate.notes)
        )


def _hear(
    scene: Scene, journal: Journal, where: Where, invocation: str, record: Record | None
) -> Certificate:
    if not invocation:
        return _hear_of_start(scene, journal, where)
    run = invocation.partition("#")[0]
    log = run_log.read_run(
        journal, where, invocation, near_us=record.wall_ms * 1000 if record else 0
    )
    if record is None and not log.lines and run != scene.invocation:
        note = f"Neither the ledger nor the journal knows the run {run}."
        return _without_death(scene)._replace(verdict="unknown-run", notes=(note,))
    label, job = ask_label(scene, run)
    ended = judge(scene, log, record, run, label)
    if not ended.failed and record is None:
        note = f"The run {run} has not ended badly."
        return _without_death(scene)._replace(lines=log.lines, notes=(note,))
    death = _make_death(scene, log, record, invocation, ended)
    if death.kind == "start-job":
        certificate = _certify(scene, journal, where, death, log)
        return certificate._replace(record=record, broken=_find_broken(scene))
    if death.kind == "oom" and not death.memory_peak:
        peak = run_log.find_kernel_oom(journal, where, death.at_ms * 1000)
        death = death._replace(memory_peak=peak)
    frames = read_frames(scene, run) if scene.live else []
    last = frames[-1] if frames else {}
    age = last.get("progress_age_s")
    death = death._replace(
        job=job or ("" if last.get("job") is None else clean(str(last["job"]), 500)),
        progress_age_s=float(age) if isinstance(age, (int, float)) else None,
    )
    certificate = _certify(scene, journal, where, death, log)
    return certificate._replace(record=record, frames=tuple(frames[-MAX_FRAMES:]))


def _hear_of_start(scene: Scene, journal: Journal, where: Where) -> Certificate:
    """Of a worker that has no run to speak of: it may be that it could not be started."""
    failed = None if scene.is_running else run_log.find_failed_job(journal, where)
    if failed is None:
        return _without_death(scene)
    texts = clean_lines(failed.text)
    lines = tuple(Line(failed.wall_us, "systemd", None, 4, text) for text in texts)
    ended = classify("", start_job=True)
    death = Death(
        "", ended.kind, ended.code, ended.line, failed.wall_us // 1000, None, "", 0, "", None
    )
    certificate = _certify(scene, journal, where, death, RunLog(lines=lines))
    return certificate._replace(broken=_find_broken(scene))


def _certify(
    scene: Scene, journal: Journal, where: Where, death: Death, log: RunLog
) -> Certificate:
    trace, is_cause = choose_trace(death.kind, log.traces)
    mark = fingerprint(death.kind, death.code, trace if is_cause else None)
    verb = "could not be started" if death.never_ran else "died"
    return Certificate(
        scene,
        "died",
        f"{scene.component} {verb}: {death.line}",
        describe_now(scene),
        death,
        trace,
        is_cause,
        mark,
        lines=log.lines,
        coredump=log.coredump,
        repeats=count_repeats(scene, journal, where, death, mark),
        notes=(_say_dropped(log.dropped),) if log.dropped else (),
    )


def judge(scene: Scene, log: RunLog, record: Record | None, run: str, label: str) -> Ended:
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


def _without_death(scene: Scene) -> Certificate:
    what = (
        "is masked" if scene.is_masked else "is running" if scene.is_running else "is not running"
    )
    return Certificate(
        scene,
        "alive" if scene.is_running else "stopped",
        f"{scene.component} {what}, and no death of it is on record",
        describe_now(scene),
    )


def _make_death(
    scene: Scene, log: RunLog, record: Record | None, invocation: str, ended: Ended
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
        invocation, ended.kind, ended.code, ended.line,
        at_ms or scene.now.wall_ms, run_ms, "", peak,
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
