"""How keys and values from a file are named in a message: as TOML writes them, but never too
long and with nothing in them that a terminal would obey.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")


def show(value: object) -> str:
    """A value out of a TOML document."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return quote(value)
        case int() if abs(value) >= 10**40:  # Python refuses to spell very long ones
            return "a number of more than 40 digits"
        case int() | float():
            return str(value)
        case list():
            return "a list"
        case dict():
            return "a table"
    return "a date or time"


def quote(text: str) -> str:
    """Text in double quotes, escaped and cut."""
    cut = text if len(text) <= 60 else text[:57] + "..."
    backslashed = cut.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escape(backslashed)}"'


def escape(text: str) -> str:
    """The text with every character that cannot be printed spelled out."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def spell(path: tuple[str | int, ...]) -> str:
    """A path of keys: ``pool.tag.workers``, ``policy.never_restart[1]``."""
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            dot = "." if spelled else ""
            spelled += dot + (part if _BARE_KEY.fullmatch(part) else quote(part))
    return spelled


def ask_for(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the ``known`` words, if one is near."""
    from difflib import get_close_matches  # only a mistake pays for it

    plain = {_plain(candidate): candidate for candidate in known}
    near = get_close_matches(_plain(word[:80]), plain, n=1)
    return f"did you mean {plain[near[0]]}?" if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
