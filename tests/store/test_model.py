"""A store and a plain dict are told the same, step by step, and must never differ."""

from __future__ import annotations

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

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.store.protocol import Store
from tests.support.depth import times

COLLECTION = "meta"
KEYS = st.sampled_from(["a", "A", "..", "a%41", "worker:tag:0@host"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_ä", max_size=3), inner),
    max_leaves=6,
)
SMALL = st.sampled_from([None, "", "1", "x", 0, 1, -1])
BODIES = st.fixed_dictionaries(
    {}, optional={"a": SMALL | st.booleans(), "b": SMALL, "limit": VALUES, "any thing": VALUES}
)
WHERES = st.dictionaries(st.sampled_from(["a", "b"]), SMALL, max_size=2)


def matches(doc: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(
        doc.get(field) == value and isinstance(doc.get(field), bool) is False
        for field, value in where.items()
    )


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.model: dict[str, dict[str, Any]] = {}
        self.stale: list[tuple[str, str]] = []
        for doc in store.find(COLLECTION):
            store.delete(COLLECTION, doc["_key"])

    def _keep(self, key: str, rev: str, body: dict[str, Any]) -> None:
        assert rev not in {old for _, old in self.stale}
        self.model[key] = {**body, "_key": key, "_rev": rev}

    def _forget(self, key: str) -> None:
        self.stale.append((key, self.model.pop(key)["_rev"]))

    @rule(key=KEYS, body=BODIES)
    def insert(self, key: str, body: dict[str, Any]) -> None:
        try:
            rev = self.store.insert(COLLECTION, {"_key": key, **body})
        except KeyExists:
            assert key in self.model
        else:
            assert key not in self.model
            self._keep(key, rev, body)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), body=BODIES)
    def replace(self, data: st.DataObject, body: dict[str, Any]) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        rev = self.store.replace(COLLECTION, {"_key": key, "_rev": self.model[key]["_rev"], **body})
        self._forget(key)
        self._keep(key, rev, body)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), body=BODIES)
    def replace_what_is_stale(self, data: st.DataObject, body: dict[str, Any]) -> None:
        key, rev = data.draw(st.sampled_from(self.stale))
        try:
            self.store.replace(COLLECTION, {"_key": key, "_rev": rev, **body})
        except StaleRevision:
            return
        raise AssertionError(f"{rev} of {key} came back")

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(COLLECTION, key) is (key in self.model)
        if key in self.model:
            self._forget(key)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def delete_what_is_stale(self, data: st.DataObject) -> None:
        key, rev = data.draw(st.sampled_from(self.stale))
        try:
            assert self.store.delete(COLLECTION, key, rev) is False
            assert key not in self.model
        except StaleRevision:
            assert key in self.model

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        assert self.store.get(COLLECTION, key) == self.model.get(key)

    @rule(where=WHERES)
    def find(self, where: dict[str, Any]) -> None:
        found = {doc["_key"]: doc for doc in self.store.find(COLLECTION, where)}
        assert found == {key: doc for key, doc in self.model.items() if matches(doc, where)}

    @invariant()
    def everything_is_there(self) -> None:
        found = self.store.find(COLLECTION)
        assert {doc["_key"]: doc for doc in found} == self.model
        assert len(found) == len(self.model)


def test_a_store_is_a_dict_with_revisions(store: Store) -> None:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(store)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=times(30),
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
