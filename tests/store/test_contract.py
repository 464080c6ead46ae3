"""What every store promises, whichever engine keeps it: one document, and several handles.

Keys and values are in ``test_contract_values``, queries in ``test_contract_find``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreError
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.protocol import POLICY_LEDGER, Store
from tests.support.capabilities import NOT_HERE
from tests.support.places import own

Opener = Callable[..., Store]


class TestOneDocument:
    def test_what_is_not_there_is_none(self, store: Store) -> None:
        assert store.get("meta", "nothing") is None

    def test_an_inserted_document_comes_back_with_key_and_revision(self, store: Store) -> None:
        rev = store.insert("meta", {"_key": "a", "n": 1})
        assert store.get("meta", "a") == {"_key": "a", "_rev": rev, "n": 1}

    def test_an_insert_on_a_taken_key_changes_nothing(self, store: Store) -> None:
        rev = store.insert("meta", {"_key": "a", "n": 1})
        with pytest.raises(KeyExists):
            store.insert("meta", {"_key": "a", "n": 2})
        assert store.get("meta", "a") == {"_key": "a", "_rev": rev, "n": 1}

    def test_an_insert_takes_no_notice_of_a_revision(self, store: Store) -> None:
        rev = store.insert("meta", {"_key": "a", "_rev": "abc", "_id": "meta/b"})
        assert rev != "abc"
        assert store.get("meta", "a") == {"_key": "a", "_rev": rev}

    def test_replace_swaps_the_whole_document(self, store: Store) -> None:
        old = store.insert("meta", {"_key": "a", "n": 1, "gone": True})
        new = store.replace("meta", {"_key": "a", "_rev": old, "n": 2})
        assert new != old
        assert store.get("meta", "a") == {"_key": "a", "_rev": new, "n": 2}

    def test_a_document_as_it_was_read_can_be_written_back(self, store: Store) -> None:
        store.insert("meta", {"_key": "a", "n": 1})
        doc = store.get("meta", "a")
        assert doc is not None
        doc["n"] = 2
        doc["_rev"] = store.replace("meta", doc)
        assert store.get("meta", "a") == doc

    def test_replace_with_an_old_revision_is_stale(self, store: Store) -> None:
        old = store.insert("meta", {"_key": "a", "n": 1})
        new = store.replace("meta", {"_key": "a", "_rev": old, "n": 2})
        with pytest.raises(StaleRevision):
            store.replace("meta", {"_key": "a", "_rev": old, "n": 3})
        assert store.get("meta", "a") == {"_key": "a", "_rev": new, "n": 2}

    @pytest.mark.parametrize("rev", [None, "", "1", "no revision", "ä", "a\nb", 7])
    def test_what_is_no_revision_is_stale(self, store: Store, rev: Any) -> None:
        store.insert("meta", {"_key": "a", "n": 1})
        with pytest.raises(StaleRevision):
            store.replace("meta", {"_key": "a", "_rev": rev, "n": 2})
        if isinstance(rev, str):
            with pytest.raises(StaleRevision):
                store.delete("meta", "a", rev)
        assert own(store.get("meta", "a")) == {"n": 1}

    def test_replace_without_a_revision_is_stale(self, store: Store) -> None:
        store.insert("meta", {"_key": "a", "n": 1})
        with pytest.raises(StaleRevision):
            store.replace("meta", {"_key": "a", "n": 2})

    def test_replace_of_what_is_gone_is_stale(self, store: Store) -> None:
        rev = store.insert("meta", {"_key": "a"})
        store.delete("meta", "a")
        with pytest.raises(StaleRevision):
            store.replace("meta", {"_key": "a", "_rev": rev})
        assert store.get("meta", "a") is None

    def test_delete_says_whether_there_was_something(self, store: Store) -> None:
        store.insert("meta", {"_key": "a"})
        assert store.delete("meta", "a") is True
        assert store.delete("meta", "a") is False
        assert store.get("meta", "a") is None

    def test_delete_by_revision(self, store: Store) -> None:
        old = store.insert("meta", {"_key": "a"})
        new = store.replace("meta", {"_key": "a", "_rev": old})
        with pytest.raises(StaleRevision):
            store.delete("meta", "a", old)
        assert store.get("meta", "a") is not None
        assert store.delete("meta", "a", new) is True
        assert store.delete("meta", "a", new) is False

    def test_a_revision_never_comes_back(self, store: Store) -> None:
        """Delete and insert of the same content is another document to whoever read the first."""
        seen = set()
        for _ in range(20):
            seen.add(store.insert("meta", {"_key": "a", "n": 1}))
            doc = store.get("meta", "a")
            assert doc is not None
            seen.add(store.replace("meta", doc))
            store.delete("meta", "a")
        assert len(seen) == 40
        store.insert("meta", {"_key": "a", "n": 1})
        for rev in seen:
            with pytest.raises(StaleRevision):
                store.replace("meta", {"_key": "a", "_rev": rev, "n": 2})

    @pytest.mark.parametrize("name", ["unheard_of", 'meta"; DROP TABLE meta', "jobs", ""])
    def test_a_collection_of_another_domain_is_an_error(self, store: Store, name: str) -> None:
        for call in (
            lambda: store.get(name, "a"),
            lambda: store.insert(name, {"_key": "a"}),
            lambda: store.find(name),
            lambda: store.prune(name, "n", 1),
        ):
            with pytest.raises(StoreError):
                call()


class TestHandles:
    def test_closing_twice_and_opening_again(self, open_store: Opener) -> None:
        first = open_store()
        rev = first.insert("meta", {"_key": "a", "n": 1})
        first.close()
        first.close()
        assert open_store().get("meta", "a") == {"_key": "a", "_rev": rev, "n": 1}

    def test_two_handles_see_each_others_writes(self, open_store: Opener) -> None:
        first, second = open_store(), open_store()
        rev = first.insert("meta", {"_key": "a", "n": 1})
        rev = second.replace("meta", {"_key": "a", "_rev": rev, "n": 2})
        assert first.get("meta", "a") == {"_key": "a", "_rev": rev, "n": 2}
        with pytest.raises(KeyExists):
            second.insert("meta", {"_key": "a"})
        assert first.delete("meta", "a") is True
        assert second.find("meta") == []

    def test_what_a_batch_wrote_is_there_after_it(self, open_store: Opener) -> None:
        first, second = open_store(), open_store()
        with first.batch():
            first.insert("meta", {"_key": "a"})
            first.append("job_crashes", [{"n": 1}, {"n": 2}])
            assert first.get("meta", "a") is not None
        assert second.get("meta", "a") is not None
        assert len(second.find("job_crashes")) == 2

    def test_an_exception_comes_out_of_a_batch(self, store: Store) -> None:
        rev = store.insert("meta", {"_key": "a"})
        with pytest.raises(KeyExists), store.batch():
            store.insert("meta", {"_key": "a"})
        with pytest.raises(ZeroDivisionError), store.batch():
            raise ZeroDivisionError
        assert store.get("meta", "a") == {"_key": "a", "_rev": rev}
        store.replace("meta", {"_key": "a", "_rev": rev})

    def test_the_ledger_is_published_after_every_write(
        self, open_store: Opener, tmp_path: Path
    ) -> None:
        public = tmp_path / "public"
        store = open_store(publisher=Publisher(str(public)))
        file = public / "tag-0.json"
        account = {"_key": "worker:tag:0", "host": "", "restart_count": 1}
        rev = store.insert(POLICY_LEDGER, account)
        assert json.loads(file.read_text())["restart_count"] == 1
        store.replace(POLICY_LEDGER, account | {"_rev": rev, "restart_count": 2})
        assert json.loads(file.read_text())["restart_count"] == 2
        file.unlink()
        store.insert("meta", {"_key": "worker:tag:0"})
        assert not file.exists()
        store.publish_all()
        assert json.loads(file.read_text()) == {"host": "", "restart_count": 2}
        store.delete(POLICY_LEDGER, "worker:tag:0")
        assert not file.exists()


class TestMany:
    """Of stores that can hold: several documents in one step of a batch."""

    @pytest.fixture
    def work(self, open_store: Opener) -> Store:
        work = open_store("work")
        if not work.can_hold:
            with pytest.raises(StoreError, match="holds no documents"):
                work.insert_all("jobs", [])
            pytest.skip(f"{NOT_HERE}ArangoDB holds no documents")
        return work

    def test_all_are_written_with_revisions_that_hold(self, work: Store) -> None:
        docs: list[dict[str, Any]] = [
            {"_key": f"k{n}", "pool": "tag", "n": n, "text": "ä\0"} for n in range(5)
        ]
        with work.batch():
            revs = work.insert_all("jobs", docs)
            assert work.insert_all("jobs", []) == []
        held = [doc | {"_rev": rev} for doc, rev in zip(docs, revs, strict=True)]
        assert work.find("jobs") == held
        with work.batch():
            assert work.first("jobs", {"pool": "tag"}, 3) == held[:3]
            revs = work.replace_all("jobs", [doc | {"n": -doc["n"]} for doc in held[:3]])
            assert work.replace_all("jobs", []) == []
        assert [(doc["_rev"], doc["n"]) for doc in work.find("jobs")[:3]] == [
            (rev, -n) for n, rev in enumerate(revs)
        ]
        assert work.find("jobs")[3:] == held[3:]

    def test_one_that_is_taken_or_stale_undoes_the_batch(self, work: Store) -> None:
        rev = work.insert("jobs", {"_key": "b"})
        with pytest.raises(KeyExists), work.batch():
            work.insert_all("jobs", [{"_key": each} for each in "abc"])
        with work.batch():
            revs = work.insert_all("jobs", [{"_key": each} for each in "ac"])
        work.replace("jobs", {"_key": "c", "_rev": revs[1], "n": 1})
        stale = [{"_key": "b", "_rev": rev, "n": 2}, {"_key": "c", "_rev": revs[1], "n": 2}]
        with pytest.raises(StaleRevision), work.batch():
            work.replace_all("jobs", stale)
        assert [doc.get("n") for doc in work.find("jobs")] == [None, None, 1]
