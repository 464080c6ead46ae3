"""The policy against a brute-force model written from the text of docs/policy.md alone.

The model keeps every event that ever happened and works each answer out from the beginning. It
shares no helper with the code: no ring, no window list, no running exponent, no clock arithmetic.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.policy import Decision, Rules
from nomarr_systemd.core.time import Moment
from tests.support.depth import times
from tests.support.moments import death

TEN_YEARS_MS = 10 * 365 * 24 * 3600 * 1000


class Stamp(NamedTuple):
    """The model's own idea of an instant."""

    wall: int
    boot: int
    up: int


class Happening(NamedTuple):
    what: str  # failure, manual, release, reset, refund
    when: Stamp
    invocation: str = ""
    action: str = ""
    delay: int = 0
    cooled: bool = False


def elapsed(then: Stamp, now: Stamp) -> int:
    """Within one boot by the boot's clock, across boots by the wall's; below zero is zero."""
    passed = now.up - then.up if then.boot == now.boot else now.wall - then.wall
    return max(0, passed)


class Model:
    """§9, question by question, over the whole past."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.past: list[Happening] = []

    def since_reset(self) -> list[Happening]:
        start = 0
        for position, event in enumerate(self.past):
            if event.what == "reset":
                start = position + 1
        return self.past[start:]

    def earlier(self, invocation: str) -> Happening | None:
        for event in self.past:
            if event.what == "failure" and event.invocation == invocation:
                return event
        return None

    def restarts(self) -> list[Happening]:
        return [e for e in self.since_reset() if e.what == "failure" and e.action == "restart"]

    def counted(self) -> list[Happening]:
        """The restarts that were not refunded."""
        refunded = {e.invocation for e in self.since_reset() if e.what == "refund"}
        return [e for e in self.restarts() if e.invocation not in refunded]

    def lifetime(self, now: Stamp) -> int:
        """The restarts that count for the lifetime; with lifetime_days only young ones."""
        if self.rules.lifetime_days == 0:
            return len(self.counted())
        young = 0
        for event in self.counted():
            shift = event.delay if event.cooled else 0
            begun = Stamp(event.when.wall + shift, event.when.boot, event.when.up + shift)
            young += elapsed(begun, now) < self.rules.lifetime_days * 24 * 3600 * 1000
        return min(young, book.RING)  # more than any limit: the oldest are forgotten

    def in_window(self, now: Stamp) -> list[int]:
        """The ages of the restarts younger than window_s that were not refunded."""
        ages = []
        for event in self.counted():
            shift = event.delay if event.cooled else 0
            begun = Stamp(event.when.wall + shift, event.when.boot, event.when.up + shift)
            age = elapsed(begun, now)
            if age < self.rules.window_s * 1000:
                ages.append(age)
        return ages

    def exponent(self, now: Stamp) -> int:
        """Restarts since the last stable run."""
        count = 0
        begun: Stamp | None = None
        events = [*self.since_reset(), Happening("failure", now)]
        for event in events:
            if event.what in ("manual", "release"):
                begun = event.when
            if event.what != "failure":
                continue
            if begun and elapsed(begun, event.when) >= self.rules.stable_after_s * 1000:
                count = 0
                begun = None
            if event.action == "restart":
                count += 1
                begun = Stamp(
                    event.when.wall + event.delay,
                    event.when.boot,
                    event.when.up + event.delay,
                )
        return count

    def expect(self, failure: Death, now: Stamp) -> tuple[str, int, int]:
        """The action, and the least and the most delay in milliseconds."""
        rules = self.rules
        if failure.stop_asked or failure.shutting_down:
            return "ignore", 0, 0
        if failure.held:
            return "hold", 0, 0
        if failure.code == 75 and failure.supervisor_away:
            return "hold", 0, 0
        if failure.incident:
            return "hold", 0, 0
        if failure.code in rules.never_restart:
            return "fail", 0, 0
        lifetime = self.lifetime(now)
        if rules.max_lifetime_restarts != 0 and lifetime >= rules.max_lifetime_restarts:
            return "fail", 0, 0
        plain = rules.backoff_base_s
        for _ in range(self.exponent(now)):
            plain = min(plain * rules.backoff_multiplier, 1e12)
        least = round(1000 * min(rules.backoff_max_s, plain * (1 - rules.backoff_jitter)))
        most = round(1000 * min(rules.backoff_max_s, plain * (1 + rules.backoff_jitter)))
        ages = self.in_window(now)
        if len(ages) >= rules.max_restarts:
            if rules.on_exhausted == "mask" or rules.max_restarts == 0:
                return "fail", 0, 0
            room = self.wait(ages)
            return "restart", max(least, room), max(most, room)
        return "restart", least, most

    def wait(self, ages: list[int]) -> int:
        """Try every moment at which a restart leaves the window; the first with room it is."""
        window = round(self.rules.window_s * 1000)
        for wait in sorted([0] + [window - age for age in ages]):
            if sum(age + wait < window for age in ages) < self.rules.max_restarts:
                return wait
        raise AssertionError("the window never empties")


some_rules = st.builds(
    Rules,
    max_restarts=st.sampled_from([0, 1, 2, 5, 100]),
    window_s=st.sampled_from([1.0, 60.0, 300.0, 3600.0]),
    max_lifetime_restarts=st.sampled_from([0, 1, 8, 20]),
    lifetime_days=st.sampled_from([0.0, 0.0, 0.01, 0.0625, 30.0]),
    backoff_base_s=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    backoff_multiplier=st.sampled_from([1.0, 1.5, 2.0, 10.0]),
    backoff_max_s=st.sampled_from([30.0, 60.0, 600.0]),
    backoff_jitter=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    stable_after_s=st.sampled_from([0.0, 60.0, 600.0]),
    on_exhausted=st.sampled_from(["mask", "cooldown"]),
    never_restart=st.sampled_from([(), (78,), (1, 78)]),
)
codes = st.sampled_from([1, 1, 1, 0, -11, -2, -1, 70, 75, 78])
waits = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([1000, 60_000, 299_999, 300_000, 300_001, 599_999, 600_000, 601_000]),
    st.integers(0, 2 * 3600 * 1000),
)


class PolicyMachine(RuleBasedStateMachine):
    """Failures, waits, reboots, clock jumps, resets, duplicates, manual restarts, in any order."""

    @initialize(rules=some_rules)
    def begin(self, rules: Rules) -> None:
        self.policy = rules
        self.model = Model(rules)
        self.account = Account("worker:tag:0")
        self.now = Stamp(1_700_000_000_000, 0, 5000)
        self.runs = 0
        self.latest = ""

    def moment(self) -> Moment:
        return Moment(self.now.wall, f"{self.now.boot:032x}", self.now.up)

    def new_run(self) -> str:
        self.runs += 1
        return f"{self.runs:032x}"

    def persist(self, account: Account) -> None:
        """Every step goes through the document: nothing may live in memory only."""
        self.account = book.from_doc(json.loads(json.dumps(book.to_doc(account))))

    def fail(self, failure: Death) -> None:
        action, least, most = self.model.expect(failure, self.now)
        ages = self.model.in_window(self.now)
        lifetime, k = self.model.lifetime(self.now), self.model.exponent(self.now)
        account, record = book.record_failure(self.account, failure, self.policy, self.moment())
        assert (record.action, record.decision.action) == (action, action)
        assert least <= record.delay_ms <= most
        seen = min(len(ages), book.RING)  # more than any limit: the window forgets the oldest
        assert (record.window_used, record.lifetime_used, record.k) == (seen, lifetime, k)
        self.check_next_available(failure, record.decision, ages, lifetime)
        self.persist(account)
        cooled = action == "restart" and len(ages) >= self.policy.max_restarts
        self.model.past.append(
            Happening("failure", self.now, failure.invocation, action, record.delay_ms, cooled)
        )
        self.latest = failure.invocation

    def check_next_available(
        self, failure: Death, decision: Decision, ages: list[int], lifetime: int
    ) -> None:
        limit = self.policy.max_lifetime_restarts
        hopeless = self.policy.max_restarts == 0 or failure.code in self.policy.never_restart
        if hopeless or (limit != 0 and lifetime >= limit):
            assert decision.evidence.next_available_ms is None
        else:
            assert decision.evidence.next_available_ms == self.model.wait(ages)

    @rule(code=codes)
    def crash(self, code: int) -> None:
        self.fail(death(self.new_run(), code=code))

    @rule(times=st.integers(2, 7), pause=st.sampled_from([0, 1, 1000, 70_000]))
    def crash_loop(self, times: int, pause: int) -> None:
        for _ in range(times):
            self.fail(death(self.new_run(), code=1))
            self.wait(pause)

    @rule(code=codes, excuse=st.sampled_from(["stop", "shutdown", "held", "away", "incident"]))
    def excused(self, code: int, excuse: str) -> None:
        self.fail(
            death(
                self.new_run(),
                code=code,
                stop_asked=excuse == "stop",
                shutting_down=excuse == "shutdown",
                held="paused" if excuse == "held" else "",
                supervisor_away=excuse == "away",
                incident="i1" if excuse == "incident" else "",
            )
        )

    @precondition(lambda self: self.latest)
    @rule()
    def start_job_fails(self) -> None:
        base, _, number = self.latest.partition("#")
        self.fail(death(f"{base}#{int(number or 0) + 1}", kind="start-job"))

    @precondition(lambda self: any(e.what == "failure" for e in self.model.past))
    @rule(data=st.data(), code=codes)
    def duplicate(self, data: st.DataObject, code: int) -> None:
        """Any failure of the ring, reported again under any circumstances."""
        failures = [e for e in self.model.past if e.what == "failure"][-60:]
        event = data.draw(st.sampled_from(failures))
        account, record = book.record_failure(
            self.account, death(event.invocation, code=code), self.policy, self.moment()
        )
        assert account is self.account
        assert (record.action, record.delay_ms) == (event.action, event.delay)

    @rule(ms=waits)
    def wait(self, ms: int) -> None:
        self.now = Stamp(self.now.wall + ms, self.now.boot, self.now.up + ms)

    @rule(down=waits, up=st.integers(0, 20_000))
    def reboot(self, down: int, up: int) -> None:
        self.now = Stamp(self.now.wall + down, self.now.boot + 1, up)

    @rule(by=st.integers(-TEN_YEARS_MS, TEN_YEARS_MS))
    def clock_jumps(self, by: int) -> None:
        self.now = Stamp(max(0, self.now.wall + by), self.now.boot, self.now.up)

    @rule()
    def person_starts_it(self) -> None:
        invocation = self.new_run()
        account, record = book.record_manual(self.account, invocation, self.moment(), "uid 0")
        assert record.reason == "manual"
        self.persist(account)
        self.model.past.append(Happening("manual", self.now, invocation))
        assert all(record.effect == "done" for record in account.records)

    @rule()
    def person_resets_it(self) -> None:
        self.persist(book.reset(self.account, self.moment(), "uid 0"))
        assert all(record.effect == "done" for record in self.account.records)
        self.model.past.append(Happening("reset", self.now))

    @rule()
    def holds_are_released(self) -> None:
        for record in self.account.records:
            if record.action == "hold" and record.effect != "done":
                self.persist(
                    book.set_effect(self.account, record.invocation, "done", self.moment())
                )
                self.model.past.append(Happening("release", self.now, record.invocation))

    @precondition(lambda self: self.model.restarts())
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.model.restarts()[-60:]))
        due = event in self.model.counted()
        account, record = book.refund(self.account, event.invocation, self.moment(), "poison")
        assert (record is not None) == due
        self.persist(account)
        if due:
            self.model.past.append(Happening("refund", self.now, event.invocation))

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "account"):
            return
        assert self.account.restart_count == len(self.model.counted())
        ever = [e for e in self.model.past if e.action == "restart"]
        assert self.account.total_restarts == len(ever)
        stats = book.statistics(self.account, self.policy.window_s, self.moment())
        assert stats.window_restarts == min(len(self.model.in_window(self.now)), book.RING)
        failed = self.account.failed_at_wall_ms is not None
        acts = [e.action or e.what for e in self.model.since_reset()]
        last = [act for act in acts if act in ("fail", "restart", "manual")]
        assert failed == (last[-1:] == ["fail"])


TestPolicyAgainstModel = PolicyMachine.TestCase
TestPolicyAgainstModel.settings = settings(
    max_examples=times(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
