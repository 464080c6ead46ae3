"""Which trace tells most of a death, and how often a worker died like that before."""

from __future__ import annotations

from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.postmortem.report_model import Death, Repeats
from nomarr_systemd.postmortem.run_log import Where, read_end
from nomarr_systemd.postmortem.stack_traces import Trace, fingerprint
from nomarr_systemd.postmortem.witnesses import Scene
from nomarr_systemd.systemd.journal_reader import Journal


def choose_trace(kind: str, traces: tuple[Trace, ...]) -> tuple[Trace | None, bool]:
    """The trace that tells most, and whether it is the death's own.

    A program that leaves by itself printed its traceback last. One that is killed may have logged
    some long before; its own are the stacks that faulthandler or systemd-coredump left.
    """
    last = {trace.kind: trace for trace in traces}
    if kind == "start-job":
        return None, False  # what the run before it said is another matter
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
    log = read_end(
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
