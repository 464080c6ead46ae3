"""JSON from elsewhere: nesting is bounded, in frames too, and nothing but JsonError is raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nomarr_systemd.core import text
from nomarr_systemd.core.frames import Decoder, parse_fields
from nomarr_systemd.core.json import MAX_DEPTH, JsonError, decode, is_deep
from nomarr_systemd.core.text import clean_all, escape

ID = "worker:tag:0"


def nest(depth: int, kind: str) -> str:
    if kind == "list":
        return "[" * depth + "]" * depth
    return '{"x":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "object"])
def test_nesting_is_bounded(kind: str) -> None:
    assert decode(nest(MAX_DEPTH, kind)) is not None
    for depth in (MAX_DEPTH + 1, 900, 974, 980, 989, 1500, 100_000):
        with pytest.raises(JsonError):
            decode(nest(depth, kind))
        with pytest.raises(JsonError):
            decode(f'{{"a":["[",{nest(depth, kind)}]}}'.encode())


def test_many_brackets_are_no_nesting() -> None:
    assert decode("[" + "[]," * 1000 + "[]]") == [[]] * 1001
    assert decode('"' + "[" * 1000 + '"') == "[" * 1000


@given(st.binary() | st.text())
@example(b'{"a":1e999}')
@example("NaN")
@example("9" * 5000)
@example(b'"\\ud800"')
@example('{"a":1}'.encode("utf-16"))
def test_decoding_raises_nothing_else(said: str | bytes) -> None:
    with contextlib.suppress(JsonError):
        json.dumps(decode(said), allow_nan=False)


@pytest.mark.parametrize("depth", [*range(30, 36), 500, 974, 980, 983, 989, 1300])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_a_nested_frame_is_dropped(depth: int, kind: str) -> None:
    """In the frame itself one level is used up already."""
    decoder = Decoder(ID)
    line = f'HEALTH|{{"component_id":"{ID}","status":"healthy","x":{nest(depth, kind)},"seq":1}}\n'
    if len(line) > 4096:
        line = f'HEALTH|{{"component_id":"{ID}","status":"healthy","x":{nest(depth, "list")}}}\n'
    for frame in decoder.feed(line.encode()):
        assert depth < MAX_DEPTH
        assert not is_deep(parse_fields(frame.line))
    assert decoder.drops == ({} if depth < MAX_DEPTH else {"json": 1})
    # A line that is alike is as deep as the last valid one.
    assert len(decoder.feed(line.replace('"seq":1', '"seq":2').encode())) == (depth < MAX_DEPTH)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON)
def test_all_of_a_value_is_clean(value: Any) -> None:
    def look(value: Any) -> None:
        if isinstance(value, str):
            assert value.isprintable()
        for inner in value.values() if isinstance(value, dict) else ():
            look(inner)
        for inner in value if isinstance(value, (dict, list)) else ():
            look(inner)

    look(clean_all(value))


@given(st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs", "L"])))
def test_escaping_spells_each_character(said: str) -> None:
    assert escape(said).isprintable()
    assert escape(said) == "".join(s if s.isprintable() else ascii(s)[1:-1] for s in said)


def test_cleaning_looks_only_at_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """47 kB of controls on each of 700 lines: what is looked at is bounded, too."""

    looked_at = 0

    class Counting(dict[int, str]):
        def __missing__(self, code: int) -> str:
            nonlocal looked_at
            looked_at += 1
            return ascii(chr(code))[1:-1]

    monkeypatch.setattr(text, "_SPELLINGS", Counting())
    for sign in ("\x01", "\u202e", "\x1b"):
        lines = text.clean_lines("\n".join([sign * 47_000] * 700))
        assert [len(line) for line in lines] == [4096] * 700
    assert looked_at < 3 * 700 * 1600
