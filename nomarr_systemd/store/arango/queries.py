"""The AQL of the store: each function returns a query with its bind parameters. Nothing is sent
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.store.arango.documents import check_values, to_body
from nomarr_systemd.store.protocol import (
    PORTION,
    Doc,
    Equal,
    check_field,
    check_update,
    check_where,
    check_words,
)

NOT_SYNCED: Final = frozenset({"health_history"})


class Query(NamedTuple):
    text: str
    bound: dict[str, Any]


def find(
    collection: str,
    where: Equal | None,
    *,
    order: str,
    descending: bool,
    limit: int | None,
    after: str | None,
) -> Query:
    text, bound = _among(collection, check_where(where))
    if after is not None:
        text += " FILTER d._key > @after"
        bound["after"] = after
    direction = "DESC" if descending else "ASC"
    if check_field(order) == "_key":
        text += f" SORT d._key {direction}"  # twice, no index would serve it
    else:
        text += f" SORT d.@order {direction}, d._key {direction}"
        bound["order"] = order
    if limit is not None:
        text += " LIMIT @limit"
        bound["limit"] = max(0, limit)
    return Query(f"{text} RETURN d", bound)


def find_keys(collection: str, keys: Sequence[str]) -> Query:
    """Return the documents with these keys, in any order."""
    bound = {"@documents": collection, "keys": list(keys)}
    return Query("FOR d IN @@documents FILTER d._key IN @keys RETURN d", bound)


def count(collection: str, where: Equal) -> Query:
    text, bound = _among(collection, check_words(where))
    return Query(f"{text} COLLECT WITH COUNT INTO n RETURN n", bound)


def tally(collection: str, where: Equal, field: str) -> Query:
    text, bound = _among(collection, check_words(where))
    # By default the server sorts what it has collected.
    text += " COLLECT value = d.@counted WITH COUNT INTO n SORT null RETURN [value, n]"
    return Query(text, bound | {"counted": check_field(field)})


def prune(collection: str, field: str, below: int, where: Equal | None) -> Query:
    check_values([below], field)
    text, bound = _among(collection, check_where(where))
    # Null and false are less than any number, too.
    text += " FILTER d.@field < @below FILTER IS_NUMBER(d.@field) LIMIT @portion"
    text += f" REMOVE d IN @@documents{_options(collection)}"
    bound |= {"field": check_field(field), "below": below, "portion": PORTION}
    return Query(text, bound)


def update(collection: str, where: Equal, fields: Doc) -> Query:
    text, bound = _among(collection, check_update(where, fields))
    text += " LIMIT @portion UPDATE d WITH @fields IN @@documents"
    # By default an object would be merged with the one that is there.
    text += _options(collection, "mergeObjects: false")
    return Query(text, bound | {"fields": to_body(fields), "portion": PORTION})


def _among(collection: str, where: Equal) -> tuple[str, dict[str, Any]]:
    text = "FOR d IN @@documents"
    bound: dict[str, Any] = {"@documents": collection}
    for number, (field, value) in enumerate(where.items()):
        check_values([value], field)
        text += f" FILTER d.@field{number} == @value{number}"
        bound |= {f"field{number}": field, f"value{number}": value}
    return text, bound


def _options(collection: str, *options: str) -> str:
    """Return the options of a statement that writes: its answer must survive a power cut, also in a
    collection that an earlier version has made otherwise."""
    if collection not in NOT_SYNCED:
        options = (*options, "waitForSync: true")
    return f" OPTIONS {{{', '.join(options)}}}" if options else ""
