"""Text for people: quoting, escaping what a terminal would obey, durations, near spellings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")


def show(value: object) -> str:
    """Describe a value of a TOML document."""
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
    """Return the text in double quotes, escaped and cut."""
    cut = text if len(text) <= 60 else text[:57] + "..."
    backslashed = cut.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escape(backslashed)}"'


class _Spellings(dict[int, str]):
    """What each character is shown as, for ``str.translate``: one that cannot be printed (controls,
    line breaks, writing directions, lone surrogates) is spelled out."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        shown = sign if sign.isprintable() else ascii(sign)[1:-1]
        if code < 0x2100:  # all common ones; kept for ever, so not the whole of Unicode
            self[code] = shown
        return shown


_SPELLINGS: Final = _Spellings()


def escape(text: str) -> str:
    """Return the text on one line, with every character that cannot be printed spelled out."""
    return text if text.isprintable() else text.translate(_SPELLINGS)


def spell(path: tuple[str | int, ...]) -> str:
    """Return a path of keys: ``pool.tag.workers``, ``policy.never_restart[1]``."""
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            dot = "." if spelled else ""
            spelled += dot + (part if _BARE_KEY.fullmatch(part) else quote(part))
    return spelled


def ask_for(word: str, known: Iterable[str]) -> str:
    """``did you mean …?`` with the nearest ``known`` word; empty if none is near."""
    from difflib import get_close_matches  # slow to import, and only mistakes need it

    plain = {_plain(candidate): candidate for candidate in known}
    near = get_close_matches(_plain(word[:80]), plain, n=1)
    return f"did you mean {plain[near[0]]}?" if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


# CSI and OSC sequences, and the two-byte ones. What is cut short is left to ``escape``. OSC ends at
# BEL or ESC \; neither part can match the other's signs, so it takes linear time.
_ANSI: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]"
)


_PIECE: Final = 512


def one_line(text: str, limit: int = 4096) -> str:
    """Return the text on one line, what is not printable spelled out, and cut."""
    shown = text
    if not text.isprintable():
        shown = ""
        for start in range(0, len(text), _PIECE):  # a few spelled-out pieces reach the limit
            shown += escape(text[start : start + _PIECE])
            if len(shown) > limit:
                break
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def clean(text: str, limit: int = 4096) -> str:
    """Return a line of a log as ``one_line`` does, without colours, tabs and trailing blanks."""
    if text.isprintable():
        return one_line(text, limit)
    text = text[: 2 * limit].expandtabs(4)
    if "\x1b" in text or "\x9b" in text:
        text = _ANSI.sub("", text)
    return one_line(text.rstrip("\r\n "), limit)


def clean_all(value: Any, limit: int = 4096) -> Any:
    """Return a decoded JSON value with every text in it on one line, names of attributes
    included."""
    match value:
        case str():
            return one_line(value, limit)
        case dict():
            return {one_line(name, 200): clean_all(each, limit) for name, each in value.items()}
        case list():
            return [clean_all(each, limit) for each in value]
    return value


def clean_lines(text: str, limit: int = 4096, most: int = 2000) -> list[str]:
    """Return the lines of a text, each of them clean."""
    return [clean(line, limit) for line in text.split("\n")[:most]]


_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


@lru_cache(maxsize=256)
def describe_ms(ms: int) -> str:
    """Return a duration in at most two units: ``3 min 12 s``, ``1.5 s``, ``5 min``, ``250 ms``."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 10_000 and ms % 1000:
        return f"{ms / 1000:.1f} s".replace(".0 s", " s")
    for position, (unit, size) in enumerate(_UNITS):
        if ms >= size:
            text = f"{ms // size} {unit}"
            if position + 1 < len(_UNITS):
                smaller, smaller_size = _UNITS[position + 1]
                rest = ms % size // smaller_size
                return f"{text} {rest} {smaller}" if rest else text
            return text
    raise AssertionError(ms)  # every duration of a second or more has found its unit


def count(number: int, noun: str = "worker") -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
