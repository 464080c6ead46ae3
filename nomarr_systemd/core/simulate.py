"""What another policy would have decided about the failures on record, and what that would have
cost: the records of an account, replayed. And what the present policy would do next.

The replay assumes that every run fails after the same time as on record. A restart that comes later
or sooner shifts what follows, up to the next act of a person, whose time is fixed. After a mask
nothing runs until that act, so the failures on record in between do not happen. Where the record
has a mask and the other policy a restart, no run shows what would have followed: the time from
that restart to the act is unknown, neither up nor down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ledger_record import DECISIONS, PERSONAL, Record
from nomarr_systemd.core.policy import Decision, Rules, decide
from nomarr_systemd.core.time import Moment, age_ms

NOT_RUN: Final = "not-run"  # instead of a decision: masked by then
_AHEAD: Final = 100  # decisions looked ahead; also the most restarts that a window may allow


class Step(NamedTuple):
    """One death on record: what was decided, and what would have been. A delay for a mask or for
    what did not run is 0; ``down_ms`` is how long the worker was, or would have been, down."""

    record: Record
    down_ms: int
    action: str
    delay_ms: int
    reason: str
    would_be_down_ms: int
    unknown_ms: int = 0  # a run that is not on record: nothing says how it would have gone


class Sum(NamedTuple):
    """Totals of one policy."""

    restarts: int
    masks: int
    not_run: int
    down_ms: int
    unknown_ms: int = 0


class Simulation(NamedTuple):
    """Both policies compared. ``whole``: the record goes back to the first failure ever."""

    steps: tuple[Step, ...]
    recorded: Sum
    simulated: Sum
    whole: bool


class Ahead(NamedTuple):
    """One failure to come, if the worker died at once each time."""

    decision: Decision
    at_ms: int  # from now


def simulate(account: Account, rules: Rules, now: Moment, *, since_wall_ms: int = 0) -> Simulation:
    """Replay the deaths on record since then under ``rules``."""
    records = _choose_records(account)
    begin = next((n for n, each in enumerate(records) if each.wall_ms >= since_wall_ms), None)
    if begin is None:
        return Simulation((), Sum(0, 0, 0, 0), Sum(0, 0, 0, 0), True)
    replay = _Replay(_before(account, records), rules)
    for record in records[:begin]:
        replay.keep(record)
    replay.settle()
    steps = []
    acts = _find_acts(records, now)
    for record, act in zip(records[begin:], acts[begin:], strict=True):
        if record.action not in DECISIONS or not record.kind:
            replay.keep(record)
            continue
        down_ms = _down(record.action, record.delay_ms, record.moment, act)
        moved = record.moment.later(replay.shift_ms)
        action, delay_ms, reason = replay.take(record)
        would_ms = _down(action, delay_ms, moved, act)
        unknown_ms = 0
        if (record.action, action) == ("fail", "restart"):
            unknown_ms = age_ms(moved, act) - would_ms
        steps.append(Step(record, down_ms, action, delay_ms, reason, would_ms, unknown_ms))
    return Simulation(
        tuple(steps),
        _add_up([(step.record.action, step.down_ms) for step in steps]),
        _add_up([(step.action, step.would_be_down_ms) for step in steps])._replace(
            unknown_ms=sum(step.unknown_ms for step in steps)
        ),
        records[0].attempt == 1,
    )


def look_ahead(account: Account, rules: Rules, now: Moment) -> list[Ahead]:
    """Return the decisions about the next failures if the worker died as soon as it ran, up to the
    mask or _AHEAD decisions. Without jitter, which comes from ids that are not known yet."""
    rules = rules._replace(backoff_jitter=0.0)
    found: list[Ahead] = []
    moment = now
    for number in range(_AHEAD):
        death = Death(account.component_id, f"{number:032x}", code=1)
        history = book_keeping.history_of(account, moment)
        decision = decide(history, death, rules, moment)
        found.append(Ahead(decision, moment.boottime_ms - now.boottime_ms))
        if decision.action != "restart":
            break
        account, _ = book_keeping.book(account, death, decision, rules, moment)
        moment = moment.later(decision.delay_ms)
    return found


def window_ages(account: Account, now: Moment) -> list[tuple[int, str]]:
    """Return the age of each counted restart, youngest last, and the run that died before it."""
    found = []
    for boot_id, row in account.window.items():
        for invocation, wall_ms, boottime_ms in zip(row[0::3], row[1::3], row[2::3], strict=True):
            age = age_ms(Moment(wall_ms, boot_id, boottime_ms), now)
            found.append((age, str(invocation)))
    return sorted(found, reverse=True)


class _Replay:
    """An account as it would be under other rules, and the shift of its time from the record's."""

    def __init__(self, account: Account, rules: Rules) -> None:
        self._account = account
        self._rules = rules
        self.shift_ms = 0
        self._masked = False
        self._held = False  # its hold ended at a time that is not on record

    def settle(self) -> None:
        """Begin the replay: a worker that is masked now is masked in both."""
        self._masked = self._account.failed_at_wall_ms is not None

    def keep(self, record: Record) -> None:
        """Apply a record unchanged: an act of a person, a refund, or one from before the replay
        begins."""
        at = record.moment
        account = self._account
        if record.action == "reset":
            self._account = book_keeping.reset(account, at, record.by)
        elif record.action in PERSONAL:
            self._account = book_keeping.note(account, record.action, at, record.by)
            if record.action != "pause":
                self._account = self._account._replace(failed_at_wall_ms=None)
        elif record.action == "refund":
            moved = at.later(self.shift_ms)
            self._account, _ = book_keeping.refund(account, record.invocation, moved, record.text)
            return
        elif not record.kind and record.action == "fail":
            self._account = book_keeping.mark_failed(account, record.text, at)
            self._masked = True
            return
        elif not record.kind and record.action == "restart":
            self._account = book_keeping.increment(account, at)
            return
        elif record.kind and record.action in DECISIONS:
            death = record.death(self._account.component_id)
            self._wake(record)
            self._account, _ = book_keeping.book(
                self._account, death, record.decision, self._rules, at
            )
            return
        self.shift_ms = 0
        self._masked = self._masked and record.action not in ("reset", "manual")

    def take(self, record: Record) -> tuple[str, int, str]:
        """Decide again about a death on record."""
        if self._masked:
            return NOT_RUN, 0, "masked by then"
        self._wake(record)
        at = record.moment.later(self.shift_ms)
        death = record.death(self._account.component_id)
        decision = record.decision
        if not _is_given(record):
            decision = decide(book_keeping.history_of(self._account, at), death, self._rules, at)
        self._held = record.action == "hold"
        self._account, _ = book_keeping.book(self._account, death, decision, self._rules, at)
        self._masked = decision.action == "fail"
        if decision.action == record.action == "restart":
            self.shift_ms += decision.delay_ms - record.delay_ms
        return decision.action, decision.delay_ms, decision.reason

    def _wake(self, record: Record) -> None:
        """Note that the run that ends with this record began when its hold ended."""
        if self._held and record.run_ms is not None:
            began = record.moment.later(self.shift_ms - record.run_ms)
            self._account = self._account._replace(last_due=began)
        self._held = False


def _is_given(record: Record) -> bool:
    """Return True if circumstances decided, not the policy: an excuse, or a store that was away."""
    if record.action in ("hold", "ignore"):
        return True
    return record.action == "restart" and record.next_available_ms is None


def _before(account: Account, records: Sequence[Record]) -> Account:
    """Return the account as it was before the first record that is still kept."""
    first = records[0]
    known = {record.invocation for record in records}
    window: dict[str, list[object]] = {}
    for boot_id, row in account.window.items():
        for place in range(0, len(row), 3):
            if row[place] not in known:
                window.setdefault(boot_id, []).extend(row[place : place + 3])
    return Account(
        account.component_id,
        restart_count=first.lifetime_used,
        k=first.k,
        window=window,
        attempts=first.attempt - 1,
    )


def _choose_records(account: Account) -> list[Record]:
    """Return the records of the account as far back as none is missing."""
    records = account.records
    for place in range(len(records) - 1, 0, -1):
        if records[place].attempt != records[place - 1].attempt + 1:
            return records[place:]
    return records


def _find_acts(records: Sequence[Record], now: Moment) -> list[Moment]:
    """Return for each record when a person next started the worker, which ends any wait; else
    now."""
    acts = []
    act = now
    for record in reversed(records):
        acts.append(act)
        if record.action in ("reset", "manual", "resume"):
            act = record.moment
    return acts[::-1]


def _down(action: str, delay_ms: int, died: Moment, act: Moment) -> int:
    """Return how long the worker is down after a death."""
    if action == "fail":
        return age_ms(died, act)
    return min(delay_ms, age_ms(died, act)) if action == "restart" else 0


def _add_up(outcomes: Sequence[tuple[str, int]]) -> Sum:
    actions = [action for action, _ in outcomes]
    return Sum(
        actions.count("restart"),
        actions.count("fail"),
        actions.count(NOT_RUN),
        sum(down_ms for _, down_ms in outcomes),
    )
