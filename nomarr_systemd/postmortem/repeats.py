"""Which trace explains a death best, and how often the worker died of the same crash before."""

from __future__ import annotations

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ledger_record import DECISIONS, Record
from nomarr_systemd.postmortem.report_model import NEVER_BEGAN, DeathFacts, Repeats
from nomarr_systemd.postmortem.run_log import JournalTerms, read_end
from nomarr_systemd.postmortem.stack_traces import ANY_CODE, Trace, fingerprint
from nomarr_systemd.systemd.journal_reader import Journal


def choose_trace(kind: str, traces: tuple[Trace, ...]) -> tuple[Trace | None, bool]:
    """Return the trace that explains most, and whether it is the cause of the death.

    A program that exits by itself prints its traceback last. One that is killed may have logged
    tracebacks long before; the stacks of faulthandler or systemd-coredump are those of its end.
    """
    last = {trace.kind: trace for trace in traces}
    if kind in NEVER_BEGAN:
        return None, False  # a trace here is from the run before
    if kind in ("exit", "config"):
        trace = last.get("traceback") or last.get("stacks") or last.get("native")
        return trace, trace is not None
    if own := last.get("stacks") or last.get("native"):
        return own, True
    return last.get("traceback"), False


def count_repeats(
    account: Account,
    journal: Journal,
    terms: JournalTerms,
    death: DeathFacts,
    booked: str,
    mark: str,
) -> Repeats | None:
    """Compare with every death on record, as far as the journal and the time limit allow.
    ``booked`` is the class that the ledger has for this death."""
    records = [each for each in account.records if each.action in DECISIONS and each.kind]
    deaths = len(records)
    if not records:
        return None
    if all(each.invocation != death.invocation for each in records):
        deaths += 1
    count, unknown = 1, 0
    first_ms = last_ms = death.at_ms
    for each in reversed(records):
        if each.invocation == death.invocation or each.kind != booked:
            continue
        if each.code != death.code and booked not in ANY_CODE:
            continue
        same = _is_same(journal, terms, each, mark)
        if same is None:
            unknown += 1
        elif same:
            count += 1
            first_ms, last_ms = min(first_ms, each.wall_ms), max(last_ms, each.wall_ms)
    return Repeats(count, deaths, unknown, first_ms, last_ms)


def _is_same(journal: Journal, terms: JournalTerms, record: Record, mark: str) -> bool | None:
    """Return whether a death on record has this fingerprint; None if the journal has lost it."""
    if record.kind in NEVER_BEGAN:
        return True
    if journal.cut_short:
        return None
    terms = terms._replace(pid="")  # the pid of another run
    run_ms = 60_000 if record.run_ms is None else record.run_ms + 1500
    log = read_end(
        journal,
        terms,
        record.invocation,
        since_us=(record.wall_ms - run_ms) * 1000,
        # Not into the next run, which begins after the backoff.
        until_us=(record.wall_ms + min(record.delay_ms, 1000)) * 1000,
    )
    if log is None:
        return None
    trace, is_cause = choose_trace(record.kind, log.traces)
    can_be_lost = not log.lines or record.kind == "core-dump"
    if trace is None and can_be_lost and mark != fingerprint(record.kind, record.code, None):
        return None  # its trace may have been lost
    return fingerprint(record.kind, record.code, trace if is_cause else None) == mark
