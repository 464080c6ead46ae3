"""Every query that the project makes, collected from its code and checked against the indexes of
the collections: by our own rule, and by the planners of SQLite, PostgreSQL and, where there is a
real server, ArangoDB.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nomarr_systemd
from nomarr_systemd.store.arango import queries
from nomarr_systemd.store.postgresql.link import Link
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import DOMAINS, HOSTS, POLICY_LEDGER, Doc, Domain, Equal
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.arango_standin.running import Server
from tests.support.capabilities import NOT_HERE
from tests.support.places import DATABASE, Place
from tests.support.postgres import Postgres

ASKING = ("find", "first", "count", "tally", "prune", "update")
ROOT = Path(nomarr_systemd.__file__).parent
# Queries without an index, and why that is fine.
SMALL = {
    POLICY_LEDGER: "one document per worker, and nearly all of them are wanted",
    "meta": "a document per pool and a few switches",
    "job_crashes": "a thousand per host at the most, counted when one is added",
    HOSTS: "one document per host",
}


class Query(NamedTuple):
    """What is asked of a collection: the fields compared, then the field ordered or cut by."""

    collection: str
    equal: frozenset[str]
    order: str
    is_count: bool = False  # by the values of this field

    def __str__(self) -> str:
        return f"{self.collection} by {' and '.join([*sorted(self.equal), self.order])}"


def find_index(query: Query, indexes: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """An index that begins with the compared fields and goes on with the order."""
    for fields in indexes:
        rest = (*fields, "_key")
        size = len(query.equal)
        if set(rest[:size]) == query.equal and rest[size] == query.order:
            return fields
    return None


def collect() -> Iterator[tuple[str, int, str, str, ast.Call]]:
    """Every call that asks for documents, and whose first argument is a collection."""
    known = {each.name for group in DOMAINS.values() for each in group}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text()
        if module.startswith("store.") or not any(
            f"{method}(" in text for method in (*ASKING, "walk")
        ):
            continue
        tree = _parse(path)
        constants = {**_constants(path), **_imported(path)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            asked, method = node, getattr(node.func, "attr", getattr(node.func, "id", ""))
            if method == "walk":  # store.protocol's function, not a method: the store comes first
                asked = ast.copy_location(ast.Call(node.func, node.args[1:], node.keywords), node)
            elif method not in ASKING:
                continue
            name = _value(asked.args[0], constants) if asked.args else ""
            if name in known:
                yield module, node.lineno, method, name, asked


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _constants(path: Path) -> dict[str, str]:
    found = {}
    for node in _parse(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = str(value.value)
    return found


def _imported(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nomarr_systemd."):
            other = ROOT.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
            if other.exists():
                constants = _constants(other)
                found |= {
                    alias.asname or alias.name: constants[alias.name]
                    for alias in node.names
                    if alias.name in constants
                }
    return found


def _value(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return constants.get(node.id, "") if isinstance(node, ast.Name) else ""


def read_query(method: str, collection: str, call: ast.Call, function: ast.AST) -> Query:
    """The query of one call; ``where`` may be a dict there, or a variable set above it."""
    if method == "prune":
        field = call.args[1]
        assert isinstance(field, ast.Constant)
        if len(call.args) > 3:  # among those with some values: the index that finds them is enough
            among = call.args[3]
            assert isinstance(among, ast.Dict)
            names = {str(key.value) for key in among.keys if isinstance(key, ast.Constant)}
            return Query(collection, frozenset(names), "_key")
        return Query(collection, frozenset(), str(field.value))
    order = next((k.value for k in call.keywords if k.arg == "order"), None)
    assert order is None or isinstance(order, ast.Constant)
    where = call.args[1] if len(call.args) > 1 else None
    if isinstance(where, ast.Name):
        where = next(
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and where.id in ast.unparse(node).split("=")[0]
        )
    if method == "tally":
        order = call.args[2]
        assert isinstance(order, ast.Constant)
    fields = set()
    if where is not None:
        assert isinstance(where, ast.Dict), ast.unparse(where)
        fields = {str(key.value) for key in where.keys if isinstance(key, ast.Constant)}
    name = str(order.value) if order else "_key"
    return Query(collection, frozenset(fields), name, method == "tally")


@functools.cache
def all_queries() -> dict[str, Query]:
    """Where each query is made, and the query."""
    found = {}
    for module, line, method, collection, call in collect():
        tree = _parse((ROOT / Path(*module.split("."))).with_suffix(".py"))
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.lineno <= line <= (node.end_lineno or line)
        ]
        found[f"{module}:{line}"] = read_query(method, collection, call, around[-1])
    return found


def indexed_queries() -> list[Query]:
    found = {query for query in all_queries().values() if query.collection not in SMALL}
    return sorted(found, key=str)


INDEXES = {each.name: each.indexes for group in DOMAINS.values() for each in group}
DOMAIN_OF: dict[str, Domain] = {
    each.name: domain for domain, group in DOMAINS.items() for each in group
}


def test_every_query_has_an_index_or_a_reason() -> None:
    found = all_queries()
    assert len(found) >= 10, "the collector has lost sight of the queries"
    missing = {
        place: query
        for place, query in found.items()
        if find_index(query, INDEXES[query.collection]) is None
        and query.collection not in SMALL
        and (query.equal or query.order != "_key")
    }
    assert missing == {}


def test_every_index_is_asked() -> None:
    asked = {
        (query.collection, find_index(query, INDEXES[query.collection]))
        for query in all_queries().values()
    }
    unused = [
        (name, fields)
        for name, indexes in INDEXES.items()
        for fields in indexes
        if (name, fields) not in asked
    ]
    assert unused == []


@pytest.mark.parametrize("query", indexed_queries(), ids=str)
def test_sqlite_uses_the_index(query: Query, tmp_path: Path) -> None:
    """Not our rule, but the planner's word."""
    seen: list[str] = []
    with closing(SqliteStore(str(tmp_path), DOMAIN_OF[query.collection])) as store:
        where: Equal = dict.fromkeys(query.equal, "x")
        store._file.run(lambda db: db.set_trace_callback(seen.append))
        if query.is_count:
            store.tally(query.collection, where, query.order)
        elif where:
            store.find(query.collection, where, order=query.order, descending=True, limit=1)
        else:
            store.prune(query.collection, query.order, 5)
        asked = next(sql for sql in seen if sql.startswith(("SELECT", "DELETE")))
        plan: list[Doc] = store._file.run(
            lambda db: db.execute(f"EXPLAIN QUERY PLAN {asked}").fetchall()
        )
    assert "USING INDEX" in str(plan), plan
    assert "TEMP B-TREE" not in str(plan), plan


@pytest.mark.parametrize("query", indexed_queries(), ids=str)
def test_postgresql_can_use_the_index(
    query: Query, empty_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its planner, too; on a small table it would rather read all of it."""
    asked: list[tuple[str, Sequence[object]]] = []
    run = Link.run

    def spy(link: Link, what: str, sql: str, values: Sequence[object] = (), **options: Any) -> Any:
        asked.append((sql, values))
        return run(link, what, sql, values, **options)

    monkeypatch.setattr(Link, "run", spy)
    store = Place("", empty_postgres, DATABASE).open(DOMAIN_OF[query.collection])
    assert isinstance(store, PostgresStore)
    with closing(store):
        where: Equal = dict.fromkeys(query.equal, "x")
        if query.is_count:
            store.tally(query.collection, where, query.order)
        elif where or query.order == "_key":
            store.find(query.collection, where, order=query.order, descending=True, limit=1)
        else:
            store.prune(query.collection, query.order, 5)
        forbid = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off"
        sql, values = asked[-1]
        plan = str(store._link.ask(f"{forbid}; EXPLAIN {sql}", values).rows)
    fields = find_index(query, INDEXES[query.collection])
    name = f"{query.collection}_by_{'_'.join(fields)}" if fields else f"{query.collection}_pkey"
    if query.is_count:  # any index by the compared fields serves
        name = f"{query.collection}_by_{'_'.join(sorted(query.equal))}"
    assert f"using {name}" in plan, plan
    assert "Sort" not in plan, plan


def find_faults(plan: dict[str, Any]) -> list[str]:
    """The nodes of an execution plan of ArangoDB that read a whole collection, or sort
    (DOCS aql/execution-and-performance/query-optimization/#list-of-execution-nodes)."""
    bad = ("EnumerateCollectionNode", "SortNode")
    return [node["type"] for node in plan["nodes"] if node["type"] in bad]


def arango_queries() -> Iterator[queries.Query]:
    """What ArangoDB is sent for each of our queries."""
    for query in indexed_queries():
        where: Equal = dict.fromkeys(sorted(query.equal), "x")
        if where:
            order = query.order
            for after in (None, "a"):
                yield queries.find(
                    query.collection, where, order=order, descending=False, limit=1, after=after
                )
            yield queries.count(query.collection, where)
        else:
            yield queries.prune(query.collection, query.order, 5, None)
    pending = {"pool": "x", "status": "pending"}
    yield queries.update("jobs", pending, {"status": "error"})
    yield queries.prune("jobs", "updated_wall_ms", 5, pending)
    yield queries.tally("jobs", {"pool": "x"}, "status")
    yield queries.find_keys(POLICY_LEDGER, ["x"])


def test_arango_reads_by_an_index_and_sorts_nothing(arango_server: Server, database: str) -> None:
    if arango_server.standin:
        pytest.skip(f"{NOT_HERE}only a real ArangoDB server explains (NOMARR_TEST_ARANGO_URL)")
    for domain in DOMAINS:
        with closing(Place("", arango_server, database).open(domain)) as store:
            store.now_ms()  # makes the collections
    for text, bound in arango_queries():
        wanted = {"query": text, "bindVars": bound}
        explained = arango_server.call("POST", f"/_db/{database}/_api/explain", wanted)
        assert explained.status == 200, explained.body
        assert find_faults(explained.body["plan"]) == [], (text, explained.body)


def test_a_plan_that_scans_or_sorts_is_found() -> None:
    """The judge of the test above, on plans in the form of the server's documentation."""
    nodes = [{"type": kind} for kind in ("SingletonNode", "IndexNode", "LimitNode", "ReturnNode")]
    assert find_faults({"nodes": nodes}) == []
    for bad in ("EnumerateCollectionNode", "SortNode"):
        assert find_faults({"nodes": [*nodes, {"type": bad}]}) == [bad]
    assert len(list(arango_queries())) > 10
