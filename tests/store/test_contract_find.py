"""What every store promises about queries: equality by type, order, limits, many documents."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nomarr_systemd.core.errors import BadDocument, StoreError
from nomarr_systemd.store import protocol
from nomarr_systemd.store.arango import queries
from nomarr_systemd.store.postgresql import store as postgresql_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.store.sqlite import store as sqlite_store
from tests.support.places import keys_of, own


class TestFind:
    @pytest.fixture(autouse=True)
    def _fill(self, store: Store) -> None:
        docs: dict[str, dict[str, Any]] = {
            "a": {"job": "x", "n": 3},
            "b": {"job": "y", "n": 1},
            "c": {"job": "x", "n": 2},
            "d": {"job": None, "n": 2},
            "e": {"n": 2, "job": "1"},
            "f": {"job": 1},
            "g": {"job": True},
            "h": {"job": [1]},
            "i": {"n": 1.5},
        }
        for key, doc in docs.items():
            store.insert("job_crashes", {"_key": key, **doc})

    @pytest.mark.parametrize(
        ("where", "keys"),
        [
            (None, "abcdefghi"),
            ({}, "abcdefghi"),
            ({"job": "x"}, "ac"),
            ({"job": "1"}, "e"),
            ({"job": 1}, "f"),
            ({"job": 0}, ""),
            ({"job": "true"}, ""),
            ({"job": "[1]"}, ""),
            ({"job": None}, "di"),
            ({"n": None}, "fgh"),
            ({"unheard_of": None}, "abcdefghi"),
            ({"job": "x", "n": 2}, "c"),
            ({"job": None, "n": 2}, "d"),
            ({"job": "x", "n": 9}, ""),
            ({"n": 2}, "cde"),
            ({"_key": "a"}, "a"),
            ({"_key": "a", "job": "y"}, ""),
            ({"_key": None}, ""),
            ({"job": "' OR 1=1 --"}, ""),
        ],
    )
    def test_by_equality(self, store: Store, where: Any, keys: str) -> None:
        found = store.find("job_crashes", where)
        assert keys_of(found) == list(keys)
        for doc in found:
            assert doc == store.get("job_crashes", doc["_key"])

    def test_in_order_and_by_key_within_the_same(self, store: Store) -> None:
        assert keys_of(store.find("job_crashes", order="n")) == list("fghbicdea")
        backwards = store.find("job_crashes", order="n", descending=True)
        assert keys_of(backwards) == list("aedcibhgf")
        assert keys_of(store.find("job_crashes", {"n": 2}, order="n")) == list("cde")
        assert keys_of(store.find("job_crashes", {"job": "x"}, order="n")) == list("ca")
        assert keys_of(store.find("job_crashes", descending=True)) == list("ihgfedcba")

    def test_within_a_limit(self, store: Store) -> None:
        assert keys_of(store.find("job_crashes", limit=2)) == ["a", "b"]
        assert keys_of(store.find("job_crashes", order="n", descending=True, limit=1)) == ["a"]
        assert store.find("job_crashes", limit=0) == []
        assert len(store.find("job_crashes", limit=1000)) == 9

    @pytest.mark.parametrize("value", [True, False, 1.5, [], {}, b"x"])
    def test_other_values_are_refused(self, store: Store, value: Any) -> None:
        with pytest.raises(BadDocument):
            store.find("job_crashes", {"job": value})

    @pytest.mark.parametrize("field", ["_rev", "_id", "", "a.b", "a'b", "A", "a b", "a`", "a\n"])
    def test_other_fields_are_refused(self, store: Store, field: str) -> None:
        for call in (
            lambda: store.find("job_crashes", {field: 1}),
            lambda: store.find("job_crashes", order=field),
            lambda: store.prune("job_crashes", field, 1),
        ):
            with pytest.raises(BadDocument):
                call()

    def test_fields_named_like_words_of_a_query(self, store: Store) -> None:
        words = ("limit", "filter", "return", "select", "order", "null", "in", "d")
        store.insert("meta", {"_key": "a", **{word: n for n, word in enumerate(words)}})
        for n, word in enumerate(words):
            assert keys_of(store.find("meta", {word: n}, order=word)) == ["a"]

    def test_prune_removes_numbers_below_and_nothing_else(self, store: Store) -> None:
        store.insert("job_crashes", {"_key": "j", "n": "0"})
        store.insert("job_crashes", {"_key": "k", "n": False})
        store.insert("job_crashes", {"_key": "l", "n": -5})
        store.insert("job_crashes", {"_key": "m", "n": [0]})
        assert store.prune("job_crashes", "n", 2) == 3
        assert keys_of(store.find("job_crashes")) == list("acdefghjkm")
        assert store.prune("job_crashes", "n", 2) == 0
        assert store.prune("job_crashes", "job", 2) == 1
        assert store.prune("job_crashes", "_key", 2) == 0


class TestMany:
    def test_append_keeps_the_order(self, store: Store) -> None:
        store.append("job_crashes", [{"n": n} for n in range(50)])
        store.append("job_crashes", [{"n": n} for n in range(50, 60)])
        assert [doc["n"] for doc in store.find("job_crashes")] == list(range(60))

    def test_append_of_nothing(self, store: Store) -> None:
        store.append("job_crashes", [])
        assert store.find("job_crashes") == []

    def test_more_than_one_batch_of_a_cursor(self, store: Store) -> None:
        store.append("job_crashes", [{"job": "x", "wall_ms": n} for n in range(2500)])
        store.append("job_crashes", [{"job": "y"}])
        found = store.find("job_crashes", {"job": "x"}, order="wall_ms", descending=True)
        assert [doc["wall_ms"] for doc in found] == list(range(2499, -1, -1))
        assert len({doc["_rev"] for doc in found}) == 2500
        assert len(store.find("job_crashes", {"job": "x"}, limit=1700)) == 1700
        assert store.prune("job_crashes", "wall_ms", 2400) == 2400
        assert len(store.find("job_crashes")) == 101

    def test_the_other_domain(self, open_store: Callable[..., Store]) -> None:
        work = open_store("work")
        work.append("health_history", [{"component_id": "worker:tag:0", "wall_ms": 1}])
        work.insert("worker_claims", {"_key": "claim_1", "invocation": "f" * 32})
        work.insert("jobs", {"_key": "1", "pool": "tag", "status": "pending"})
        assert len(work.find("jobs", {"pool": "tag", "status": "pending"})) == 1
        assert len(work.find("health_history", {"component_id": "worker:tag:0"})) == 1
        with pytest.raises(StoreError):
            work.get("meta", "a")


def test_a_nul_ends_no_text(store: Store) -> None:
    store.insert("meta", {"_key": "short", "t": "a"})
    store.insert("meta", {"_key": "long", "t": "a\0b"})
    assert keys_of(store.find("meta", {"t": "a"})) == ["short"]
    assert keys_of(store.find("meta", {"t": "a\0b"})) == ["long"]


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_numbers_beyond_64_bits_are_refused(store: Store, number: int) -> None:
    with pytest.raises(BadDocument):
        store.find("meta", {"n": number})
    with pytest.raises(BadDocument):
        store.prune("meta", "n", number)


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\x7f", "ü", "😀", "/", "\u2028", "'", "\x1f"])
def test_any_text_is_found_again(store: Store, text: str) -> None:
    store.insert("meta", {"_key": "a", "t": text})
    store.insert("meta", {"_key": "b", "t": text + text})
    assert keys_of(store.find("meta", {"t": text})) == ["a"]


class TestJobsQueries:
    """What a queue needs: to go on after a key, to count by words, to add what is new."""

    @pytest.fixture
    def work(self, open_store: Callable[..., Store]) -> Store:
        return open_store("work")

    def test_goes_on_after_a_key(self, work: Store) -> None:
        work.add("jobs", [{"_key": key, "pool": "tag", "status": "pending"} for key in "edcba"])
        where = {"pool": "tag", "status": "pending"}
        assert keys_of(work.find("jobs", where, after="b", limit=2)) == ["c", "d"]
        assert keys_of(work.find("jobs", where, after="e")) == []
        assert keys_of(work.find("jobs", after="")) == list("abcde")

    def test_counts_words(self, work: Store) -> None:
        docs: list[dict[str, Any]] = [
            {"_key": "a", "pool": "tag", "status": "done"},
            {"_key": "b", "pool": "tag", "status": "pending"},
            {"_key": "c", "pool": "art", "status": "done"},
            {"_key": "d", "pool": "tag", "status": ["done"]},
            {"_key": "e", "pool": "tag"},
        ]
        work.add("jobs", docs)
        assert work.count("jobs", {"pool": "tag", "status": "done"}) == 1
        assert work.count("jobs", {"pool": "tag"}) == 4
        assert work.count("jobs", {"status": "none"}) == 0
        assert work.count("jobs", {}) == 5
        for odd in ("", "1", '["done"]', 1, None):
            with pytest.raises(BadDocument):
                work.count("jobs", {"status": odd})

    def test_adds_what_is_new(self, work: Store) -> None:
        assert work.add("jobs", []) == 0
        assert work.add("jobs", [{"_key": "a", "n": 1}, {"_key": "b"}, {"_key": "a", "n": 2}]) == 2
        assert work.add("jobs", [{"_key": "a", "n": 3}, {"_key": "c"}]) == 1
        assert [doc.get("n") for doc in work.find("jobs")] == [1, None, None]
        with pytest.raises(BadDocument):
            work.add("jobs", [{"_key": "d"}, {"_key": ""}])
        with pytest.raises(BadDocument):
            work.add("jobs", [{"n": 1}])
        assert work.get("jobs", "d") is None
        with pytest.raises(StoreError):
            work.add("unheard_of", [{"_key": "a"}])

    def test_counts_by_a_field_in_one_question(self, work: Store) -> None:
        statuses = ["done", "done", "pending", None, 7]
        for number, status in enumerate(statuses):
            work.insert("jobs", {"_key": f"{number}", "pool": "tag", "status": status})
        work.insert("jobs", {"_key": "other", "pool": "art", "status": "done"})
        work.insert("jobs", {"_key": "none", "pool": "tag"})
        assert work.tally("jobs", {"pool": "tag"}, "status") == {"done": 2, "pending": 1}
        assert work.tally("jobs", {"pool": "none"}, "status") == {}
        with pytest.raises(BadDocument):
            work.tally("jobs", {"pool": 7}, "status")
        with pytest.raises(BadDocument):
            work.tally("jobs", {"pool": "tag"}, "a.b")

    def test_prunes_among_those_with_values(self, work: Store) -> None:
        for number in range(6):
            status = "done" if number % 2 else "error"
            work.insert("jobs", {"_key": f"{number}", "status": status, "n": number})
        assert work.prune("jobs", "n", 4, {"status": "done"}) == 2
        assert keys_of(work.find("jobs")) == ["0", "2", "4", "5"]
        assert work.prune("jobs", "n", 4, {"status": "none"}) == 0
        with pytest.raises(BadDocument):
            work.prune("jobs", "n", 4, {"status": True})

    def test_updates_all_with_some_values(
        self, work: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By one statement for each portion; what is not named stays as it was, to the letter."""
        texts = {"big": 2**62, "small": 1e-7, "text": 'ä\0\ue000"\\', "inner": {"a": [1.0, None]}}
        there = {"pool": "tag", "status": "pending", "error": {"type": "Old", "more": 1}, **texts}
        work.add("jobs", [{"_key": f"k{n:02d}", **there} for n in range(7)])
        others = [{"pool": "tag", "status": "done"}, {"pool": "rip", "status": "pending"}]
        work.add("jobs", [{"_key": f"z{n}", **each} for n, each in enumerate(others)])
        before = {doc["_key"]: doc for doc in work.find("jobs")}
        fields = {
            "status": "error",
            "error": {"type": "New", "by": "it's \0"},
            "n": 5,
            "none": None,
        }
        for module in (protocol, sqlite_store, postgresql_store, queries):
            monkeypatch.setattr(module, "PORTION", 3)
        assert work.update("jobs", {"pool": "tag", "status": "pending"}, fields) == 7
        after = {doc["_key"]: doc for doc in work.find("jobs")}
        for key, doc in after.items():
            if key.startswith("k"):
                assert own(doc) == there | fields
                assert doc["_rev"] != before[key]["_rev"]
            else:
                assert doc == before[key]
        assert len({doc["_rev"] for doc in after.values()}) == 9
        assert work.update("jobs", {"pool": "tag", "status": "pending"}, fields) == 0
        rev = work.replace("jobs", after["k00"] | {"status": "done"})
        assert (work.get("jobs", "k00") or {})["_rev"] == rev

    def test_an_update_that_would_not_end_is_refused(self, work: Store) -> None:
        for fields in ({"n": 1}, {"status": "pending"}, {}):
            with pytest.raises(BadDocument):
                work.update("jobs", {"pool": "tag", "status": "pending"}, fields)
        with pytest.raises(BadDocument):
            work.update("jobs", {"status": "pending"}, {"status": "x", "a b": 1})

    def test_the_clock(self, work: Store) -> None:
        assert abs(work.now_ms() - time.time() * 1000) < 600_000
