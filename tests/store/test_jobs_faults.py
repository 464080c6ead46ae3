"""Answers that are lost while a job is taken, ended or settled: it still happens once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from nomarr_systemd.config.values import Pool, StoreSettings
from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.core.job import Owner, RunEnd, key_of
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS, Claims
from nomarr_systemd.jobs.settlement import settle
from nomarr_systemd.jobs.store_source import StoreJobs
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.worker.errors import NotReady
from tests.arango_standin.running import PASSWORD, Server
from tests.support.places import DATABASE

T = TypeVar("T")
INVOCATION = "a" * 32
KINDS = pytest.mark.parametrize("kind", ["drop", "apply-then-drop"])


@pytest.fixture
def settings(first: Server, tmp_path: Path) -> StoreSettings:
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    url = f"arangodb://ledger@127.0.0.1:{first.port}/{DATABASE}"
    return StoreSettings(url, work_user="root", work_password_file=str(secret))


@pytest.fixture
def store(settings: StoreSettings) -> Iterator[Store]:
    store = open_work_store(settings)
    queue.add(store, "tag", ["/a", "/b"], on_page=lambda *_: None)
    yield store
    store.close()


def insist(action: Callable[[], T]) -> T:
    """As the loops of worker and supervisor do."""
    for _ in range(20):
        try:
            return action()
        except (NotReady, StoreUnavailable):
            continue
    raise AssertionError("it never happened")


@KINDS
@pytest.mark.parametrize(
    "match",
    [
        "POST /_db/nomarr/_api/document/worker_claims",
        "PUT /_db/nomarr/_api/document/jobs",
        "GET /_db/nomarr/_api/document/jobs",
        "POST /_db/nomarr/_api/cursor",
        "DELETE /_db/nomarr/_api/document/worker_claims",
    ],
)
def test_a_job_is_taken_and_done_once(
    first: Server, settings: StoreSettings, store: Store, kind: str, match: str
) -> None:
    source = StoreJobs(settings, "worker:tag:0", INVOCATION, gpu_max_age_s=60)
    done: list[str] = []
    armed = -1
    while len(done) < 2:
        if len(done) > armed:  # once for each job
            armed = len(done)
            first.fault(kind=kind, match=match, times=1)
        job = insist(source.discover)
        if job is None:
            break
        try:
            if not source.claim(job):
                continue
        except NotReady:
            continue  # the worker backs off; the next look finds it in our hands
        done.append(job)
        try:
            source.complete(job, None)
        except NotReady:
            continue  # owed
    first.fault()
    assert insist(source.discover) is None  # pays what is owed
    assert sorted(done) == ["/a", "/b"]
    for path in done:
        doc = queue.find(store, "tag", path)
        assert (doc["status"], doc["attempts"]) == ("done", 1)
    assert store.find(CLAIMS) == []
    source.close(lambda _: None)


@KINDS
@pytest.mark.parametrize("match", ["DELETE", "PUT", "POST /_db/nomarr/_api/document/stats", "GET"])
def test_a_death_is_settled_once(
    first: Server, settings: StoreSettings, store: Store, kind: str, match: str
) -> None:
    key = key_of("tag", "/a")
    pool = Pool("tag", crash_policy="restart-requeue-in-flight", job_max_crashes=2)
    for number, invocation in enumerate(("b" * 32, "c" * 32), start=1):
        assert Claims(store, "tag", Owner("worker:tag:0", invocation)).take(key)
        with_fault = open_work_store(settings)
        with_fault.get(queue.JOBS, key)
        first.fault(kind=kind, match=match, times=2)
        outcome = insist(
            lambda store=with_fault, run=invocation: settle(  # type: ignore[misc]
                store, pool, RunEnd("worker:tag:0", run, "killed", 1)
            )[0]
        )
        first.fault()
        with_fault.close()
        doc = queue.find(store, "tag", "/a")
        assert len(doc["crashes"]) == number
        assert store.find(CLAIMS) == []
        assert [each.status for each in outcome.settled] == [doc["status"]]
    assert doc["status"] == "quarantined"
    assert outcome.refund == ("b" * 32, "c" * 32)
