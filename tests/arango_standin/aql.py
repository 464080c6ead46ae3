"""A small AQL: a parser by recursive descent that yields the query as nested functions.

DOCS aql/fundamentals/syntax/, aql/fundamentals/bind-parameters/ and
aql/high-level-operations/. What is not understood is a parse error (1501), never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cmp_to_key
from typing import Any, NamedTuple, Protocol

from tests.arango_standin.operators import (
    CLOCK,
    COMPARISONS,
    FUNCTIONS,
    Expression,
    Row,
    attribute,
    both,
    either,
)
from tests.arango_standin.tokens import QueryError, Token, split, unquote
from tests.arango_standin.values import compare, is_true

Operation = Callable[[list[Row], "Documents"], list[Row]]


class Documents(Protocol):
    """What a query reads, changes and removes."""

    def scan(self, collection: str) -> Iterable[Row]: ...

    def update(self, collection: str, key: str, fields: Row, *, merge: bool) -> None: ...

    def remove(self, collection: str, key: str) -> None: ...


class Query(NamedTuple):
    """A parsed query: its operations in turn, and what each row yields in the end."""

    operations: list[Operation]
    result: Expression | None

    def run(self, documents: Documents) -> list[Any]:
        rows: list[Row] = [{}]
        for operation in self.operations:
            rows = operation(rows, documents)
        return [self.result(row) for row in rows] if self.result else []


def parse(text: str, bound: Mapping[str, Any]) -> Query:
    """The query, or QueryError: 1501 syntax, 1540 function, 1551 to 1553 bind parameters."""
    parser = _Parser(split(text), bound)
    query = parser.query()
    undeclared = sorted(set(bound) - parser.used)
    if undeclared:
        raise QueryError(1552, f"bind parameter '{undeclared[0]}' was not declared in the query")
    return query


class _Parser:
    def __init__(self, tokens: list[Token], bound: Mapping[str, Any]) -> None:
        self._tokens = tokens
        self._next = 0
        self._bound = bound
        self._variables: set[str] = set()
        self.used: set[str] = set()
        self._statements: dict[str, Callable[[], Operation]] = {
            "FOR": self._for,
            "FILTER": self._filter,
            "LET": self._let,
            "SORT": self._sort,
            "LIMIT": self._limit,
            "COLLECT": self._collect,
            "REMOVE": self._remove,
            "UPDATE": self._update,
        }

    def query(self) -> Query:
        operations: list[Operation] = []
        modifies = False
        while True:
            word = self._take()
            if word == Token("keyword", "RETURN"):
                result = self._expression()
                self._expect("end", "end of query string")
                return Query(operations, result)
            if word.kind == "end" and modifies:
                return Query(operations, None)
            statement = self._statements.get(word.text) if word.kind == "keyword" else None
            if statement is None:
                raise self._unexpected(word)
            operations.append(statement())
            modifies = modifies or word.text in ("REMOVE", "UPDATE")

    def _for(self) -> Operation:
        variable = self._expect("name")
        self._expect("keyword", "IN")
        if self._peek().kind in ("collection", "name") and self._peek().text not in self._variables:
            collection = self._collection()
            self._declare(variable)
            return lambda rows, documents: [
                {**row, variable: doc} for row in rows for doc in documents.scan(collection)
            ]
        source = self._expression()
        self._declare(variable)
        return lambda rows, _: [{**row, variable: item} for row in rows for item in source(row)]

    def _filter(self) -> Operation:
        condition = self._expression()
        return lambda rows, _: [row for row in rows if is_true(condition(row))]

    def _let(self) -> Operation:
        variable = self._expect("name")
        self._expect("sign", "=")
        value = self._expression()
        self._declare(variable)
        return lambda rows, _: [{**row, variable: value(row)} for row in rows]

    def _sort(self) -> Operation:
        keys: list[tuple[Expression, bool]] = []
        while True:
            value = self._expression()
            descending = self._accept("keyword", "DESC")
            if not descending:
                self._accept("keyword", "ASC")
            keys.append((value, descending))
            if not self._accept("sign", ","):
                break

        def sort(rows: list[Row], _: Documents) -> list[Row]:
            for value, descending in reversed(keys):  # sorted() is stable, so the last key first
                order = cmp_to_key(compare)
                rows = sorted(rows, key=lambda row: order(value(row)), reverse=descending)
            return rows

        return sort

    def _limit(self) -> Operation:
        first = self._count()
        offset, count = (first, self._count()) if self._accept("sign", ",") else (0, first)
        return lambda rows, _: rows[offset : offset + count]

    def _count(self) -> int:
        token = self._peek()
        value = self._primary()({})
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise QueryError(1501, f"the value of LIMIT near '{token.text}' is no count")
        return value

    def _collect(self) -> Operation:
        grouped: tuple[str, Expression] | None = None
        if self._peek().kind == "name":
            name = self._expect("name")
            self._expect("sign", "=")
            grouped = name, self._expression()
        self._expect("keyword", "WITH")
        if self._peek().text.upper() != "COUNT":  # a word of its own only here
            raise self._unexpected(self._peek())
        self._take()
        self._expect("keyword", "INTO")
        variable = self._expect("name")
        self._declare(variable)
        if grouped is None:
            return lambda rows, _: [{variable: len(rows)}]
        value_name, value = grouped
        self._declare(value_name)

        def count(rows: list[Row], _: Documents) -> list[Row]:
            found: dict[str, tuple[Any, int]] = {}
            for row in rows:
                each = value(row)
                known = json.dumps(each, sort_keys=True)
                found[known] = each, found.get(known, (None, 0))[1] + 1
            return [{value_name: each, variable: number} for each, number in found.values()]

        return count

    def _remove(self) -> Operation:
        target = self._operand()  # not a whole expression, which the IN would belong to
        self._expect("keyword", "IN")
        collection = self._collection()
        self._options("waitForSync")
        self._declare("OLD")

        def remove(rows: list[Row], documents: Documents) -> list[Row]:
            removed = []
            for row in rows:
                old = target(row)
                key = old if isinstance(old, str) else (old or {}).get("_key")
                documents.remove(collection, str(key))
                removed.append({**row, "OLD": old})
            return removed

        return remove

    def _update(self) -> Operation:
        """DOCS aql/high-level-operations/update/, of the form UPDATE document WITH fields IN."""
        target = self._operand()
        self._expect("keyword", "WITH")
        fields = self._operand()
        self._expect("keyword", "IN")
        collection = self._collection()
        merge = self._options("waitForSync", "mergeObjects").get("mergeObjects", True)

        def update(rows: list[Row], documents: Documents) -> list[Row]:
            for row in rows:
                documents.update(collection, target(row)["_key"], fields(row), merge=merge)
            return rows

        return update

    def _options(self, *known: str) -> Row:
        """What follows OPTIONS. The server warns of an option it does not know; this refuses."""
        if self._peek() != Token("name", "OPTIONS"):
            return {}
        self._take()
        options: Row = self._primary()({})
        for name in options:
            if name not in known:
                raise QueryError(9, f"the stand-in does not implement the option {name}")
        return options

    def _expression(self) -> Expression:
        left = self._conjunction()
        while self._accept("keyword", "OR") or self._accept("sign", "||"):
            right = self._conjunction()
            left = either(left, right)
        return left

    def _conjunction(self) -> Expression:
        left = self._negation()
        while self._accept("keyword", "AND") or self._accept("sign", "&&"):
            right = self._negation()
            left = both(left, right)
        return left

    def _negation(self) -> Expression:
        if self._accept("keyword", "NOT") or self._accept("sign", "!"):
            value = self._negation()
            return lambda row: not is_true(value(row))
        return self._comparison()

    def _comparison(self) -> Expression:
        left = self._operand()
        if self._peek().text in COMPARISONS and self._peek().kind == "sign":
            holds = COMPARISONS[self._take().text]
            right = self._operand()
            return lambda row: holds(compare(left(row), right(row)))
        if self._accept("keyword", "IN"):
            right = self._operand()
            return lambda row: any(compare(left(row), item) == 0 for item in right(row) or ())
        return left

    def _operand(self) -> Expression:
        value = self._primary()
        while True:
            if self._accept("sign", "."):
                value = attribute(value, self._attribute_name())
            elif self._accept("sign", "["):
                value = attribute(value, self._expression())
                self._expect("sign", "]")
            else:
                return value

    def _attribute_name(self) -> Expression:
        token = self._take()
        if token.kind == "bind":
            name = self._value_of(token.text[1:])
            if not isinstance(name, str) or not name:
                raise QueryError(1553, f"bind parameter '{token.text}' is no attribute name")
            return lambda _: name
        if token.kind not in ("name", "quoted"):
            raise self._unexpected(token)
        return lambda _: token.text.strip("`")

    def _primary(self) -> Expression:
        token = self._take()
        constant: Any = None
        if token.kind == "bind":
            constant = self._value_of(token.text[1:])
        elif token.kind == "string":
            constant = unquote(token.text)
        elif token.kind == "number":
            constant = json.loads(token.text if token.text[0] != "." else "0" + token.text)
        elif token == Token("sign", "-"):
            value = self._primary()
            return lambda row: -value(row)
        elif token == Token("sign", "("):
            value = self._expression()
            self._expect("sign", ")")
            return value
        elif token == Token("sign", "["):
            items = self._items("]", self._expression)
            return lambda row: [item(row) for item in items]
        elif token == Token("sign", "{"):
            pairs = self._items("}", self._pair)
            return lambda row: {name: value(row) for name, value in pairs}
        elif token.kind in ("name", "quoted"):
            return self._named(token)
        elif token.kind == "keyword" and token.text in ("NULL", "TRUE", "FALSE"):
            constant = {"NULL": None, "TRUE": True, "FALSE": False}[token.text]
        else:
            raise self._unexpected(token)
        return lambda _: constant

    def _named(self, token: Token) -> Expression:
        name = token.text.strip("`")
        if name in self._variables:
            return lambda row: row[name]
        if self._accept("sign", "("):
            function = FUNCTIONS.get(name.upper())
            if function is None and name.upper() not in CLOCK:
                raise QueryError(1540, f"usage of unknown function '{name}()'")
            arguments = self._items(")", self._expression)
            if name.upper() in CLOCK and not arguments:
                return lambda _: CLOCK[name.upper()]()
            if len(arguments) != 1:
                raise QueryError(1541, f"invalid number of arguments for function '{name}()'")
            assert function is not None
            return lambda row: function(arguments[0](row))
        raise self._unexpected(token)

    def _pair(self) -> tuple[str, Expression]:
        token = self._take()
        if token.kind not in ("name", "quoted", "string"):
            raise self._unexpected(token)
        self._expect("sign", ":")
        return token.text.strip("`\"'"), self._expression()

    def _items(self, closing: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        if self._accept("sign", closing):
            return items
        while True:
            items.append(item())
            if self._accept("sign", closing):
                return items
            self._expect("sign", ",")

    def _collection(self) -> str:
        token = self._take()
        if token.kind == "collection":
            name = self._value_of(token.text[1:])
            if not isinstance(name, str):
                raise QueryError(1553, f"bind parameter '{token.text}' is no collection name")
            return name
        if token.kind not in ("name", "quoted"):
            raise self._unexpected(token)
        return token.text.strip("`")

    def _value_of(self, name: str) -> Any:
        self.used.add(name)
        if name not in self._bound:
            raise QueryError(1551, f"no value specified for declared bind parameter '{name}'")
        return self._bound[name]

    def _declare(self, variable: str) -> None:
        if variable in self._variables:
            raise QueryError(1511, f"variable '{variable}' is assigned multiple times")
        self._variables.add(variable)

    def _peek(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _accept(self, kind: str, text: str) -> bool:
        if self._peek() != Token(kind, text):
            return False
        self._take()
        return True

    def _expect(self, kind: str, text: str | None = None) -> str:
        token = self._take()
        if token.kind != kind or text not in (None, token.text):
            raise self._unexpected(token)
        return token.text

    def _unexpected(self, token: Token) -> QueryError:
        return QueryError(1501, f"syntax error, unexpected {token.kind} near '{token.text}'")
