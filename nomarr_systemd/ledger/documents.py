"""Checks of the ledger's documents before anything is decided by them: a database server may return
anything. JsonError if a document has another shape; the error does not quote the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import MAX_TEXT, RING, Account
from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.incident import Incident, unpack
from nomarr_systemd.core.json import JsonError, get_dict, get_int, get_list, get_str
from nomarr_systemd.core.ledger_record import EFFECTS

_COUNTS: Final = ("restart_count", "attempts", "total_restarts", "recoveries", "k")
_MOMENTS: Final = ("last_restart_wall_ms", "failed_at_wall_ms", "updated_at_wall_ms")
_LARGEST: Final = 10**15  # milliseconds: beyond any clock
_MAX_WORD: Final = 300
MAX_ROW: Final = 5 * MAX_TEXT


def read_account(doc: Mapping[str, Any], component_id: str | None = None) -> Account:
    """The account, or JsonError: also if it is another worker's than ``component_id``."""
    name = get_str(doc, "component_id")
    if component_id is not None and name != component_id:
        raise JsonError("it is another worker's account")
    _check_component(name)
    _check_word(get_str(doc, "host", ""))
    for each in _COUNTS:
        if _check_number(get_int(doc, each, 0)) < 0:
            raise JsonError(f"attribute {each!r} is negative")
    for each in _MOMENTS:
        if doc.get(each) is not None:
            _check_number(get_int(doc, each))
    if doc.get("failure_reason") is not None and len(get_str(doc, "failure_reason")) > MAX_ROW:
        raise JsonError("attribute 'failure_reason' is too long")
    if doc.get("last_due") is not None:
        _check_moment(get_list(doc, "last_due"))
    _check_window(get_dict(doc, "window", {}))
    rows = get_list(doc, "records", [])
    if len(rows) > RING or not all(map(is_row, rows)):
        raise JsonError("attribute 'records' has items that are not records")
    return book_keeping.from_doc(doc)


def read_incident(doc: Mapping[str, Any]) -> Incident:
    """The incident, or JsonError."""
    for each in ("pool", "kind", "closed"):
        _check_word(get_str(doc, each, "") if each == "closed" else get_str(doc, each))
    _check_number(get_int(doc, "code"))
    _check_moment(get_list(doc, "opened"))
    if doc.get("closed_wall_ms") is not None:
        _check_number(get_int(doc, "closed_wall_ms"))
    if doc.get("deaths") is not None:
        _check_number(get_int(doc, "deaths"))
    for name in (get_str(doc, "canary"), *get_list(doc, "members"), *get_list(doc, "tried", [])):
        _check_component(name)
    for pair in get_list(doc, "refunds"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise JsonError("attribute 'refunds' has items that are not pairs")
        _check_component(pair[0])
        _check_word(pair[1])
    return Incident.from_doc(doc)


def read_past_incident(doc: Mapping[str, Any]) -> Incident:
    """The incident as it is kept after its end, or JsonError."""
    pool, numbers = get_str(doc, "pool"), get_str(doc, "members")
    try:
        members = unpack(pool, numbers)
    except ValueError as error:
        raise JsonError("attribute 'members' is not the numbers of workers") from error
    return read_incident({**doc, "members": list(members), "refunds": []})


def refuse(collection: str, key: str, error: JsonError) -> StoreUnavailable:
    """The error for a document that cannot be used: nothing can be decided by such a store."""
    return StoreUnavailable(
        f"{collection}/{key} in the store is damaged: {error}",
        hint="mend or remove the document; failures are kept in the spool meanwhile",
    )


def _check_window(window: Mapping[str, Any]) -> None:
    for boot_id in window:
        _check_word(boot_id)
        row = get_list(window, boot_id)  # invocation, wall time and boot time of each restart
        if len(row) % 3 or len(row) > 3 * RING + 3:
            raise JsonError("attribute 'window' has a row that is not triples")
        for word in row[0::3]:
            _check_word(word)
        _check_numbers(row[1::3])
        _check_numbers(row[2::3])


def _check_moment(moment: list[Any]) -> None:
    if len(moment) != 3:
        raise JsonError("a moment does not have three parts")
    _check_numbers((moment[0], moment[2]))
    _check_word(moment[1])


def is_row(row: object) -> bool:
    """True if a row of a document is a record that can be read."""
    if not isinstance(row, str) or len(row) > MAX_ROW:
        return False
    return _make_row().fullmatch(row) is not None


@cache
def _make_row() -> re.Pattern[str]:
    """The pattern of a record; compiled when it is first needed."""
    number = r"\|-?[0-9]{1,15}"
    return re.compile(
        r"[0-9]{1,15}\|[^|]*\|[a-z-]{1,40}\|[^|]*"  # attempt, invocation, action, kind
        rf"{number}{number}{number}\|[^|]*{number}"  # code, delay, wall time, boot, time since it
        rf"\|(?:{'|'.join(EFFECTS)})(?:{number}|\|)"  # effect, length of the run
        rf"{5 * number}(?:{number}|\|)"  # evidence
        r"\|.*",  # text, person, and fields that a newer version has added
        re.DOTALL,
    )


def _check_component(name: object) -> None:
    try:
        is_plain = isinstance(name, str) and parse_component(name).component_id == name
    except BadName:
        is_plain = False
    if not is_plain:
        raise JsonError("a component id is missing or malformed")


def _check_word(word: object) -> None:
    if not isinstance(word, str) or len(word) > _MAX_WORD:
        raise JsonError("a text is missing or too long")


def _check_numbers(numbers: Iterable[object]) -> None:
    for number in numbers:
        _check_number(number)


def _check_number(number: object) -> int:
    if type(number) is not int or not -_LARGEST < number < _LARGEST:
        raise JsonError("a number is missing or out of range")
    return number
