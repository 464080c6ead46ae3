"""Jobs and claims beside a plain dict: whatever workers, deaths and operators do, in any order."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core import job
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.job import (
    LEFT,
    REBOOTED,
    STOPPED,
    CrashPolicy,
    Outcome,
    Owner,
    RunEnd,
    Settled,
)
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims, End
from nomarr_systemd.jobs.settlement import clear_pool, failure_of, settle
from nomarr_systemd.store.protocol import Doc, Store
from tests.support.depth import times
from tests.support.places import Place, keys_of

PATHS = ["/a", "/b/ä", "/c\udcff", "/d\n"]
UNCOUNTED = (STOPPED, REBOOTED, LEFT)
CAUSES = ["killed by signal 9", "killed by signal 9", *UNCOUNTED]
_invocations = itertools.count(1)


class Run:
    """One worker's run, as the model sees it: what it has in hand."""

    def __init__(self, store: Store, number: int) -> None:
        self.component_id = f"worker:tag:{number}"
        self.invocation = f"{next(_invocations):032x}"
        self.claims = Claims(store, "tag", Owner(self.component_id, self.invocation))
        self.job: str | None = None  # it may have been failed with its pool meanwhile
        self.rest: list[str] = []  # of its batch, by key

    def has(self, model: dict[str, dict[str, Any]], key: str | None = None) -> bool:
        job = model.get(key or self.job or "")
        return job is not None and (job["status"], job["by"]) == ("running", self.invocation)

    def move_on(self) -> None:
        self.job = self.rest.pop(0) if self.rest else None


class Machine(RuleBasedStateMachine):
    """Every job has one status and one owner at most, in the store as in the model."""

    store: Store  # given by the test

    def __init__(self) -> None:
        super().__init__()
        for collection in (queue.JOBS, CLAIMS, "stats"):
            for doc in self.store.find(collection):
                self.store.delete(collection, doc["_key"])
        self.model: dict[str, dict[str, Any]] = {}
        self.crashes = 0
        self.failed = ""
        self.runs = [Run(self.store, n) for n in range(3)]

    @rule(paths=st.lists(st.sampled_from(PATHS), max_size=5))
    def add(self, paths: list[str]) -> None:
        new = {job.key_of("tag", path) for path in paths} - self.model.keys()
        assert queue.add(self.store, "tag", paths, on_page=lambda *_: None) == (
            len(paths),
            len(new),
        )
        for key in new:
            self.model[key] = {"status": "pending", "by": "", "dead": [], "tries": 0}

    @rule(number=st.integers(0, 2), most=st.sampled_from([1, 1, 2, 3]))
    def take(self, number: int, most: int) -> None:
        run = self.runs[number]
        if run.job is None:
            self._hold_all(run, run.claims.take_batch(most), most)

    def _hold_all(self, run: Run, docs: list[Doc], most: int) -> None:
        """The lowest that are free, in the order of keys."""
        pending = sorted(key for key, job in self.model.items() if job["status"] == "pending")
        assert keys_of(docs) == pending[: most if self.store.can_hold else 1]
        for key in keys_of(docs):
            self._hold(run, key)
        run.job, run.rest = None, keys_of(docs)
        run.move_on()

    @rule(number=st.integers(0, 2), most=st.sampled_from([1, 2]))
    def end_and_take(self, number: int, most: int) -> None:
        run = self.runs[number]
        if run.job is None:
            return
        ours = run.has(self.model)
        rest = [{"_key": key} for key in run.rest]
        is_ours, docs = run.claims.end_and_take(run.job, End("done"), most, rest)
        there = self.model.get(run.job, {"status": "", "by": ""})
        known = (there["status"], there["by"]) == ("done", run.invocation)  # by a call before
        assert is_ours == (ours or known)
        if ours:
            there["status"] = "done"
        while run.rest and not run.has(self.model, run.rest[0]):
            run.rest.pop(0)
        if run.rest:
            assert keys_of(docs) == run.rest
            run.move_on()
        else:
            self._hold_all(run, docs, most)

    @rule(number=st.integers(0, 2))
    def put_back(self, number: int) -> None:
        run = self.runs[number]
        run.claims.put_back(run.rest)
        for key in run.rest:
            if run.has(self.model, key):
                self.model[key]["status"] = "pending"
                self.model[key]["tries"] -= 1
        run.rest = []

    @rule(number=st.integers(0, 2), key=st.sampled_from([job.key_of("tag", p) for p in PATHS]))
    def take_by_key(self, number: int, key: str) -> None:
        """Also what is not there, not free, or ours already, as after a lost answer."""
        run = self.runs[number]
        free = self.model.get(key, {}).get("status") == "pending"
        if run.job not in (None, key):
            return
        doc = run.claims.take(key)
        assert (doc is not None) == (free or run.has(self.model))
        if free:
            self._hold(run, key)

    def _hold(self, run: Run, key: str) -> None:
        run.job = key
        self.model[key] |= {"status": "running", "by": run.invocation}
        self.model[key]["tries"] += 1

    @rule(number=st.integers(0, 2), status=st.sampled_from(["done", "error", "pending"]))
    def end(self, number: int, status: str) -> None:
        run = self.runs[number]
        if run.job is None:
            return
        ended = End(status, error={"type": "X", "message": "x"} if status == "error" else None)
        ours = run.has(self.model)
        # What was failed with its pool stays failed, by whose hand does not matter.
        if not ours and self.model.get(run.job, {}).get("status") == status == "error":
            run.move_on()
            return
        assert run.claims.end(run.job, ended) == ours
        if ours:
            self.model[run.job]["status"] = status
            if status != "pending":
                assert run.claims.end(run.job, ended)  # said again
        run.move_on()

    @rule(
        number=st.integers(0, 2),
        cause=st.sampled_from(CAUSES),
        policy=st.sampled_from(["restart-fail-in-flight", "restart-requeue-in-flight"]),
        limit=st.sampled_from([None, 1, 3]),
        again=st.booleans(),
    )
    def die(
        self, number: int, cause: str, policy: CrashPolicy, limit: int | None, again: bool
    ) -> None:
        run = self.runs[number]
        pool = Pool("tag", crash_policy=policy, crash_max_retries=limit)
        counted = cause not in UNCOUNTED
        is_last = cause == STOPPED and again
        end = RunEnd(run.component_id, run.invocation, cause, 1, counted, is_last)
        assert settle(self.store, pool, end)[0] == self._die(run, end, policy, limit)
        if again and end.counted:
            assert not settle(self.store, pool, end._replace(wall_ms=2))[1]
        elif again and cause == LEFT:
            # It said goodbye, and systemd reports a bad exit status: counted now, jobs untouched.
            end = end._replace(cause="exit status 70", counted=True)
            outcome, _ = settle(self.store, pool, end)
            self.crashes += 1
            assert (outcome.counted, outcome.fail_pool) == (True, self._judge(limit))
            assert settle(self.store, pool, end) == (outcome, False)
        self.runs[number] = Run(self.store, number)

    def _die(self, run: Run, end: RunEnd, policy: str, limit: int | None) -> Outcome:
        settled: list[Settled] = []
        quarantined: tuple[str, ...] = ()
        refund: list[str] = []
        if end.pool_stopped:
            self.crashes = 0
        counted = end.counted
        self.crashes += counted
        hand = [key for key in (run.job, *run.rest) if key and run.has(self.model, key)]
        for key in hand[1:]:
            self.model[key]["status"] = "pending"
            self.model[key]["tries"] -= 1
        if hand:
            run.job = hand[0]
            job = self.model[run.job]
            job["status"] = "pending" if policy == "restart-requeue-in-flight" else "error"
            if counted:
                job["dead"].append(run.invocation)
                if len(job["dead"]) >= 2:
                    job["status"] = "quarantined"
                    quarantined, refund = (run.job,), job["dead"]
            path = self.store.get(queue.JOBS, run.job)
            assert path is not None
            settled = [Settled(run.job, path["path"], job["status"])]
        self.crashes = max(0, self.crashes - len(refund))
        failed = self._judge(limit) if counted and not quarantined else ""
        blamed = tuple(each.job for each in settled if counted and each.status == "error")
        if blamed:  # it is not tried again, so the worker is not to blame
            refund = [run.invocation]
        return Outcome(
            run.component_id,
            run.invocation,
            tuple(settled),
            quarantined,
            tuple(refund),
            failed,
            counted,
            blamed,
        )

    def _judge(self, limit: int | None) -> str:
        if limit is None or self.crashes <= limit:
            return ""
        self.failed = (
            f"{self.crashes} crashes since the last clean stop, and crash_max_retries is {limit}"
        )
        for each in self.model.values():
            if each["status"] in ("pending", "running"):
                each["status"] = "error"
        return self.failed

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self._operate(key, queue.retry, ("error", "done"))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        if self._operate(key, queue.release, ("quarantined",)):
            self.model[key]["dead"] = []

    def _operate(self, key: str, operation: Any, allowed: tuple[str, ...]) -> bool:
        doc = queue.find(self.store, "", key)
        good = self.model[key]["status"] in allowed
        try:
            operation(self.store, doc)
            assert good
        except NomarrError:
            assert not good
        if good:
            self.model[key]["status"] = "pending"
        return good

    @rule(status=st.sampled_from(["done", "error", "quarantined"]))
    def prune(self, status: job.Status) -> None:
        gone = [key for key, job in self.model.items() if job["status"] == status]
        assert queue.prune(self.store, "tag", status, 0) == len(gone)
        for key in gone:
            del self.model[key]

    @precondition(lambda self: self.failed)
    @rule()
    def reset_pool(self) -> None:
        assert failure_of(self.store, "tag") == self.failed
        clear_pool(self.store, "tag")
        self.failed = ""
        self.crashes = 0

    @invariant()
    def agrees(self) -> None:
        docs = {doc["_key"]: doc for doc in self.store.find(queue.JOBS)}
        assert {key: doc["status"] for key, doc in docs.items()} == {
            key: job["status"] for key, job in self.model.items()
        }
        claims = {doc["job"]: doc["invocation"] for doc in self.store.find(CLAIMS)}
        held = {
            key: run.invocation
            for run in self.runs
            for key in (run.job, *run.rest)
            if key and run.has(self.model, key)
        }
        assert {key: doc["attempts"] for key, doc in docs.items()} == {
            key: job["tries"] for key, job in self.model.items()
        }
        assert claims == held
        running = [key for key, job in self.model.items() if job["status"] == "running"]
        assert sorted(claims) == sorted(running)


def test_jobs_and_a_model_never_differ(place: Place) -> None:
    store = place.open("work")
    examples = 60 if place.server is None else 15
    try:
        run_state_machine_as_test(
            type("Given", (Machine,), {"store": store}),
            settings=settings(
                max_examples=times(examples),
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        store.close()
