"""A job as a document: keys for any path, and what becomes of it when its worker dies."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.config.values import Pool
from nomarr_systemd.core import job, settlement
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.job import (
    LEFT,
    REBOOTED,
    STOPPED,
    CrashPolicy,
    Doc,
    Owner,
    RunEnd,
)
from nomarr_systemd.store.protocol import check_key, encode

RAW = st.binary(min_size=1, max_size=300).filter(lambda raw: b"\0" not in raw)
OWNER = Owner("worker:tag:3", "a" * 32)


@given(RAW)
def test_any_path_survives_json(raw: bytes) -> None:
    path = os.fsdecode(raw)
    doc = job.make_job("tag", path, 1)
    kept = json.loads(encode(doc))
    assert os.fsencode(job.path_of(kept)) == raw
    kept["path"].encode()
    check_key(job.claim_key(doc["_key"]))
    assert doc["_key"] == job.key_of("tag", path)


@given(RAW, RAW)
def test_different_paths_have_different_keys(one: bytes, other: bytes) -> None:
    keys = {job.key_of("tag", os.fsdecode(raw)) for raw in (one, other)}
    assert len(keys) == len({one, other})
    assert job.key_of("tag", os.fsdecode(one)) != job.key_of("art", os.fsdecode(one))


def test_keys_are_readable_and_in_the_order_of_paths() -> None:
    paths = [f"/music/Artist/Album/{n:02d} Song.flac" for n in range(1, 20)]
    keys = [job.key_of("tag", path) for path in paths]
    assert keys[0].startswith("tag:musicartistalbum01songflac:")
    assert keys == sorted(keys)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "x" * 70_000])
def test_what_no_file_system_allows_is_refused(path: str) -> None:
    with pytest.raises(BadName):
        job.make_job("tag", path, 1)
    with pytest.raises(BadName):
        job.make_job("No Pool", "/a", 1)


def death(n: int, cause: str = "killed by signal 9", *, counted: bool = True) -> RunEnd:
    return RunEnd("worker:tag:3", f"{n:032x}", cause, 1000 + n, counted)


def in_hand(n: int, doc: dict[str, object] | None = None) -> dict[str, object]:
    return job.begin(doc or job.make_job("tag", "/a", 1), OWNER._replace(invocation=f"{n:032x}"), n)


def test_a_crash_fails_the_job_and_says_who_and_why() -> None:
    doc = settlement.settle_job(in_hand(1), death(1), "restart-fail-in-flight", 2)
    assert doc["status"] == "error"
    assert doc["error"]["type"] == "WorkerCrashedError"
    assert (doc["error"]["pool"], doc["error"]["worker_index"]) == ("tag", 3)
    assert doc["error"]["cause"] == "killed by signal 9"
    assert job.has_crash(doc, f"{1:032x}")
    assert not job.has_crash(doc, f"{2:032x}")


@pytest.mark.parametrize("policy", ["restart-fail-in-flight", "restart-requeue-in-flight"])
def test_the_second_death_quarantines_whatever_the_policy(policy: CrashPolicy) -> None:
    doc = job.requeue(settlement.settle_job(in_hand(1), death(1), policy, 2), 5)
    doc = settlement.settle_job(in_hand(2, doc), death(2), policy, 2)
    assert doc["status"] == "quarantined"
    assert [each.invocation for each in job.crashes_of(doc)] == [f"{n:032x}" for n in (1, 2)]
    # Released, it has its lives again, and what was is still on record.
    doc = job.release(doc, 9)
    assert doc["status"] == "pending"
    assert job.crashes_of(doc) == []
    assert len(doc["crashes"]) == 2
    doc = settlement.settle_job(in_hand(3, doc), death(3), policy, 2)
    assert doc["status"] != "quarantined"


@pytest.mark.parametrize("cause", [STOPPED, REBOOTED, LEFT])
def test_a_stop_and_a_reboot_are_not_held_against_a_job(cause: str) -> None:
    doc = settlement.settle_job(
        in_hand(1), death(1, cause, counted=False), "restart-fail-in-flight", 1
    )
    assert doc["status"] == "error"
    assert job.crashes_of(doc) == []
    doc = settlement.settle_job(
        in_hand(1), death(1, cause, counted=False), "restart-requeue-in-flight", 1
    )
    assert doc["status"] == "pending"


def test_crashes_are_bounded_and_forgiveness_moves_with_them() -> None:
    doc = job.make_job("tag", "/a", 1)
    for n in range(60):
        doc = settlement.settle_job(in_hand(n, doc), death(n), "restart-requeue-in-flight", 2)
        if doc["status"] == "quarantined":
            assert len(job.crashes_of(doc)) == 2
            doc = job.release(doc, n)
    assert len(doc["crashes"]) == settlement.MAX_CRASHES


def test_an_error_of_any_text_can_be_kept() -> None:
    for text in ("\ud800 \x1b[31m", "x" * 10_000, ""):
        kept = job.describe_error(RuntimeError(text))
        json.dumps(kept, ensure_ascii=False).encode()
        assert 0 < len(kept["message"]) <= 2000


BOOKS: Doc = {"_key": "pool:tag", "crashes": 0, "failed": None, "records": []}
runs = st.integers(0, 5)


@given(
    st.lists(st.tuples(runs, st.booleans(), st.sampled_from(["killed", STOPPED, LEFT]))),
    st.sampled_from(["restart-fail-in-flight", "restart-requeue-in-flight", "fail-pool"]),
    st.sampled_from([None, 0, 2]),
)
def test_a_settlement_can_be_repeated(
    ends: list[tuple[int, bool, str]], policy: CrashPolicy, limit: int | None
) -> None:
    """Whatever ended before: the same call again changes nothing, and gives the same outcome;
    also if only the jobs of the first call were written."""
    pool = Pool("tag", crash_policy=policy, crash_max_retries=limit, job_max_crashes=2)
    books, doc = BOOKS, job.make_job("tag", "/a", 1)
    counted = set()
    for n, blamed, cause in ends:
        if doc["status"] == "pending":
            doc = in_hand(n, doc)
        end = death(n, cause, counted=blamed)
        changed, after, outcome = settlement.settle(books, [doc], end, pool)
        written = changed[0] if changed else doc
        if blamed:  # an uncounted end leaves no trace in the job
            again, cut, same = settlement.settle(books, [written], end, pool)
            assert (again, cut, same) == ([], after, outcome)
            counted.add(n)
        again, still, same = settlement.settle(after, [written], end, pool)
        assert (again, same) == ([], outcome)
        assert still["records"] == after["records"]
        books, doc = after, written
        assert json.loads(json.dumps(books)) == json.loads(
            json.dumps(still | {"crashes": books["crashes"]})
        )
        found = settlement.find_outcome(json.loads(json.dumps(books)), end.invocation)
        assert found == (outcome if outcome.counted or outcome.settled else None)
    assert {each["invocation"] for each in books["records"] if each["counted"]} == {
        f"{n:032x}" for n in counted
    }
    assert books["crashes"] <= len(counted)


def test_crashes_of_a_pool_are_forgotten_when_the_whole_pool_has_stopped() -> None:
    pool = Pool("tag", crash_max_retries=5)
    books = BOOKS | {"crashes": 3}
    end = RunEnd("worker:tag:0", "a" * 32, STOPPED, 1, counted=False)
    assert settlement.settle(books, [], end, pool)[1]["crashes"] == 3
    assert settlement.settle(books, [], end._replace(pool_stopped=True), pool)[1]["crashes"] == 0
