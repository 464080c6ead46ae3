"""JSON that is not trusted: decoding with bounded nesting, and typed getters. A value of another
type than expected raises JsonError, which names the attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.decoder import JSONDecoder
from typing import Any, Final, TypeVar

Object = Mapping[str, Any]
_T = TypeVar("_T")
_REQUIRED: Final = object()


MAX_DEPTH: Final = 32  # nested lists and objects; code that walks through them may recurse


class JsonError(ValueError):
    """The text is no JSON that is accepted, an attribute is missing, or its type is wrong."""


def refuse(text: str) -> float:
    """For ``parse_constant``: NaN and Infinity are not JSON."""
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:  # 1e999 is valid JSON, and infinite
        raise ValueError(text)
    return value


DECODER: Final = JSONDecoder(parse_float=_finite, parse_constant=refuse)


def decode(text: str | bytes) -> Any:
    """Return the value of a JSON text in UTF-8; JsonError for anything else, for numbers that are
    not finite, and if it is nested deeper than MAX_DEPTH."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"not JSON: {str(error)[:100]}") from error
    if may_be_deep(text) and is_deep(value):
        raise JsonError(f"nested deeper than {MAX_DEPTH}")
    return value


def may_be_deep(text: str, depth: int = MAX_DEPTH) -> bool:
    """Return True if the JSON text has so many brackets that its value may be nested deeper than
    ``depth``. ``str.count`` would look at every character one by one; ``find`` does not."""
    for bracket in "[{":
        at = -1
        while (at := text.find(bracket, at + 1)) >= 0:
            depth -= 1
            if depth < 0:
                return True
    return False


def is_deep(value: object, depth: int = MAX_DEPTH) -> bool:
    """Return True if the value is nested deeper than ``depth``. Does not recurse itself."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list, tuple))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, (dict, list, tuple)) for each in level)


def as_object(value: object, what: str = "the document") -> dict[str, Any]:
    """Return the value if it is an object, else raise JsonError."""
    if not isinstance(value, dict):
        raise JsonError(f"{what} is {_name(value)}, not an object")
    return value


def get_str(doc: Object, name: str, default: Any = _REQUIRED) -> str:
    return _get(doc, name, str, default)


def get_int(doc: Object, name: str, default: Any = _REQUIRED) -> int:
    """Return a whole number; JsonError for true and false, too."""
    return _get(doc, name, int, default)


def get_int_or_none(doc: Object, name: str) -> int | None:
    """Return a whole number; None for null."""
    return None if name in doc and doc[name] is None else get_int(doc, name)


def get_bool(doc: Object, name: str, default: Any = _REQUIRED) -> bool:
    return _get(doc, name, bool, default)


def get_dict(doc: Object, name: str, default: Any = _REQUIRED) -> dict[str, Any]:
    return _get(doc, name, dict, default)


def get_list(doc: Object, name: str, default: Any = _REQUIRED) -> list[Any]:
    return _get(doc, name, list, default)


def get_objects(doc: Object, name: str) -> list[dict[str, Any]]:
    """Return the items of a list that are objects; none where there is no such list. Never
    raises."""
    found = doc.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _get(doc: Object, name: str, kind: type[_T], default: Any) -> _T:
    value = doc.get(name, default)
    if value is _REQUIRED:
        raise JsonError(f"attribute {name!r} is missing")
    if value is default:
        return value  # type: ignore[no-any-return]  # what the caller gave
    if type(value) is not kind:
        raise JsonError(f"attribute {name!r} is {_name(value)}, not {_KINDS[kind]}")
    return value


_KINDS: Final[dict[type, str]] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _name(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _KINDS.get(type(value), "a number")
