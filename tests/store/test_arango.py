"""What only concerns ArangoDB: its schema, its users and their rights, its limits."""

from __future__ import annotations

import base64
import contextlib
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.store_url import ArangoUrl
from nomarr_systemd.core.errors import (
    BadDocument,
    KeyExists,
    NomarrError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.jobs import queue
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.arango import queries
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.protocol import DOMAINS, POLICY_LEDGER
from tests.arango_standin.running import PASSWORD, Server
from tests.support.places import DATABASE, SECRET, ArangoOpener, Place
from tests.support.racers import begin, run_race


def whole_text(error: NomarrError) -> str:
    chain = "".join(traceback.format_exception(error))
    return f"{chain} {error!r} {error.args} {error.hint}"


class TestSchema:
    def test_collections_and_indexes_are_as_designed(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        open_arango(first).get("meta", "a")
        url = ArangoUrl("root", ((first.host, first.port),), DATABASE, tls=False)
        with contextlib.closing(ArangoStore(url, "work", password=PASSWORD)) as work:
            work.get("jobs", "a")
        api = f"/_db/{DATABASE}/_api"
        synced = {}
        for name, indexes in (*DOMAINS["policy"], *DOMAINS["work"]):
            known = first.call("GET", f"{api}/index?collection={name}").body["indexes"]
            fields = [index["fields"] for index in known]
            assert fields == [["_key"], *([*names, "_key"] for names in indexes)]
            collection = first.call("GET", f"{api}/collection/{name}/properties").body
            synced[name] = collection["waitForSync"]
        assert {name for name, value in synced.items() if not value} == {"health_history"}

    def test_what_is_there_is_not_made_again(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        open_arango(first).get("meta", "a")
        first.fault()
        store = open_arango(first)
        store.get("meta", "a")
        store.get("meta", "b")
        assert not any(seen.startswith("POST") for seen in first.seen())
        assert len(first.seen()) == 2 + len(DOMAINS["policy"])

    @pytest.mark.usefixtures("forks")
    def test_eight_processes_make_it_at_once(self, first: Server) -> None:
        run_race(begin, Place("", first, DATABASE))
        api = f"/_db/{DATABASE}/_api"
        assert len(first.call("GET", f"{api}/collection").body["result"]) == len(DOMAINS["policy"])
        indexes = first.call("GET", f"{api}/index?collection=job_crashes").body["indexes"]
        assert len(indexes) == 2

    def test_a_user_who_may_not_create_the_database_is_told_what_to_do(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first, user="app", password=SECRET)
        with pytest.raises(StoreRefused, match="may not create it") as caught:
            store.get("meta", "a")
        assert f'_createDatabase("{DATABASE}")' in caught.value.hint
        assert f'grantDatabase("app", "{DATABASE}", "rw")' in caught.value.hint
        first.call("POST", "/_api/database", {"name": DATABASE})
        assert store.get("meta", "a") is None

    def test_a_user_without_rights_to_the_database(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        first.call("POST", "/_api/database", {"name": DATABASE})
        with pytest.raises(StoreRefused) as caught:
            open_arango(first, user="guest", password="guest").get("meta", "a")
        assert "grantDatabase" in caught.value.hint

    def test_a_first_use_that_failed_is_made_up_for(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first)
        first.fault(kind="answer", match="/_api/index", times=1)
        with pytest.raises(StoreUnavailable):
            store.insert("meta", {"_key": "a"})
        store.insert("meta", {"_key": "a"})
        indexes = first.call("GET", f"/_db/{DATABASE}/_api/index?collection=job_crashes")
        assert len(indexes.body["indexes"]) == 2


class TestCredentials:
    def test_a_wrong_password_is_refused_and_said_nowhere(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        wrong = "not the right one"
        store = open_arango(first, password=wrong)
        with pytest.raises(StoreRefused) as caught:
            store.get("meta", "a")
        assert "password" in caught.value.hint
        text = whole_text(caught.value) + repr(store)
        assert wrong not in text
        assert base64.b64encode(f"root:{wrong}".encode()).decode() not in text

    @pytest.mark.parametrize("kind", ["drop", "answer", "apply-then-drop"])
    def test_the_password_is_in_no_other_error(
        self, first: Server, open_arango: ArangoOpener, kind: str
    ) -> None:
        store = open_arango(first)
        first.fault(kind=kind)
        with pytest.raises(StoreUnavailable) as caught:
            store.insert("meta", {"_key": "a"})
        assert PASSWORD not in whole_text(caught.value)

    def test_a_password_may_have_any_letters(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        first.call("POST", "/_api/database", {"name": DATABASE})
        assert open_arango(first, user="app", password=SECRET).find("meta") == []

    def test_the_environment_leads_nowhere_else(
        self,
        first: Server,
        open_arango: ArangoOpener,
        refusing: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{refusing}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert open_arango(first).get("meta", "a") is None


class TestLimits:
    @pytest.mark.parametrize("value", [2**63, -(2**63) - 1, [10**30], {"deep": {"n": 2**64}}])
    def test_integers_that_would_be_rounded_are_refused(
        self, first: Server, open_arango: ArangoOpener, value: Any
    ) -> None:
        store = open_arango(first)
        for call in (
            lambda: store.insert("meta", {"_key": "a", "n": value}),
            lambda: store.append("meta", [{"n": value}]),
        ):
            with pytest.raises(BadDocument, match="64 bits"):
                call()
        assert store.find("meta") == []

    def test_integers_in_queries(self, first: Server, open_arango: ArangoOpener) -> None:
        store = open_arango(first)
        with pytest.raises(BadDocument):
            store.find("meta", {"n": 2**63})
        with pytest.raises(BadDocument):
            store.prune("meta", "n", 2**63)

    def test_nesting_that_the_server_would_reject_is_refused(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first)
        value: Any = 0
        for _ in range(189):
            value = [value]
        store.insert("meta", {"_key": "a", "value": value})
        assert (store.get("meta", "a") or {})["value"] == value
        with pytest.raises(BadDocument, match="nested"):
            store.insert("meta", {"_key": "b", "value": [value]})

    def test_a_key_of_dots_is_no_step_in_a_path(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        store = open_arango(first)
        store.get("meta", "..")
        assert first.seen()[-1] == f"GET /_db/{DATABASE}/_api/document/meta/%2E%2E"

    def test_an_append_is_kept_whole_or_not_at_all(
        self, first: Server, open_arango: ArangoOpener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_arango(first)
        store.insert("job_crashes", {"_key": "taken"})
        monkeypatch.setattr(
            sys.modules[ArangoStore.__module__], "new_keys", lambda _: ["free", "taken"]
        )
        with pytest.raises(KeyExists):
            store.append("job_crashes", [{"n": 1}, {"n": 2}])
        assert [doc["_key"] for doc in store.find("job_crashes")] == ["taken"]


class TestReview:
    """What a reading of the server's documentation and source has shown."""

    def test_a_missing_database_may_look_like_a_missing_right(
        self, first: Server, open_arango: ArangoOpener
    ) -> None:
        with pytest.raises(StoreRefused, match="401/11") as caught:
            open_arango(first, user="guest", password="guest").get("meta", "a")
        assert "password" in caught.value.hint
        assert f'_createDatabase("{DATABASE}")' in caught.value.hint
        assert "grantDatabase" in caught.value.hint

    def test_an_order_by_key_is_asked_for_once(
        self, first: Server, open_arango: ArangoOpener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twice, the server's optimizer finds no index for it, and reads all pending jobs."""
        store = open_arango(first)
        store.get("meta", "a")
        asked: list[str] = []
        queries = type(store._db.aql)
        execute = queries.execute

        def spy(self: Any, query: str, **more: Any) -> Any:
            asked.append(query)
            return execute(self, query, **more)

        monkeypatch.setattr(queries, "execute", spy)
        store.find("meta", {"a": 1}, limit=1)
        store.find("meta", {"a": 1}, order="n", descending=True)
        assert "SORT d._key ASC LIMIT" in asked[0]
        assert "SORT d.@order DESC, d._key DESC" in asked[1]

    @pytest.mark.parametrize("number", [1203, 1601, 1655, 1207, 1228])
    def test_a_first_use_is_tried_again_while_the_cluster_agrees(
        self, first: Server, open_arango: ArangoOpener, number: int
    ) -> None:
        store = open_arango(first)
        status = 409 if number == 1207 else 404
        first.fault(kind="answer", match="/_api/index", times=2, status=status, number=number)
        store.insert("meta", {"_key": "a"})
        assert store.get("meta", "a")

    @pytest.mark.parametrize("number", [1203, 1601, 1655])
    def test_what_may_pass_is_away_and_not_refused(
        self, first: Server, open_arango: ArangoOpener, number: int
    ) -> None:
        store = open_arango(first)
        store.get("meta", "a")
        first.fault(kind="answer", match="POST", status=404, number=number)
        with pytest.raises(StoreUnavailable):
            store.insert("meta", {"_key": "a"})

    @pytest.mark.parametrize("status", [200, 404, 502])
    def test_a_proxy_that_does_not_speak_utf8(
        self, first: Server, open_arango: ArangoOpener, status: int
    ) -> None:
        store = open_arango(first)
        store.get("meta", "a")
        first.fault(kind="body", status=status, body="<h1>Passerelle erron\xe9e</h1>\xff\xfe")
        with pytest.raises(NomarrError) as caught:
            store.find("meta")
        assert str(caught.value).isprintable()

    def test_one_question_counts_the_jobs_of_a_pool(self, first: Server) -> None:
        url = ArangoUrl("root", ((first.host, first.port),), DATABASE, tls=False)
        with contextlib.closing(ArangoStore(url, "work", password=PASSWORD)) as work:
            work.get("jobs", "a")
            first.fault()
            assert queue.count(work, "tag")["pending"] == 0
            assert len(first.seen()) == 1
            first.fault()
            assert queue.prune(work, "tag", "done", 0) == 0
            assert len(first.seen()) == 1

    def test_accounts_are_published_by_host_and_many_at_once(
        self, first: Server, open_arango: ArangoOpener, tmp_path: Path
    ) -> None:
        store = open_arango(first, publisher=Publisher(str(tmp_path), host="alpha"))
        store.get("meta", "a")
        accounts = [
            {"_key": f"worker:tag:{n}@{host}", "host": host}
            for host in ("alpha", "beta")
            for n in range(40)
        ]
        first.fault()
        with store.batch():
            for account in accounts[:8]:
                store.insert(POLICY_LEDGER, account)
        kinds = Counter(seen.split()[0] + seen.split("/")[4] for seen in first.seen())
        assert kinds == {"POSTdocument": 8, "POSTcursor": 1}
        assert len(list(tmp_path.glob("*.json"))) == 8
        open_arango(first).add(POLICY_LEDGER, accounts)
        first.fault()
        store.publish_all()
        assert len(list(tmp_path.glob("*.json"))) == 40
        assert not any(seen.startswith("GET") for seen in first.seen())
        assert len(first.seen()) == 40 / 8 + 1  # 8 in an answer, and a last look

    def test_jobs_of_a_pool_that_fails_are_failed_by_one_request(self, first: Server) -> None:
        url = ArangoUrl("root", ((first.host, first.port),), DATABASE, tls=False)
        with contextlib.closing(ArangoStore(url, "work", password=PASSWORD)) as work:
            paths = [f"/{n}" for n in range(700)]
            queue.add(work, "tag", paths, on_page=lambda *_: None)
            first.fault()
            where = {"pool": "tag", "status": "pending"}
            assert work.update(queue.JOBS, where, {"status": "error"}) == 700
            assert len(first.seen()) == 1

    def test_statements_that_write_are_durable_when_answered(self) -> None:
        """Also in a collection that an earlier version made without waitForSync."""
        where = {"status": "pending"}
        for query in (
            queries.update("jobs", where, {"status": "x"}),
            queries.prune("jobs", "n", 5, where),
        ):
            assert "waitForSync: true" in query.text
        assert "waitForSync" not in queries.prune("health_history", "wall_ms", 5, None).text
