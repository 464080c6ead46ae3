"""The stand-in refuses what ArangoDB refuses: plain HTTP against the documented answers.

Each docstring names the page it follows, under https://docs.arango.ai/arangodb/3.12/. With
NOMARR_TEST_ARANGO_URL set, the same is asked of that server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.arango_standin.running import Reply, Server

Call = Callable[..., Reply]


@pytest.fixture
def api(arango_server: Server, database: str) -> Call:
    """Requests to a fresh database with a collection ``things``."""
    made = arango_server.call("POST", "/_api/database", {"name": database})
    assert (made.status, made.body["result"]) == (201, True)

    def call(method: str, path: str, *args: Any, **more: Any) -> Reply:
        return arango_server.call(method, f"/_db/{database}/_api/{path}", *args, **more)

    assert call("POST", "collection", {"name": "things"}).status == 200
    return call


def refused(reply: Reply) -> tuple[int, int | None]:
    assert reply.body["error"] is True
    assert reply.body["code"] == reply.status
    assert reply.body["errorMessage"]
    return reply.status, reply.number


class TestServer:
    @pytest.mark.parametrize(("user", "password"), [("root", "wrong"), ("nobody", ""), ("", "")])
    def test_bad_credentials(self, arango_server: Server, user: str, password: str) -> None:
        """develop/http-api/authentication/ and develop/error-codes/"""
        stranger = arango_server._replace(user=user, password=password)
        reply = stranger.call("GET", "/_api/version")
        assert refused(reply) == (401, 11)
        assert "www-authenticate" in reply.headers

    def test_no_credentials(self, arango_server: Server) -> None:
        """develop/http-api/authentication/"""
        reply = arango_server.call("GET", "/_api/version", headers={"Authorization": ""})
        assert reply.status == 401

    def test_version(self, arango_server: Server) -> None:
        """develop/http-api/administration/"""
        assert arango_server.call("GET", "/_api/version").body["server"] == "arango"

    def test_unknown_path(self, api: Call) -> None:
        """develop/error-codes/ (ERROR_HTTP_NOT_FOUND)"""
        assert refused(api("GET", "nonsense")) == (404, 404)

    def test_databases(self, arango_server: Server, api: Call, database: str) -> None:
        """develop/http-api/databases/"""
        assert database in arango_server.call("GET", "/_api/database").body["result"]
        assert api("GET", "database/current").body["result"]["name"] == database
        again = arango_server.call("POST", "/_api/database", {"name": database})
        assert refused(again) == (409, 1207)
        assert refused(api("POST", "database", {"name": "other"})) == (403, 1230)
        assert refused(arango_server.call("DELETE", "/_api/database/unheard_of")) == (404, 1228)

    def test_unknown_database(self, arango_server: Server) -> None:
        """develop/http-api/databases/"""
        reply = arango_server.call("GET", "/_db/unheard_of/_api/collection")
        assert refused(reply) == (404, 1228)


class TestCollections:
    def test_create_and_list(self, api: Call) -> None:
        """develop/http-api/collections/"""
        made = api("POST", "collection", {"name": "synced", "waitForSync": True})
        assert made.body["waitForSync"] is True
        assert api("GET", "collection/synced/properties").body["waitForSync"] is True
        assert api("GET", "collection/things/properties").body["waitForSync"] is False
        names = [known["name"] for known in api("GET", "collection").body["result"]]
        assert {"synced", "things"} <= set(names)

    def test_refusals(self, api: Call) -> None:
        """develop/http-api/collections/ and develop/error-codes/"""
        assert refused(api("POST", "collection", {"name": "things"})) == (409, 1207)
        assert refused(api("POST", "collection", {"name": "1 !"})) == (400, 1208)
        assert refused(api("GET", "collection/unheard_of")) == (404, 1203)
        assert refused(api("DELETE", "collection/unheard_of")) == (404, 1203)

    def test_the_same_index_is_made_once(self, api: Call) -> None:
        """develop/http-api/indexes/persistent/"""
        wanted = {"type": "persistent", "fields": ["a", "_key"]}
        first = api("POST", "index?collection=things", wanted)
        again = api("POST", "index?collection=things", wanted)
        assert (first.status, again.status) == (201, 200)
        assert first.body["id"] == again.body["id"]
        listed = api("GET", "index?collection=things").body["indexes"]
        assert [index["fields"] for index in listed] == [["_key"], ["a", "_key"]]

    def test_bad_indexes(self, api: Call) -> None:
        """develop/http-api/indexes/persistent/"""
        wanted = {"type": "persistent", "fields": ["a"]}
        assert refused(api("POST", "index?collection=unheard_of", wanted)) == (404, 1203)
        for fields in ([], ["_id"], "a"):
            bad = api("POST", "index?collection=things", {"type": "persistent", "fields": fields})
            assert refused(bad)[0] == 400


class TestDocuments:
    def test_create(self, api: Call) -> None:
        """develop/http-api/documents/#create-a-document"""
        reply = api("POST", "document/things", {"_key": "a", "_id": "no/no", "_rev": "x", "n": 1})
        assert reply.status == 202
        assert reply.body["_id"] == "things/a"
        assert reply.headers["etag"] == f'"{reply.body["_rev"]}"'
        read = api("GET", "document/things/a")
        assert read.status == 200
        assert read.body == {"_key": "a", "_id": "things/a", "_rev": reply.body["_rev"], "n": 1}
        assert api("POST", "document/things?waitForSync=true", {"_key": "b"}).status == 201
        assert api("POST", "document/things", {}).body["_key"]

    def test_create_is_refused(self, api: Call) -> None:
        """develop/http-api/documents/#create-a-document and concepts/data-structure/documents/"""
        api("POST", "document/things", {"_key": "a"})
        assert refused(api("POST", "document/things", {"_key": "a"})) == (409, 1210)
        assert refused(api("POST", "document/unheard_of", {"_key": "a"})) == (404, 1203)
        for key in ("", "a/b", "a b", "ä", "x" * 255, 7):
            assert refused(api("POST", "document/things", {"_key": key})) == (400, 1221)
        assert refused(api("POST", "document/things", "text")) == (400, 1227)
        assert refused(api("POST", "document/things", b"{no json")) == (400, 600)

    def test_read_is_refused(self, api: Call) -> None:
        """develop/http-api/documents/#get-a-document"""
        assert refused(api("GET", "document/things/a")) == (404, 1202)
        assert refused(api("GET", "document/unheard_of/a")) == (404, 1203)

    def test_replace(self, api: Call) -> None:
        """develop/http-api/documents/#replace-a-document"""
        old = api("POST", "document/things", {"_key": "a", "n": 1}).body["_rev"]
        new = api("PUT", "document/things/a", {"m": 2}, {"If-Match": f'"{old}"'})
        assert new.status == 202
        assert new.body["_oldRev"] == old
        assert new.body["_rev"] != old
        read = api("GET", "document/things/a").body
        assert read == {"_key": "a", "_id": "things/a", "_rev": new.body["_rev"], "m": 2}

    def test_replace_by_a_wrong_revision(self, api: Call) -> None:
        """develop/http-api/documents/#replace-a-document"""
        rev = api("POST", "document/things", {"_key": "a"}).body["_rev"]
        by_header = api("PUT", "document/things/a", {}, {"If-Match": '"_wrong---"'})
        by_body = api("PUT", "document/things/a?ignoreRevs=false", {"_rev": "_wrong---"})
        for reply in (by_header, by_body):
            assert refused(reply) == (412, 1200)
            assert (reply.body["_key"], reply.body["_rev"]) == ("a", rev)
        assert api("PUT", "document/things/a", {"_rev": "_wrong---"}).status == 202
        assert api("PUT", "document/things/a?ignoreRevs=false", {}).status == 202
        assert refused(api("PUT", "document/things/b", {})) == (404, 1202)
        assert refused(api("PUT", "document/unheard_of/b", {})) == (404, 1203)

    def test_remove(self, api: Call) -> None:
        """develop/http-api/documents/#remove-a-document"""
        rev = api("POST", "document/things", {"_key": "a"}).body["_rev"]
        wrong = api("DELETE", "document/things/a", headers={"If-Match": "_wrong---"})
        assert refused(wrong) == (412, 1200)
        gone = api("DELETE", "document/things/a", headers={"If-Match": rev})
        assert (gone.status, gone.body["_rev"]) == (202, rev)
        assert refused(api("DELETE", "document/things/a")) == (404, 1202)
        assert refused(api("DELETE", "document/unheard_of/a")) == (404, 1203)

    def test_a_revision_never_comes_back(self, api: Call) -> None:
        """concepts/data-structure/documents/#document-revisions"""
        seen = set()
        for _ in range(10):
            seen.add(api("POST", "document/things", {"_key": "a"}).body["_rev"])
            seen.add(api("PUT", "document/things/a", {}).body["_rev"])
            api("DELETE", "document/things/a")
        assert len(seen) == 20

    def test_keys_stand_quoted_in_a_path(self, api: Call) -> None:
        """concepts/data-structure/documents/#user-specified-keys"""
        for key, path in {
            "a%41": "a%2541",
            "..": "%2E%2E",
            "x+y": "x%2By",
            "u:0@h": "u:0@h",
        }.items():
            api("POST", "document/things", {"_key": key})
            assert api("GET", f"document/things/{path}").body["_key"] == key

    def test_many_at_once_with_errors_among_the_results(self, api: Call) -> None:
        """develop/http-api/documents/#create-multiple-documents"""
        reply = api("POST", "document/things", [{"_key": "a"}, {"_key": "a"}, {"_key": "b"}])
        assert reply.status == 202
        assert [item.get("errorNum") for item in reply.body] == [None, 1210, None]
        assert reply.headers["x-arango-error-codes"] == "1210:1"

    def test_import(self, api: Call) -> None:
        """develop/http-api/import/"""
        path = "import?collection=things&type=array"
        made = api("POST", path, [{"_key": "a"}, {"_key": "b"}])
        assert made.status == 201
        assert (made.body["created"], made.body["errors"]) == (2, 0)
        partly = api("POST", path, [{"_key": "c"}, {"_key": "a"}])
        assert (partly.body["created"], partly.body["errors"]) == (1, 1)
        whole = api("POST", f"{path}&complete=true", [{"_key": "d"}, {"_key": "a"}])
        assert refused(whole) == (409, 1210)
        assert refused(api("GET", "document/things/d")) == (404, 1202)
        assert refused(api("POST", "import?collection=unheard_of&type=array", [])) == (404, 1203)

    def test_numbers(self, api: Call) -> None:
        """aql/fundamentals/data-types/#numeric-literals"""
        api("POST", "document/things", {"_key": "a", "n": [2**63 - 1, -(2**63), 2**70]})
        exact_high, exact_low, double = api("GET", "document/things/a").body["n"]
        assert (exact_high, exact_low) == (2**63 - 1, -(2**63))
        assert double == pytest.approx(2.0**70)

    def test_nesting(self, api: Call) -> None:
        """aql/fundamentals/limitations/"""
        for depth, status in ((150, 202), (300, 400)):
            body = b'{"n":' + b"[" * depth + b"]" * depth + b"}"
            assert api("POST", "document/things", body).status == status


def run(api: Call, query: str, **bound: Any) -> list[Any]:
    reply = api("POST", "cursor", {"query": query, "bindVars": bound})
    assert reply.status == 201, reply.body
    assert reply.body["hasMore"] is False
    result: list[Any] = reply.body["result"]
    return result


class TestQueries:
    @pytest.fixture(autouse=True)
    def _fill(self, api: Call) -> None:
        values = [None, False, True, -1, 0, 1.5, 2, "", "1", "b", [], [0], {}, {"a": 1}]
        docs = [{"_key": f"k{n:02d}", "n": n, "v": value} for n, value in enumerate(values)]
        api("POST", "document/things", [*docs, {"_key": "k14", "n": 14}])

    def test_a_query_in_batches(self, api: Call) -> None:
        """develop/http-api/queries/aql-queries/#using-a-cursor"""
        wanted = {"query": "FOR d IN things SORT d.n RETURN d.n", "batchSize": 4}
        reply = api("POST", "cursor", wanted)
        assert reply.status == 201
        results, path = reply.body["result"], f"cursor/{reply.body['id']}"
        for method in ("POST", "PUT"):
            assert reply.body["hasMore"] is True
            reply = api(method, path)
            assert reply.status == 200
            results += reply.body["result"]
        results += api("POST", path).body["result"]
        assert results == list(range(15))
        assert refused(api("POST", path)) == (404, 1600)

    def test_a_cursor_is_deleted(self, api: Call) -> None:
        """develop/http-api/queries/aql-queries/#delete-a-cursor"""
        reply = api("POST", "cursor", {"query": "FOR d IN things RETURN 1", "batchSize": 4})
        path = f"cursor/{reply.body['id']}"
        assert api("DELETE", path).status == 202
        assert refused(api("DELETE", path)) == (404, 1600)
        assert refused(api("POST", path)) == (404, 1600)

    @pytest.mark.parametrize(
        ("query", "bound", "status", "number"),
        [
            ("FOR d IN", {}, 400, 1501),
            ("FOR d IN things", {}, 400, 1501),
            ("SELECT * FROM things", {}, 400, 1501),
            ("FOR d IN things RETURN d d", {}, 400, 1501),
            ("FOR d IN things FILTER d.n = 1 RETURN d", {}, 400, 1501),
            ("FOR d IN things FILTER d.n == 01 RETURN d", {}, 400, 1501),
            ("FOR d IN things RETURN NO_SUCH(d)", {}, 400, 1540),
            ("FOR d IN things RETURN IS_NUMBER()", {}, 400, 1541),
            ("FOR d IN things FILTER d.n == @n RETURN d", {}, 400, 1551),
            ("FOR d IN things RETURN d", {"n": 1}, 400, 1552),
            ("FOR d IN @@c RETURN d", {"@c": 7}, 400, 1553),
            ("FOR d IN unheard_of RETURN d", {}, 404, 1203),
            ("FOR d IN @@c RETURN d", {"@c": "unheard_of"}, 404, 1203),
            ("FOR d IN things REMOVE 'unheard_of' IN things", {}, 404, 1202),
        ],
    )
    def test_bad_queries(
        self, api: Call, query: str, bound: dict[str, Any], status: int, number: int
    ) -> None:
        """develop/http-api/queries/aql-queries/, bind-parameters/ and error-codes/"""
        reply = api("POST", "cursor", {"query": query, "bindVars": bound})
        assert refused(reply) == (status, number)
        assert len(run(api, "FOR d IN things RETURN 1")) == 15

    def test_values_are_in_order_of_their_types(self, api: Call) -> None:
        """aql/fundamentals/type-and-value-order/"""
        upwards = run(api, "FOR d IN things SORT d.v, d.n DESC RETURN d.n")
        assert upwards == [14, *range(14)]
        backwards = run(api, "FOR d IN things SORT d.v DESC, d.n ASC RETURN d.n")
        assert backwards == [*range(13, 0, -1), 0, 14]

    @pytest.mark.parametrize(
        ("condition", "found"),
        [
            ("d.v == null", [0, 14]),
            ("d.v != null", list(range(1, 14))),
            ("d.v == 2", [6]),
            ("d.v == '1'", [8]),
            ('d.v == "1"', [8]),
            ("d.v == 1", []),
            ("d.v == true", [2]),
            ("d.v < 0", [0, 1, 2, 3, 14]),
            ("IS_NUMBER(d.v)", [3, 4, 5, 6]),
            ("d.v < 2 AND IS_NUMBER(d.v)", [3, 4, 5]),
            ("d.v >= 1.5 && d.v <= 2", [5, 6]),
            ("d.n == 1 OR d.n == 3", [1, 3]),
            ("NOT (d.n > 0)", [0]),
            ("! d.v", [0, 1, 4, 7, 14]),
            ("d.n IN [1, 2, 99]", [1, 2]),
            ("d.v.a == 1", [13]),
            ("d['v'].a == 1", [13]),
            ("d.`v` == -1", [3]),
            ("d.v == {}", [12]),
        ],
    )
    def test_conditions(self, api: Call, condition: str, found: list[int]) -> None:
        """aql/operators/ and aql/functions/type-check-and-cast/"""
        query = f"FOR d IN things FILTER {condition} SORT d.n RETURN d.n // that is all"
        assert run(api, query) == found

    def test_bind_parameters(self, api: Call) -> None:
        """aql/fundamentals/bind-parameters/"""
        query = "FOR d IN @@c FILTER d.@field == @value LIMIT @most RETURN d._key"
        bound = {"@c": "things", "field": "v", "value": "b", "most": 5}
        assert run(api, query, **bound) == ["k09"]

    def test_limit_and_count(self, api: Call) -> None:
        """aql/high-level-operations/limit/ and aql/high-level-operations/collect/"""
        assert run(api, "for d in things sort d.n limit 2 return d.n") == [0, 1]
        assert run(api, "FOR d IN things SORT d.n LIMIT 2, 3 RETURN d.n") == [2, 3, 4]
        assert run(api, "FOR d IN things LIMIT 0 RETURN d.n") == []
        assert run(api, "FOR d IN things COLLECT WITH COUNT INTO n RETURN n") == [15]

    def test_remove(self, api: Call) -> None:
        """aql/high-level-operations/remove/"""
        query = "FOR d IN things FILTER d.n < 3 REMOVE d IN things"
        reply = api("POST", "cursor", {"query": query})
        assert reply.body["result"] == []
        assert reply.body["extra"]["stats"]["writesExecuted"] == 3
        assert run(api, "FOR d IN things FILTER d.n == 3 REMOVE d IN things RETURN OLD.v") == [-1]
        assert len(run(api, "FOR d IN things RETURN 1")) == 11


class TestUpdate:
    def test_fields_are_set_and_objects_merged_unless_told(self, api: Call) -> None:
        """aql/high-level-operations/update/"""
        docs = [{"_key": str(n), "n": n, "o": {"a": 1, "b": {"c": 1}}} for n in range(3)]
        api("POST", "document/things", docs)
        query = "FOR d IN things FILTER d.n < 2 SORT d.n LIMIT 1 UPDATE d WITH @new IN things"
        new = {"o": {"b": {"d": 2}}, "m": None}
        reply = api("POST", "cursor", {"query": query, "bindVars": {"new": new}})
        assert (reply.status, reply.body["extra"]["stats"]["writesExecuted"]) == (201, 1)
        read = api("GET", "document/things/0").body
        assert (read["o"], read["m"], read["n"]) == ({"a": 1, "b": {"c": 1, "d": 2}}, None, 0)
        query = "FOR d IN things FILTER d.n == 1 UPDATE d WITH @new IN things"
        query += " OPTIONS {mergeObjects: false, waitForSync: true}"
        rev = api("GET", "document/things/1").body["_rev"]
        api("POST", "cursor", {"query": query, "bindVars": {"new": new}})
        read = api("GET", "document/things/1").body
        assert read["o"] == {"b": {"d": 2}}
        assert read["_rev"] != rev
        assert api("GET", "document/things/2").body["o"] == docs[2]["o"]


@pytest.mark.parametrize(
    "option", ["overwriteMode=replace", "overwrite=true", "returnNew=true", "keepNull=true"]
)
def test_what_it_does_not_implement_is_refused(
    running_pair: tuple[Server, Server], option: str
) -> None:
    server, _ = running_pair
    server.fault()
    server.call("POST", "/_api/collection", {"name": "things"})
    assert server.call("POST", f"/_api/document/things?{option}", {}).status == 501
    path = "/_api/import?collection=things&type=array&onDuplicate=update"
    assert server.call("POST", path, [{}]).status == 501


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("collection", {"name": "more", "numberOfShards": 3}),
        ("collection", {"name": "more", "keyOptions": {"type": "autoincrement"}}),
        ("index?collection=things", {"type": "persistent", "fields": ["a"], "storedValues": ["b"]}),
        ("cursor", {"query": "RETURN 1", "options": {"stream": True}}),
        ("cursor", {"query": "RETURN 1", "ttl": 5}),
        ("database", {"name": "more", "users": [{"username": "stranger"}]}),
        ("database", {"name": "more", "options": {"schema": 1}}),
    ],
)
def test_members_that_it_does_not_implement_are_refused(
    running_pair: tuple[Server, Server], path: str, body: dict[str, Any]
) -> None:
    server, _ = running_pair
    server.fault()
    server.call("POST", "/_api/collection", {"name": "things"})
    assert refused(server.call("POST", f"/_api/{path}", body)) == (501, 9)
    query = "FOR d IN things REMOVE d IN things OPTIONS {exclusive: true}"
    assert refused(server.call("POST", "/_api/cursor", {"query": query})) == (400, 9)


def test_rights_come_before_what_is_there(running_pair: tuple[Server, Server]) -> None:
    server, _ = running_pair
    server.fault()
    guest = server._replace(user="guest", password="guest")
    for database in ("nothing", "_system"):
        assert guest.call("GET", f"/_db/{database}/_api/collection").number == 11
    assert server.call("GET", "/_db/nothing/_api/collection").number == 1228
