"""The verdict: how a run ended, judged from all witnesses, and the report made of it."""

from __future__ import annotations

import time
from typing import Final

from nomarr_systemd.core.death import LABELS, Death, classify, exit_words, recall
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import clean, clean_lines
from nomarr_systemd.postmortem import run_log
from nomarr_systemd.postmortem.repeats import choose_trace, count_repeats
from nomarr_systemd.postmortem.report import describe_now
from nomarr_systemd.postmortem.report_model import DeathFacts, Report
from nomarr_systemd.postmortem.run_log import JournalTerms, Line, RunLog
from nomarr_systemd.postmortem.stack_traces import fingerprint
from nomarr_systemd.postmortem.witnesses import Witnesses, ask_label, read_frames
from nomarr_systemd.systemd.journal_reader import Journal
from nomarr_systemd.systemd.manager import Manager, ManagerError

JOURNAL_S: Final = 0.6  # for reading the journal: the whole report shall take less than a second
MAX_FRAMES: Final = 12
_LONGEST_S: Final = 1e9
SLICE: Final = "nomarr.slice"


def make_report(witnesses: Witnesses, invocation: str, record: Record | None) -> Report:
    """Return the report on one run, or on a worker that never died."""
    with Journal(deadline=time.monotonic() + JOURNAL_S) as journal:
        terms = JournalTerms(witnesses.component, witnesses.paths.user, _find_cgroup(witnesses))
        if witnesses.paths.user and witnesses.invocation == invocation:
            terms = terms._replace(pid=witnesses.facts.get("ExecMainPID", "").removeprefix("0"))
        if invocation:
            report = _report_run(witnesses, journal, terms, invocation, record)
        else:
            report = _report_start(witnesses, journal, terms)
        notes = (*witnesses.notes, *_note_journal(witnesses, journal, report), *report.notes)
        return report._replace(notes=notes)


def _report_run(
    witnesses: Witnesses,
    journal: Journal,
    terms: JournalTerms,
    invocation: str,
    record: Record | None,
) -> Report:
    run = invocation.partition("#")[0]
    log = run_log.read_run(
        journal, terms, invocation, near_us=record.wall_ms * 1000 if record else 0
    )
    if record is None and not log.lines and run != witnesses.invocation:
        note = f"Neither the ledger nor the journal knows the run {run}."
        return _report_no_death(witnesses)._replace(verdict="unknown-run", notes=(note,))
    label, job = ask_label(witnesses, run) if witnesses.live else ("", "")
    ended = judge(witnesses, log, record, run, label)
    if not ended.failed and record is None:
        note = f"The run {run} has not failed."
        return _report_no_death(witnesses)._replace(lines=log.lines, notes=(note,))
    death = _make_death(witnesses, log, record, invocation, ended)
    if death.kind == "start-job":
        report = _report_death(witnesses, journal, terms, death, log)
        return report._replace(record=record, broken=_find_broken(witnesses))
    if death.kind == "oom" and not death.memory_peak:
        peak = run_log.find_kernel_oom(journal, terms, death.at_ms * 1000)
        death = death._replace(memory_peak=peak)
    frames = read_frames(witnesses, run) if witnesses.live else []
    last = frames[-1] if frames else {}
    age_s = last.get("progress_age_s")
    if not isinstance(age_s, (int, float)) or abs(age_s) > _LONGEST_S:
        age_s = None
    death = death._replace(
        job=job or ("" if last.get("job") is None else clean(str(last["job"]), 500)),
        progress_age_s=None if age_s is None else float(age_s),
    )
    report = _report_death(witnesses, journal, terms, death, log)
    return report._replace(record=record, frames=tuple(frames[-MAX_FRAMES:]))


def _report_start(witnesses: Witnesses, journal: Journal, terms: JournalTerms) -> Report:
    """Report on a worker without a run: its start job may have failed."""
    failed = None if witnesses.is_running else run_log.find_failed_job(journal, terms)
    if failed is None:
        return _report_no_death(witnesses)
    texts = clean_lines(failed.text)
    lines = tuple(Line(failed.wall_us, "systemd", None, 4, text) for text in texts)
    death = DeathFacts(classify("", start_job=True), failed.wall_us // 1000)
    report = _report_death(witnesses, journal, terms, death, RunLog(lines=lines))
    return report._replace(broken=_find_broken(witnesses))


def _report_death(
    witnesses: Witnesses, journal: Journal, terms: JournalTerms, death: DeathFacts, log: RunLog
) -> Report:
    trace, is_cause = choose_trace(death.kind, log.traces)
    mark = fingerprint(death.kind, death.code, trace if is_cause else None)
    verb = "could not be started" if death.never_ran else "died"
    return Report(
        witnesses,
        "died",
        f"{witnesses.component} {verb}: {death.line}",
        describe_now(witnesses),
        death,
        trace,
        is_cause,
        mark,
        lines=log.lines,
        coredump=log.coredump,
        repeats=count_repeats(witnesses.account, journal, terms, death, mark),
        notes=(_note_dropped(log.dropped),) if log.dropped else (),
    )


def judge(witnesses: Witnesses, log: RunLog, record: Record | None, run: str, label: str) -> Death:
    """Return how the run ended: the ledger's class, with systemd's values if still known."""
    if record is not None and record.kind == "start-job":
        return classify("", start_job=True)
    words = ("", "", "")
    if log.result or log.exit_code:
        words = (log.result, log.exit_code, log.exit_status)
    elif witnesses.invocation == run:
        main = (witnesses.facts.get(name, "") for name in ("ExecMainCode", "ExecMainStatus"))
        words = (witnesses.facts.get("Result", ""), *exit_words(*main))
    if record is not None:
        # If the class is one of a label, that was the supervisor's label when it was booked.
        labels = [name for name, outcome in LABELS.items() if outcome.kind == record.kind]
        label = label if label in labels else (labels[0] if labels else "")
    stop_asked = record is not None and record.kind == "stop-timeout"
    ended = classify(*words, label=label, stop_asked=stop_asked)
    if record is not None and (not words[0] or ended.kind != record.kind):
        return recall(record.kind, record.code)
    if not words[0] and words[1] == "":
        return ended._replace(failed=witnesses.is_failed)
    return ended


def _report_no_death(witnesses: Witnesses) -> Report:
    running = "is running" if witnesses.is_running else "is not running"
    return Report(
        witnesses,
        "alive" if witnesses.is_running else "stopped",
        f"{witnesses.component} {'is masked' if witnesses.is_masked else running}, and no death of"
        " it is on record",
        describe_now(witnesses),
    )


def _make_death(
    witnesses: Witnesses, log: RunLog, record: Record | None, invocation: str, ended: Death
) -> DeathFacts:
    is_current = witnesses.invocation == invocation.partition("#")[0]
    at_ms = log.ended_us // 1000
    if record is not None and (not at_ms or ended.kind == "start-job"):
        at_ms = record.wall_ms
    if not at_ms and is_current:
        at_ms = witnesses.wall_ms_of("ExecMainExitTimestampMonotonic")
    run_ms = record.run_ms if record else None
    if run_ms is None and log.began_us and log.ended_us and ended.kind != "start-job":
        run_ms = (log.ended_us - log.began_us) // 1000
    peak = log.memory_peak
    if not peak and is_current and witnesses.facts.get("MemoryPeak", "").isdigit():
        peak = int(witnesses.facts["MemoryPeak"])
        peak = 0 if peak >= 1 << 63 else peak
    limit = witnesses.facts.get("MemoryMax", "")
    name = witnesses.component.component_id
    return DeathFacts(
        ended._replace(component_id=name, invocation=invocation, run_ms=run_ms),
        at_ms or witnesses.now.wall_ms,
        memory_peak=peak,
        memory_max="" if limit in ("infinity", "[not set]") else limit,
    )


def _note_journal(witnesses: Witnesses, journal: Journal, report: Report) -> list[str]:
    """Return what the journal could not tell, and why."""
    if not journal.is_there or (not witnesses.paths.user and not journal.is_readable):
        note = (
            "The journal cannot be read, so the lines of the run are missing: be root, or join the"
            " group systemd-journal (usermod -aG systemd-journal USER, then log in again)."
        )
        return [note]
    notes = []
    if journal.is_volatile:
        notes.append(
            "The journal is kept in memory only and is lost at a reboot: mkdir /var/log/journal,"
            " then systemctl restart systemd-journald."
        )
    if report.death and report.death.invocation and not report.lines:
        notes.append("The journal has nothing of this run any more: it was vacuumed or rotated.")
    if journal.cut_short:
        notes.append("The journal is large: not all of it was searched for the same crash.")
    return notes


def _note_dropped(count: int) -> str:
    return (
        f"journald dropped {count} messages of this run (rate limit): some lines are missing here."
        " LogRateLimitIntervalSec = 0 in [pool.NAME.unit] lifts the limit."
    )


def _find_broken(witnesses: Witnesses) -> tuple[str, ...]:
    """Return the required units that failed or are missing, each with its state."""
    names: list[str] = []
    for relation in ("Requires", "Requisite", "BindsTo"):
        names += witnesses.facts.get(relation, "").split()
    asked = ["ActiveState", "LoadState", "Result"]
    try:
        shown = Manager(user=witnesses.paths.user).show(names, asked)
    except (ManagerError, ValueError):
        return ()
    return tuple(
        f"{name}: {facts['LoadState'] if facts['LoadState'] != 'loaded' else facts['ActiveState']}"
        for name, facts in shown.items()
        if facts["LoadState"] not in ("loaded", "") or facts["ActiveState"] == "failed"
    )


def _find_cgroup(witnesses: Witnesses) -> str:
    """Return the cgroup of the unit in a user manager: journald may know nothing else of a line."""
    if not witnesses.paths.user:
        return ""
    if known := witnesses.facts.get("ControlGroup"):
        return known
    # A masked unit has no properties of its own left: then the slice is the template's.
    parts = (witnesses.facts.get("Slice") or SLICE).removesuffix(".slice").split("-")
    slices = ["-".join(parts[: n + 1]) + ".slice" for n in range(len(parts))]
    try:
        top = Manager(user=True).show_manager("ControlGroup")["ControlGroup"]
    except (ManagerError, KeyError):
        return ""
    return "/".join([top, *slices, witnesses.component.unit])
