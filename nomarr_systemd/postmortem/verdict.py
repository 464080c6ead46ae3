"""The verdict: how a run ended, judged from all witnesses, and the report made of it."""

from __future__ import annotations

import time
from typing import Any, Final

from nomarr_systemd.core.death import BY_SIGKILL, ENDED, LABELS, Death, classify, exit_words, recall
from nomarr_systemd.core.ids import TARGET
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import clean, clean_lines
from nomarr_systemd.live.answers import RunSaid
from nomarr_systemd.postmortem import run_log
from nomarr_systemd.postmortem.kernel_log import read_kernel
from nomarr_systemd.postmortem.moments import show_moment
from nomarr_systemd.postmortem.present import describe_living, describe_now
from nomarr_systemd.postmortem.repeats import choose_trace, count_repeats
from nomarr_systemd.postmortem.report_model import NEVER_BEGAN, DeathFacts, Report
from nomarr_systemd.postmortem.run_log import JournalTerms, Line, RunLog
from nomarr_systemd.postmortem.stack_traces import fingerprint
from nomarr_systemd.postmortem.witnesses import RunQuestions, Witnesses, find_last_death
from nomarr_systemd.systemd.journal_reader import Journal
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.needs import find_lacking
from nomarr_systemd.systemd.systemctl import ManagerError

JOURNAL_S: Final = 0.6  # for reading the journal: the whole report takes less than a second
MAX_FRAMES: Final = 12
_LONGEST_S: Final = 1e9
VERBS: Final = {"ended": "ended unasked", "finished": "has finished"}
_KERNEL_MAY_KNOW: Final = ("exit", "signal", "core-dump", "oom")


def make_report(witnesses: Witnesses, invocation: str, record: Record | None) -> Report:
    """Return the report on one run, or on a worker that never died."""
    with Journal(deadline=time.monotonic() + JOURNAL_S) as journal:
        terms = JournalTerms(witnesses.component, witnesses.paths.user, _find_cgroup(witnesses))
        if witnesses.paths.user and witnesses.invocation == invocation:
            terms = terms._replace(pid=witnesses.facts.get("ExecMainPID", "").removeprefix("0"))
        supervisor = RunQuestions(witnesses)
        if invocation:
            report = _report_run(witnesses, supervisor, journal, terms, invocation, record)
        else:
            report = _report_present(witnesses, supervisor, journal, terms)
        unread = (*supervisor.notes, *_note_journal(witnesses, journal, report))
        notes = (*witnesses.notes, *unread, *report.notes)
        return report._replace(notes=notes, frames_known=supervisor.is_answered)


def _report_run(
    witnesses: Witnesses,
    supervisor: RunQuestions,
    journal: Journal,
    terms: JournalTerms,
    invocation: str,
    record: Record | None,
) -> Report:
    run = invocation.partition("#")[0]
    log = run_log.read_run(
        journal, terms, invocation, near_us=record.wall_ms * 1000 if record else 0
    )
    is_current = run == witnesses.invocation
    if record is None and not log.lines and not is_current:
        note = f"Neither the ledger nor the journal knows the run {run}."
        headline = f"{witnesses.component} has no such run"
        return Report(witnesses, "unknown-run", headline, describe_now(witnesses), notes=(note,))
    said = supervisor.ask_run(run)
    ended = judge(witnesses, log, record, run, said.label)
    if record is not None and (record.kind, record.action) == (ENDED.kind, "ignore"):
        ended = ended._replace(kind="finished", line=ended.line.removeprefix(f"{ENDED.line}; "))
    if record is None and is_current and witnesses.is_running:
        note = f"The run {run} has not ended."
        report = _report_present(witnesses, supervisor, journal, terms)
        return report._replace(notes=(note, *report.notes))
    if record is None and not ended.failed:
        if not is_current or witnesses.is_stop_asked or witnesses.hold:
            return _report_stop(witnesses, log, ended, is_current=is_current)
        ended = ended._replace(kind="ended", failed=True)
    death = _make_death(witnesses, log, record, invocation, ended)
    if death.kind in NEVER_BEGAN:
        report = _report_death(witnesses, journal, terms, death, log)
        return report._replace(record=record, broken=_find_broken(witnesses))
    death = _ask_kernel(witnesses, journal, log, death, is_current=is_current)
    frames = supervisor.read_frames(run)
    death = _add_last_words(death, frames[-1] if frames else {}, said)
    report = _report_death(witnesses, journal, terms, death, log, record)
    return report._replace(record=record, frames=tuple(frames[-MAX_FRAMES:]))


def _ask_kernel(
    witnesses: Witnesses, journal: Journal, log: RunLog, death: DeathFacts, *, is_current: bool
) -> DeathFacts:
    """Add what the kernel logged. A kill for memory may have reached systemd as a plain SIGKILL."""
    if death.kind not in _KERNEL_MAY_KNOW:
        return death
    pids = set(log.pids)
    main_pid = witnesses.facts.get("ExecMainPID", "")
    if is_current and main_pid.isdigit():
        pids.add(int(main_pid))
    kernel = read_kernel(
        journal,
        witnesses.component.unit,
        pids - {0},
        since_us=log.began_us or death.at_ms * 1000,
        died_us=death.at_ms * 1000,
    )
    death = death._replace(forks_refused=kernel.forks_refused, system_call=kernel.system_call)
    if kernel.oom_killed and (death.kind == "oom" or death.code == BY_SIGKILL):
        line = death.line if death.kind == "oom" else f"out of memory; {death.line}"
        ended = death.death._replace(kind="oom", line=line)
        death = death._replace(death=ended, memory_peak=death.memory_peak or kernel.memory)
    return death


def _add_last_words(death: DeathFacts, last: dict[str, Any], said: RunSaid) -> DeathFacts:
    """Add what the worker's last frame says, and what the supervisor knows of the run."""
    age_s = last.get("progress_age_s")
    if not isinstance(age_s, (int, float)) or abs(age_s) > _LONGEST_S:
        age_s = None
    job, phase = ("" if last.get(name) is None else str(last[name]) for name in ("job", "phase"))
    return death._replace(
        job=said.job or clean(job, 500),
        progress_age_s=None if age_s is None else float(age_s),
        phase=clean(phase, 200),
        bad_line=said.bad_line,
    )


def _report_present(
    witnesses: Witnesses, supervisor: RunQuestions, journal: Journal, terms: JournalTerms
) -> Report:
    """Report on a worker as it is now: what it does, or why it does not run."""
    if witnesses.is_running:
        return _report_living(witnesses, supervisor, journal, terms)
    failed = run_log.find_failed_job(journal, terms)
    if failed is None:
        masked = "is masked" if witnesses.is_masked else "is not running"
        headline = f"{witnesses.component} {masked}, and no death of it is on record"
        if not witnesses.is_masked and not witnesses.is_target_active:
            headline = f"{witnesses.component} does not run: {TARGET} is inactive"
        return Report(witnesses, "stopped", headline, describe_now(witnesses))
    texts = clean_lines(failed.text)
    lines = tuple(Line(failed.wall_us, "systemd", None, 4, text) for text in texts)
    death = DeathFacts(classify("", start_job=True), failed.wall_us // 1000)
    report = _report_death(witnesses, journal, terms, death, RunLog(lines=lines))
    return report._replace(broken=_find_broken(witnesses))


def _report_living(
    witnesses: Witnesses, supervisor: RunQuestions, journal: Journal, terms: JournalTerms
) -> Report:
    run = witnesses.invocation
    log = run_log.read_run(journal, terms, run) if run else RunLog()
    frames = supervisor.read_frames(run) if run else []
    return Report(
        witnesses,
        "alive",
        describe_living(witnesses),
        describe_now(witnesses),
        lines=log.lines,
        frames=tuple(frames[-MAX_FRAMES:]),
        notes=_note_last_death(witnesses),
    )


def _report_stop(witnesses: Witnesses, log: RunLog, ended: Death, *, is_current: bool) -> Report:
    """Report on a run that ended well."""
    who = witnesses.component
    lacks = ""
    if not is_current:
        headline = f"{who}: that run did not fail: {ended.line}"
    elif witnesses.hold:
        headline = f"{who} was stopped, and is held: {witnesses.hold}"
    elif not witnesses.is_target_active:
        headline = f"{who} was stopped: {TARGET} is inactive"
    elif lacks := _find_lacking(witnesses):
        headline = f"{who} was stopped with {lacks}: it cannot run without"
    else:
        headline = f"{who} was stopped: systemd was asked to stop it"
    return Report(
        witnesses,
        "stopped",
        headline,
        describe_now(witnesses),
        lines=log.lines,
        broken=(lacks.replace(", which is", ":"),) if lacks else (),
        notes=_note_last_death(witnesses),
    )


def _note_last_death(witnesses: Witnesses) -> tuple[str, ...]:
    last = find_last_death(witnesses.account)
    if last is None:
        return ()
    ours = witnesses.paths.nomarrctl
    how = recall(last.kind, last.code).line
    command = f"{ours} why {witnesses.component.instance} --invocation {last.invocation[:8]}"
    return (f"Its last death was another one, at {show_moment(last.wall_ms)}: {how}. {command}",)


def _report_death(
    witnesses: Witnesses,
    journal: Journal,
    terms: JournalTerms,
    death: DeathFacts,
    log: RunLog,
    record: Record | None = None,
) -> Report:
    booked = record.kind if record else death.kind  # the ledger may know it as a plain signal
    trace, is_cause = choose_trace(booked, log.traces)
    mark = fingerprint(booked, death.code, trace if is_cause else None)
    verb = "could not be started" if death.never_ran else VERBS.get(death.kind, "died")
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
        repeats=count_repeats(witnesses.account, journal, terms, death, booked, mark),
        notes=(_note_dropped(log.dropped),) if log.dropped else (),
    )


def judge(witnesses: Witnesses, log: RunLog, record: Record | None, run: str, label: str) -> Death:
    """Return how the run ended: the ledger's class, with systemd's values if still known."""
    if record is not None and record.kind == "start-job":
        return classify("", start_job=True)
    if record is not None and record.kind == "dependency":
        line = record.text.partition(";")[0]
        return recall(record.kind, record.code)._replace(line=line)
    words = ("", "", "")
    if log.result:
        words = (log.result, log.exit_code, log.exit_status)
    elif witnesses.invocation == run and not witnesses.is_running:
        main = (witnesses.facts.get(name, "") for name in ("ExecMainCode", "ExecMainStatus"))
        words = (witnesses.facts.get("Result", ""), *exit_words(*main))
    elif log.exit_code:
        words = ("success", log.exit_code, log.exit_status)
    if record is not None:
        # If the class is one of a label, that was the supervisor's label when it was booked. The
        # controller's entry has its text.
        labels = [name for name, outcome in LABELS.items() if outcome.kind == record.kind]
        told = [name for name in labels if any(LABELS[name].line in it.text for it in log.lines)]
        if label not in labels:
            # Without either, systemd's own start timeout explains itself.
            label = next(iter(told if words[0] == "timeout" else (*told, *labels)), "")
    stop_asked = record is not None and record.kind == "stop-timeout"
    unasked = record is not None and record.kind == "ended"
    ended = classify(*words, label=label, stop_asked=stop_asked, unasked=unasked)
    if record is not None and (not words[0] or ended.kind != record.kind):
        return recall(record.kind, record.code)
    if record is not None:
        return ended._replace(code=record.code)  # systemd does not log every exit
    if not words[0] and words[1] == "":
        return ended._replace(failed=witnesses.is_failed)
    return ended


def _make_death(
    witnesses: Witnesses, log: RunLog, record: Record | None, invocation: str, ended: Death
) -> DeathFacts:
    is_current = witnesses.invocation == invocation.partition("#")[0]
    at_ms = log.ended_us // 1000
    if record is not None and (not at_ms or ended.kind in NEVER_BEGAN):
        at_ms = record.wall_ms
    if not at_ms and is_current:
        at_ms = witnesses.wall_ms_of("ExecMainExitTimestampMonotonic")
    run_ms = record.run_ms if record else None
    if run_ms is None and log.began_us and log.ended_us and ended.kind not in NEVER_BEGAN:
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


def _find_lacking(witnesses: Witnesses) -> str:
    """Return a unit that the worker requires and that is not active, and its state."""
    unit = witnesses.component.unit
    try:
        return find_lacking(Manager(user=witnesses.paths.user), [unit]).get(unit, "")
    except (ManagerError, ValueError):
        return ""


def _find_cgroup(witnesses: Witnesses) -> str:
    """Return the cgroup of the unit in a user manager: journald may know nothing else of a line."""
    if not witnesses.paths.user:
        return ""
    if known := witnesses.facts.get("ControlGroup"):
        return known
    # A masked unit has no properties of its own left.
    own = witnesses.facts.get("Slice") or witnesses.component.slice
    parts = own.removesuffix(".slice").split("-")
    slices = ["-".join(parts[: n + 1]) + ".slice" for n in range(len(parts))]
    try:
        top = Manager(user=True).show_manager("ControlGroup")["ControlGroup"]
    except (ManagerError, KeyError):
        return ""
    return "/".join([top, *slices, witnesses.component.unit])
