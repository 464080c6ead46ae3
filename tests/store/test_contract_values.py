"""What every store promises about keys and values: all of JSON comes back, nothing else gets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nomarr_systemd.core.errors import BadDocument
from nomarr_systemd.store.protocol import Store
from tests.support.places import keys_of, own


class TestKeys:
    @pytest.mark.parametrize(
        "key",
        [
            "worker:tag:0@host.example",
            ".",
            "..",
            "%",
            "a%41",
            "a%2Fb",
            "%2e%2e",
            "+",
            "A+b",
            "_",
            "-",
            "(),=;$!*'",
            "k" * 254,
        ],
    )
    def test_every_good_key_names_its_own_document(self, store: Store, key: str) -> None:
        for other in ("aA", "a/b".replace("/", "_"), "A_b"):
            store.insert("meta", {"_key": other, "n": 0})
        rev = store.insert("meta", {"_key": key, "n": 1})
        rev = store.replace("meta", {"_key": key, "_rev": rev, "n": 2})
        assert store.get("meta", key) == {"_key": key, "_rev": rev, "n": 2}
        assert keys_of(store.find("meta", {"_key": key})) == [key]
        assert len(store.find("meta")) == 4
        assert store.delete("meta", key, rev) is True
        assert len(store.find("meta")) == 3

    def test_keys_are_told_apart_by_case(self, store: Store) -> None:
        store.insert("meta", {"_key": "a", "n": 1})
        store.insert("meta", {"_key": "A", "n": 2})
        assert own(store.get("meta", "A")) == {"n": 2}

    @pytest.mark.parametrize(
        "key", ["", "a/b", "a b", "ä", "a\n", "a\0", "k" * 255, "#", "a?b", "[x]", None, 7, b"a"]
    )
    def test_a_bad_key_is_refused(self, store: Store, key: Any) -> None:
        for call in (
            lambda: store.get("meta", key),
            lambda: store.insert("meta", {"_key": key}),
            lambda: store.replace("meta", {"_key": key, "_rev": "abc"}),
            lambda: store.delete("meta", key),
        ):
            with pytest.raises(BadDocument):
                call()
        assert store.find("meta") == []

    def test_a_missing_key_is_refused(self, store: Store) -> None:
        with pytest.raises(BadDocument):
            store.insert("meta", {"n": 1})


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            False,
            0,
            -1,
            2**53 + 1,
            2**63 - 1,
            -(2**63),
            0.1,
            -1.5,
            1e-300,
            1.7976931348623157e308,
            5e-324,
            "",
            "text",
            "🙂 e\u0301 \u05d0\u202e \ud7ff\ue000\U0010ffff",
            "a\0b",
            '"\\/\b\f\n\r\t\x1f\x7f\u2028',
            "long" * 100_000,
            [],
            {},
            [1, "1", True, None, [{}]],
            {"": 1, "_nested": 2, "ä": {"🙂": [None]}, "a.b": 3, "$": 4},
            nested(100),
            nested(189),
        ],
        ids=lambda value: f"{value!r:.20}".encode("ascii", "replace").decode(),
    )
    def test_every_json_value_comes_back_equal(self, store: Store, value: Any) -> None:
        store.insert("meta", {"_key": "a", "value": value})
        back = own(store.get("meta", "a"))["value"]
        assert back == value
        if not isinstance(value, float):
            assert type(back) is type(value)
        assert own(store.find("meta")[0]) == {"value": value}

    def test_names_may_be_any_text_but_start_with_no_underscore(self, store: Store) -> None:
        doc = {"ä": 1, "with space": 2, "🙂": 3, "a.b": 4, "a-b": 5, "9": 6, "limit": 7, "$x": 8}
        store.insert("meta", {"_key": "a", **doc})
        assert own(store.get("meta", "a")) == doc

    def test_a_job_of_four_megabytes(self, open_store: Callable[..., Store]) -> None:
        """The ledger's documents are far smaller, and so is what is read of a server there."""
        store = open_store("work")
        doc = {"rows": [{"n": n, "text": "x" * 90} for n in range(40_000)]}
        store.insert("jobs", {"_key": "a", **doc})
        assert own(store.get("jobs", "a")) == doc

    def test_tuples_and_numbers_for_names_become_what_json_makes_of_them(
        self, store: Store
    ) -> None:
        store.insert("meta", {"_key": "a", "t": (1, 2), "d": {1: "x", "1": "y", None: 0}})
        assert own(store.get("meta", "a")) == {"t": [1, 2], "d": {"1": "y", "null": 0}}

    @pytest.mark.parametrize(
        "value",
        [
            float("nan"),
            float("inf"),
            [-float("inf")],
            "\ud800",
            {"\udfff": 1},
            b"bytes",
            {1, 2},
            object(),
            {(1, 2): 3},
            nested(190),
            nested(5000),
        ],
    )
    def test_what_json_cannot_say_is_refused_and_nothing_written(
        self, store: Store, value: Any
    ) -> None:
        rev = store.insert("meta", {"_key": "there"})
        with pytest.raises(BadDocument):
            store.insert("meta", {"_key": "a", "value": value})
        with pytest.raises(BadDocument):
            store.replace("meta", {"_key": "there", "_rev": rev, "value": value})
        with pytest.raises(BadDocument):
            store.append("meta", [{"fine": 1}, {"value": value}])
        assert store.find("meta") == [{"_key": "there", "_rev": rev}]

    @pytest.mark.parametrize("name", ["_x", "_to", "__", 7, None])
    def test_the_stores_own_names_are_refused(self, store: Store, name: Any) -> None:
        with pytest.raises(BadDocument):
            store.insert("meta", {"_key": "a", name: 1})
        assert store.find("meta") == []

    def test_the_callers_document_is_left_alone(self, store: Store) -> None:
        doc = {"_key": "a", "list": [1]}
        store.insert("meta", doc)
        assert doc == {"_key": "a", "list": [1]}
