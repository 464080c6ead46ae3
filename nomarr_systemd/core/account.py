"""One worker's account in the ledger: what is on record, and how each booking changes it.

Pure: an account and an event give the next account. That a booking happens exactly once, by one
compare-and-swap of the document, is the ledger's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nomarr_systemd.core import policy, window
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ledger_record import DECISIONS, EFFECTS, Record, action_of, with_effect
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Decision, Evidence, History, Rules, decide
from nomarr_systemd.core.text import one_line
from nomarr_systemd.core.time import Moment, age_ms
from nomarr_systemd.core.window import Window

MAX_TEXT: Final = 500
RING: Final = 100  # records kept; also the most restarts that a window can be asked to count
MOVED: Final = 25  # records that leave a full ring at once

_OWED: Final = ("restart", "hold")  # decisions that a newer death replaces; a mask stays
# A restart is scheduled from the start: its timer is made before it is booked.
_FIRST_EFFECT: Final = {
    "restart": "scheduled",
    "fail": "pending",
    "hold": "pending",
    "ignore": "done",
}


class Statistics(NamedTuple):
    """Totals of one account."""

    total_restarts: int  # ever, also before a reset
    lifetime_restarts: int  # since the last reset
    window_restarts: int
    rate_per_s: float  # window_restarts over the window
    recoveries: int  # restarts after which it ran stably

    def to_json(self) -> dict[str, Any]:
        return {
            "total_restarts": self.total_restarts,
            "restarts_per_hour": round(self.rate_per_s * 3600, 3),
            "recoveries": self.recoveries,
        }


class Account(NamedTuple):
    """One document of ``worker_restart_policy``."""

    component_id: str
    host: str = ""
    restart_count: int = 0  # since the last reset; compared with the lifetime limit
    last_restart_wall_ms: int | None = None
    failed_at_wall_ms: int | None = None
    failure_reason: str | None = None
    updated_at_wall_ms: int | None = None
    attempts: int = 0
    total_restarts: int = 0
    recoveries: int = 0
    k: int = 0
    last_due: Moment | None = None  # when the present or last run was due to begin
    window: Window = {}  # noqa: RUF012  never changed in place
    rows: Sequence[str] = ()  # records as they are in the document, oldest first
    moved: Sequence[str] = ()  # records that have left the ring since the document was read

    @property
    def records(self) -> list[Record]:
        return [Record.read(row) for row in self.rows]

    def unfinished(self) -> list[Record]:
        """Return the decisions that are not carried out yet, oldest first."""
        return [Record.read(row) for row in self.rows if "|done|" not in row]

    def find(self, invocation: str, actions: Sequence[str] = DECISIONS) -> Record | None:
        """Return the last record of this invocation, by default its decision."""
        if not invocation:
            return None
        mark = f"|{invocation}|"
        for row in reversed(self.rows):
            if mark in row:
                record = Record.read(row)
                if record.invocation == invocation and record.action in actions:
                    return record
        return None

    def find_last(self, run: str) -> Record | None:
        """Return the newest decision about this run or a start job that failed after it."""
        for row in reversed(self.rows):
            if f"|{run}" in row:
                record = Record.read(row)
                if record.invocation.partition("#")[0] == run and record.action in DECISIONS:
                    return record
        return None

    def was_reset_since(self, then: Moment, now: Moment) -> bool:
        """Return True if a person reset the worker after that moment."""
        since_ms = age_ms(then, now)
        return any(
            each.action == "reset" and age_ms(each.moment, now) < since_ms for each in self.records
        )


def from_doc(doc: Mapping[str, Any]) -> Account:
    """Make an Account of a document. Fields of a newer version are ignored."""
    values = {name: doc[name] for name in Account._fields if name in doc and name != "moved"}
    if values.get("last_due") is not None:
        values["last_due"] = Moment(*values["last_due"])
    values["rows"] = doc.get("records", ())
    return Account(**values)


def to_doc(account: Account) -> dict[str, Any]:
    """Make a document of an Account, without ``_key``, ``_rev`` and the records that have left."""
    doc = account._asdict()
    del doc["moved"]
    doc["records"] = doc.pop("rows")
    return doc


def history_of(account: Account, now: Moment) -> History:
    """Return the History that ``decide`` needs for a death that is not on record."""
    here, elsewhere = window.split(account.window, now.boot_id)
    return History({}, here, elsewhere, account.restart_count, account.k, account.last_due)


def record_failure(
    account: Account, death: Death, rules: Rules, now: Moment, *, current: bool = True
) -> tuple[Account, Record]:
    """Decide and book; a death that is on record already changes nothing.

    ``current`` False: the unit is in a newer run. The death counts, but nothing is done about it,
    and decisions about a newer one stay.
    """
    known = _find_known(account, death.invocation)
    if known is not None:
        return account, known
    decision = decide(history_of(account, now), death, rules, now)
    if current:
        account = _settle(account, _OWED)
    return _book(account, death, decision, rules, now, overtaken=not current)


def book(
    account: Account, death: Death, decision: Decision, rules: Rules, at: Moment
) -> tuple[Account, Record]:
    """Record, once, a decision that was made earlier, ``at``.

    If there are newer records, it counts, but nothing is done about it, and newer decisions stay.
    """
    known = _find_known(account, death.invocation)
    if known is not None:
        return account, known
    overtaken = bool(account.rows) and age_ms(at, Record.read(account.rows[-1]).moment) > 0
    if not overtaken:
        account = _settle(account, _OWED)
    return _book(account, death, decision, rules, at, overtaken=overtaken)


def _find_known(account: Account, invocation: str) -> Record | None:
    """Return the decision on record; a substitute if only the window still has it."""
    known = account.find(invocation)
    if known is None and window.has(account.window, invocation):
        text = "counted before; the ring no longer holds it"
        known = _append(account, Moment(0, "", 0), action="restart", text=text)[1]
        known = known._replace(attempt=0, invocation=invocation)
    return known


def _book(
    account: Account,
    death: Death,
    decision: Decision,
    rules: Rules,
    at: Moment,
    *,
    overtaken: bool = False,
) -> tuple[Account, Record]:
    due = account.last_due
    if due is not None and age_ms(due, at) >= rules.stable_after_s * 1000:
        account = account._replace(recoveries=account.recoveries + 1, k=0, last_due=None)
    account, record = _append(
        account,
        at,
        invocation=death.invocation,
        action=decision.action,
        kind=death.kind,
        code=death.code,
        delay_ms=decision.delay_ms,
        effect="done" if overtaken else _FIRST_EFFECT[decision.action],
        run_ms=death.run_ms,
        evidence=decision.evidence,
        text=decision.reason,
    )
    if decision.action == "restart":
        account = _count(account, record, overtaken=overtaken)
    elif decision.action == "fail" and not overtaken:
        account = account._replace(
            failed_at_wall_ms=at.wall_ms, failure_reason=decision.failure_reason[:MAX_TEXT]
        )
    return account, record


def refund(
    account: Account, invocation: str, now: Moment, why: str
) -> tuple[Account, Record | None]:
    """Refund a restart: window and lifetime no longer count it, the backoff still does.

    None if it is not counted: it was refunded before, the account was reset since, or it is older
    than the last RING counted restarts.
    """
    if not window.has(account.window, invocation):
        return account, None
    account = account._replace(
        window=window.take_out(account.window, invocation),
        restart_count=max(0, account.restart_count - 1),
    )
    return _append(account, now, invocation=invocation, action="refund", text=why)


def record_manual(
    account: Account, invocation: str, now: Moment, by: str
) -> tuple[Account, Record]:
    """Record a start by a person: never counted; decisions that are owed are marked as done."""
    known = account.find(invocation, ("manual",))
    if known is not None:
        return account, known
    account, record = _append(
        _settle(account, DECISIONS), now, invocation=invocation, action="manual", by=by
    )
    account = account._replace(last_due=now, failed_at_wall_ms=None, failure_reason=None)
    return account, record


def note(account: Account, action: str, now: Moment, by: str, text: str = "") -> Account:
    """Record that a person paused the worker or let it run again: never counted. Restarts and
    holds that were owed are marked as done; unless it is paused, a new run begins now."""
    account, _record = _append(_settle(account, _OWED), now, action=action, text=text, by=by)
    return account if action == "pause" else account._replace(last_due=now)


def set_effect(account: Account, invocation: str, effect: str, now: Moment) -> Account:
    """Note how far a decision has been carried out; what is done stays done."""
    known = account.find(invocation)
    if known is None or EFFECTS.index(effect) <= EFFECTS.index(known.effect):
        return account
    mark = f"{known.attempt}|"
    rows = [with_effect(row, effect) if row.startswith(mark) else row for row in account.rows]
    account = account._replace(rows=rows, updated_at_wall_ms=now.wall_ms)
    # A held worker that is released begins its run now, not when it was last restarted.
    released = known.action == "hold" and known.effect == "pending"
    return account._replace(last_due=now) if released else account


def reset(account: Account, now: Moment, by: str) -> Account:
    """Set the counts to 0; the records stay as history."""
    account, _record = _append(_settle(account, DECISIONS), now, action="reset", by=by)
    return account._replace(
        restart_count=0,
        last_restart_wall_ms=None,
        failed_at_wall_ms=None,
        failure_reason=None,
        k=0,
        last_due=None,
        window={},
    )


def mark_failed(
    account: Account, failure_reason: str, now: Moment, *, invocation: str = ""
) -> Account:
    """Mark the worker as failed for another reason than the policy's; the count is kept.

    With the ``invocation`` that led to it, the mask is still owed.
    """
    account, _record = _append(
        _settle(account, _OWED),
        now,
        action="fail",
        text=failure_reason,
        invocation=invocation,
        effect="pending" if invocation else "done",
    )
    return account._replace(failed_at_wall_ms=now.wall_ms, failure_reason=failure_reason[:MAX_TEXT])


def increment(account: Account, now: Moment) -> Account:
    """Count a restart that another program has done."""
    account, record = _append(account, now, action="restart", effect="done")
    return _count(account, record)


def count_lifetime(account: Account, rules: Rules, now: Moment) -> int:
    """Return how many restarts the lifetime limit counts now."""
    return policy.count_lifetime(history_of(account, now), rules, now)


def statistics(account: Account, window_s: float, now: Moment) -> Statistics:
    """Return totals, and the rate over the last ``window_s`` seconds."""
    recent = window.count_recent(account.window, window_s * 1000, now)
    return Statistics(
        account.total_restarts,
        account.restart_count,
        recent,
        recent / window_s if window_s else 0.0,
        account.recoveries,
    )


def _append(
    account: Account,
    at: Moment,
    *,
    action: str,
    invocation: str = "",
    kind: str = "",
    code: int = 0,
    delay_ms: int = 0,
    effect: str = "done",
    run_ms: int | None = None,
    evidence: Evidence | None = None,
    text: str = "",
    by: str = "",
) -> tuple[Account, Record]:
    record = Record(
        account.attempts + 1,
        _one_line(invocation),
        action,
        _one_line(kind),
        code,
        delay_ms,
        at.wall_ms,
        at.boot_id,
        at.boottime_ms,
        effect,
        run_ms,
        *(evidence or Evidence(0, 0, account.restart_count, 0, account.k, None)),
        _one_line(text),
        _one_line(by),
    )
    if len(account.rows) >= RING:
        leaving = len(account.rows) - RING + MOVED
        account = account._replace(
            rows=account.rows[leaving:], moved=(*account.moved, *account.rows[:leaving])
        )
    rows = [*account.rows, record.write()]
    changed = account._replace(rows=rows, attempts=record.attempt, updated_at_wall_ms=at.wall_ms)
    return changed, record


def _one_line(text: str) -> str:
    """Replace the bar that ends a field, spell out what is not printable, and cut the text."""
    return one_line(text.replace("|", "/").replace("\n", " "), MAX_TEXT)


def _count(account: Account, record: Record, *, overtaken: bool = False) -> Account:
    # A restart that waits for room in the window is counted there from when it is due.
    cooling = record.window_used >= record.window_limit > 0
    begun = record.due if cooling else record.moment
    counted = account._replace(
        restart_count=account.restart_count + 1,
        total_restarts=account.total_restarts + 1,
        k=account.k + 1,
        window=window.put_in(account.window, record.invocation, begun, RING),
    )
    if overtaken:
        return counted
    return counted._replace(
        last_restart_wall_ms=record.wall_ms,
        failed_at_wall_ms=None,
        failure_reason=None,
        last_due=record.due,
    )


def _settle(account: Account, actions: Sequence[str]) -> Account:
    """Mark decisions of these kinds as done: a person acted, or the worker ran again."""
    rows = [
        row if "|done|" in row or action_of(row) not in actions else with_effect(row, "done")
        for row in account.rows
    ]
    return account._replace(rows=rows)
