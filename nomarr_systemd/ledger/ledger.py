"""The ledger: every failure, decision and effect of every worker, each exactly once.

One document per worker, changed only by compare-and-swap; whatever is killed in between, a change
is there whole or not at all. What a change means is in ``core.account``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account, Statistics
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.json import JsonError
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Decision, Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock as host_clock
from nomarr_systemd.ledger import documents, past_records
from nomarr_systemd.store.protocol import POLICY_LEDGER, Doc, Store, hosted

T = TypeVar("T")
# Each lost race is another process's success; this many in a row, or for so long, mean a fault.
_TRIES = 1000
_PATIENCE_MS = 10_000
_ROOM = 8 << 20
_ROOM_OF_WORKER = 32 << 10


def room_for(workers: int) -> int:
    """The bytes that a ledger on this host keeps for bookings on a full disk: for about a thousand
    with the longest texts, and to write every account at once, each with all its records."""
    return _ROOM + workers * _ROOM_OF_WORKER


class Booked(NamedTuple):
    """A record, and whether this call made it."""

    record: Record
    fresh: bool


class Ledger:
    """The restart policy's memory. ``host`` tells machines apart that share a store."""

    def __init__(
        self, store: Store, *, clock: Callable[[], Moment] = host_clock.now, host: str = ""
    ) -> None:
        self._store = store
        self._clock = clock
        self._host = host

    # Failures and what is done about them

    def record_failure(
        self, death: Death, rules: Rules, *, at: Moment | None = None, current: bool = True
    ) -> Booked:
        """Decide about a failure and put it on record, once per invocation.

        Called again for the same invocation, by any process and after any crash, it returns
        what was decided the first time.
        """
        now = at or self._clock()
        split_invocation(death.invocation)

        def change(account: Account) -> tuple[Account, Booked]:
            after, record = book_keeping.record_failure(account, death, rules, now, current=current)
            return after, Booked(record, after is not account)

        return self._change(death.component_id, change)

    def book(self, death: Death, decision: Decision, rules: Rules, at: Moment) -> Booked:
        """Put a decision on record that was taken while the store was away, once."""
        split_invocation(death.invocation)

        def change(account: Account) -> tuple[Account, Booked]:
            after, record = book_keeping.book(account, death, decision, rules, at)
            return after, Booked(record, after is not account)

        return self._change(death.component_id, change)

    def set_effect(self, component_id: str, invocation: str, effect: str) -> None:
        """Note that a decision is ``started`` or ``done``."""
        now = self._clock()
        self._change(
            component_id,
            lambda account: (book_keeping.set_effect(account, invocation, effect, now), None),
        )

    def set_effects(self, effects: Sequence[tuple[str, str, str]]) -> None:
        """Note many effects in one commit."""
        if not effects:
            return
        with self._store.batch():
            for effect in effects:
                self.set_effect(*effect)

    def refund(self, component_id: str, invocation: str, why: str) -> Record | None:
        """Refund the restart after this failure; None if it is not counted."""
        now = self._clock()
        return self._change(
            component_id, lambda account: book_keeping.refund(account, invocation, now, why)
        )

    def record_manual(self, component_id: str, invocation: str, by: str) -> Record:
        """Record that a person started this run; never counted."""
        now = self._clock()
        return self._change(
            component_id, lambda account: book_keeping.record_manual(account, invocation, now, by)
        )

    def note(self, component_ids: Iterable[str], action: str, by: str, text: str = "") -> None:
        """Record that a person paused, resumed or restarted these, in one commit."""
        now = self._clock()
        with self._store.batch():
            for component_id in component_ids:
                self._change(
                    component_id,
                    lambda account: (book_keeping.note(account, action, now, by, text), None),
                )

    def reset(self, component_id: str, by: str = "") -> None:
        """Clear count, window, backoff and the mark of failure; the history stays."""
        now = self._clock()
        self._change(component_id, lambda account: (book_keeping.reset(account, now, by), None))

    # Reading

    def account(self, component_id: str) -> Account:
        """Return the worker's account; an empty one if nothing is on record."""
        component = parse_component(component_id).component_id
        doc = self._store.get(POLICY_LEDGER, self._key(component))
        return self._read(doc, component) if doc else Account(component, self._host)

    def accounts(self) -> list[Account]:
        """Return every account of this host."""
        where = {"host": self._host}
        return [self._read(doc) for doc in self._store.find(POLICY_LEDGER, where)]

    def unfinished(self) -> list[tuple[Account, Record]]:
        """Return the decisions that are not done, with their accounts."""
        return [
            (account, record)
            for account in self.accounts()
            for record in account.records
            if record.effect != "done"
        ]

    def statistics(self, component_id: str, window_s: float) -> Statistics:
        return book_keeping.statistics(self.account(component_id), window_s, self._clock())

    # The restart count, the mark of failure, and removal

    def get_restart_state(self, component_id: str) -> tuple[int, int | None]:
        """Return (restart_count, last_restart_wall_ms); (0, None) if there is no account."""
        account = self.account(component_id)
        return account.restart_count, account.last_restart_wall_ms

    def increment_restart_count(self, component_id: str) -> None:
        """Count one restart, now."""
        now = self._clock()
        self._change(component_id, lambda account: (book_keeping.increment(account, now), None))

    def reset_restart_count(self, component_id: str) -> None:
        """The same as ``reset``."""
        self.reset(component_id)

    def mark_failed_permanent(self, component_id: str, failure_reason: str) -> None:
        """Record that the worker failed for good, and why; the count is kept."""
        now = self._clock()
        self._change(
            component_id,
            lambda account: (book_keeping.mark_failed(account, failure_reason, now), None),
        )

    def mark_failed(self, component_id: str, failure_reason: str, invocation: str) -> None:
        """Record that this death fails the worker for good; its unit is still to be masked."""
        now = self._clock()

        def change(account: Account) -> tuple[Account, None]:
            if account.find(invocation, ("fail",)):
                return account, None
            marked = book_keeping.mark_failed(account, failure_reason, now, invocation=invocation)
            return marked, None

        self._change(component_id, change)

    def remove_restart_state(self, component_id: str) -> None:
        """Remove the worker's account, not its records: it was removed from the configuration."""
        component = parse_component(component_id).component_id
        key = self._key(component)
        ends_ms = host_clock.now().boottime_ms + _PATIENCE_MS
        while doc := self._store.get(POLICY_LEDGER, key):
            if host_clock.now().boottime_ms > ends_ms:
                raise StoreUnavailable(f"{POLICY_LEDGER}/{key} cannot be removed")
            rows: Sequence[str] = ()  # none of one that is damaged
            with contextlib.suppress(StoreUnavailable, TypeError, ValueError):
                rows = self._read(doc, component).rows
            try:
                with contextlib.nullcontext() if self._store.in_batch else self._store.batch():
                    if rows:
                        past_records.keep(self._store, component, self._host, rows)
                    self._store.delete(POLICY_LEDGER, key, doc["_rev"])
            except (KeyExists, StaleRevision):
                continue

    def _read(self, doc: Doc, component: str | None = None) -> Account:
        """Make an account of a document. What a server returns is checked first; a store of one
        host is a file that only its owner can write."""
        if not self._host:
            return book_keeping.from_doc(doc)
        try:
            return documents.read_account(doc, component)
        except JsonError as error:
            raise documents.refuse(POLICY_LEDGER, doc["_key"], error) from error

    def _key(self, component_id: str) -> str:
        return hosted(component_id, self._host)

    def _change(self, component_id: str, change: Callable[[Account], tuple[Account, T]]) -> T:
        """Apply ``change`` to the account as it is at the moment of writing."""
        component = parse_component(component_id).component_id
        key = self._key(component)
        ends_ms = None
        for _ in range(_TRIES):
            doc = self._store.get(POLICY_LEDGER, key)
            before = self._read(doc, component) if doc else Account(component, self._host)
            after, result = change(before)
            if after is before:
                return result
            # Fields of a newer version survive an older one's writing.
            new = {**(doc or {"_key": key}), **book_keeping.to_doc(after)}
            try:
                if after.moved:
                    self._move(new, after.moved)
                elif doc:
                    self._store.replace(POLICY_LEDGER, new)
                else:
                    self._store.insert(POLICY_LEDGER, new)
            except (KeyExists, StaleRevision):
                now_ms = host_clock.now().boottime_ms
                ends_ms = ends_ms or now_ms + _PATIENCE_MS
                if now_ms > ends_ms:
                    break
                continue
            return result
        raise StoreUnavailable(f"{POLICY_LEDGER}/{key} changed again and again")

    def _move(self, new: Doc, rows: Sequence[str]) -> None:
        """Write an account and the records that have left its ring, in one commit or, where the
        store has none, the records first: after a kill in between they are in both."""
        with contextlib.nullcontext() if self._store.in_batch else self._store.batch():
            past_records.keep(self._store, new["component_id"], self._host, rows)
            self._store.replace(POLICY_LEDGER, new)
