"""A stream of bad files: workers that die of every job they take are slowed down and never masked,
whatever the limits are. The plan, the account and the settlement of jobs are the real ones.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from nomarr_systemd.core import intents as do
from nomarr_systemd.core import job, settlement
from nomarr_systemd.core.job import CrashPolicy, Doc, Outcome, Owner, RunEnd
from nomarr_systemd.core.plan import plan
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.world import Outcome as Answer
from tests.support import model_machine as model
from tests.support.depth import times
from tests.support.model_machine import POOL, Machine, invocation_of, name_of


class Crashing(NamedTuple):
    """The settings of the pool: by default a job is tried until it is quarantined."""

    job_max_crashes: int = 2
    crash_policy: CrashPolicy = "restart-requeue-in-flight"
    crash_max_retries: int | None = None


class Site:
    """Workers that die of every job, and the queue; the supervisor's part of it is ``settle``."""

    def __init__(self, workers: int, files: int, rules: Rules, pool: Crashing) -> None:
        self.machine: Machine = model.make_machine(workers)
        self.rules = rules
        self.pool = pool
        self.jobs = sorted(
            (job.make_job(POOL, f"/bad/{number:04}", 0) for number in range(files)),
            key=lambda doc: str(doc["_key"]),
        )
        self.books: Doc = {"crashes": 0, "failed": None, "records": []}
        self.answers: dict[str, Outcome] = {}
        self.longest_ms = 0

    def take_and_die(self, number: int) -> None:
        """The worker takes the lowest free job and dies of it."""
        each = self.machine.workers[number]
        if each.state == "starting":
            self.machine = model.begin(self.machine, number)
            each = self.machine.workers[number]
        place = next((n for n, doc in enumerate(self.jobs) if doc["status"] == "pending"), None)
        if each.state != "running" or place is None:
            return
        owner = Owner(name_of(number), invocation_of(number, each.run))
        self.jobs[place] = job.begin(self.jobs[place], owner, self.machine.now_ms)
        self.machine = model.die(self.machine, number)

    def ask(self, component_id: str, invocation: str) -> Answer | None:
        """The supervisor's answer; it settles the jobs of the run."""
        if invocation not in self.answers:
            ours = [doc for doc in self.jobs if doc.get("invocation") == invocation]
            end = RunEnd(component_id, invocation, "killed by SIGSEGV", self.machine.now_ms)
            changed, self.books, outcome = settlement.settle(self.books, ours, end, self.pool)
            for doc in changed:
                place = next(n for n, old in enumerate(self.jobs) if old["_key"] == doc["_key"])
                self.jobs[place] = doc
            self.answers[invocation] = outcome
        outcome = self.answers[invocation]
        if not outcome.refund:
            return None
        said = (outcome.quarantined, outcome.refund, False, outcome.failed)
        return Answer(component_id, invocation, *said)

    def control(self) -> None:
        """The controller's loop, as in controller.main."""
        outcomes: tuple[Answer, ...] = ()
        asked = frozenset[str]()
        for _ in range(10):
            world = model.observe(self.machine, self.rules, asked)._replace(outcomes=outcomes)
            intents = plan(world, self.machine.now)
            steps = chain.from_iterable(model.steps_of(intents))
            self.machine = model.carry_out(self.machine, steps, self.rules)
            asked |= model.consulted_in(intents)
            told = [
                self.ask(each.component.component_id, each.death.invocation)
                for each in intents
                if isinstance(each, do.Tell | do.Consult)
            ]
            outcomes = tuple(each for each in told if each is not None)
            for each in intents:
                if isinstance(each, do.Book):
                    self.longest_ms = max(self.longest_ms, each.record.delay_ms)
            if not intents:
                return
        raise AssertionError("the controller does not come to rest")


some_rules = st.builds(
    lambda **given: Rules(**given),
    max_restarts=st.integers(1, 6),
    window_s=st.sampled_from([60.0, 300.0, 100_000.0]),
    max_lifetime_restarts=st.integers(1, 6) | st.just(0),
    backoff_max_s=st.sampled_from([5.0, 60.0]),
    backoff_jitter=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=times(50))
@given(rules=some_rules, crashes=st.integers(1, 3), workers=st.integers(1, 2), data=st.data())
def test_bad_files_mask_no_worker(
    rules: Rules, crashes: int, workers: int, data: st.DataObject
) -> None:
    # A job needs so many deaths before it is known to be bad: they must be allowed.
    least = max(crashes - 1, workers if crashes > 1 else 1)
    most = rules.max_lifetime_restarts and max(rules.max_lifetime_restarts, least)
    rules = rules._replace(max_restarts=max(rules.max_restarts, least), max_lifetime_restarts=most)
    files = data.draw(st.integers(1, 15))
    site = Site(workers, files, rules, Crashing(crashes))
    for _ in range(files * crashes * 6):
        if all(doc["status"] == "quarantined" for doc in site.jobs):
            break
        for number in data.draw(st.permutations(range(workers))):
            site.take_and_die(number)
            if data.draw(st.booleans()):
                site.control()
        site.control()
        site.machine = model.wait(site.machine)
        site.control()
    assert {doc["status"] for doc in site.jobs} == {"quarantined"}
    deaths = 0
    for each in site.machine.workers:
        account: Any = each.account
        assert not each.masked
        assert account.failed_at_wall_ms is None
        assert account.restart_count == 0
        deaths += len(each.deaths)
    assert deaths == files * crashes
    if files * crashes > 10 * workers:
        assert site.longest_ms == rules.backoff_max_s * 1000


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rules=some_rules, workers=st.integers(1, 2), data=st.data())
def test_bad_files_mask_no_worker_by_the_default_policy_either(
    rules: Rules, workers: int, data: st.DataObject
) -> None:
    """Each file is tried once: it fails for the death, and the worker gets its restart back. Only
    deaths without a job in hand are left to count."""
    files = data.draw(st.integers(1, 30))
    site = Site(workers, files, rules, Crashing(crash_policy="restart-fail-in-flight"))
    for _ in range(files * 6):
        if all(doc["status"] == "error" for doc in site.jobs):
            break
        for number in data.draw(st.permutations(range(workers))):
            site.take_and_die(number)
            if data.draw(st.booleans()):
                site.control()
        site.control()
        site.machine = model.wait(site.machine)
        site.control()
    assert {doc["status"] for doc in site.jobs} == {"error"}
    assert sum(len(each.deaths) for each in site.machine.workers) == files
    for each in site.machine.workers:
        account: Any = each.account
        assert not each.masked
        assert not account.restart_count
        assert not account.window
        assert account.k == len(each.deaths)
