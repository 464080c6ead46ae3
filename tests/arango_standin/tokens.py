"""AQL's words: a query text cut into tokens.

DOCS aql/fundamentals/syntax/ and aql/fundamentals/data-types/ (strings and numbers). What they
mean is ``aql``'s matter.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple


class QueryError(Exception):
    """A query that cannot be run: HTTP 400 with this number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Token(NamedTuple):
    kind: str
    text: str


_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<collection>@@[A-Za-z0-9]\w*) | (?P<bind>@[A-Za-z0-9]\w*)
      | (?P<number>(?:\d*\.\d+|0|[1-9]\d*)(?:[eE][+-]?\d+)?(?![\w.]))
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<quoted>`[^`]+`) | (?P<name>[A-Za-z_]\w*)
      | (?P<sign>==|!=|<=|>=|&&|\|\||[<>=!()\[\]{},.:+-])""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_KEYWORDS = re.compile(
    r"AND|ASC|COLLECT|DESC|DISTINCT|FALSE|FILTER|FOR|GRAPH|IN|INSERT|INTO|LET|LIKE|LIMIT|NONE|NOT"
    r"|NULL|OR|REMOVE|REPLACE|RETURN|SHORTEST_PATH|SORT|TRUE|UPDATE|UPSERT|WITH",
    re.IGNORECASE,
)


def split(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise QueryError(1501, f"syntax error near '{text[position : position + 20]}'")
        kind, word = str(match.lastgroup), match.group()
        if kind == "name" and _KEYWORDS.fullmatch(word):
            tokens.append(Token("keyword", word.upper()))
        elif kind != "space":
            tokens.append(Token(kind, word))
        position = match.end()
    return [*tokens, Token("end", "end of query string")]


def unquote(text: str) -> str:
    inner = text[1:-1]
    if text[0] == "'":
        inner = inner.replace("\\'", "'").replace('"', '\\"')
    return str(json.loads(f'"{inner}"', strict=False))
