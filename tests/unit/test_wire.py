"""D-Bus's marshalling: whatever is written is read back, and no bytes do harm."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.systemd.dbus.connection import Call, unit_path
from nomarr_systemd.systemd.dbus.wire import Reader, Writer, read_fields, split

NUMBERS = {
    "y": st.integers(0, 2**8 - 1),
    "n": st.integers(-(2**15), 2**15 - 1),
    "q": st.integers(0, 2**16 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "u": st.integers(0, 2**32 - 1),
    "x": st.integers(-(2**63), 2**63 - 1),
    "t": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False),
    "b": st.booleans(),
    "s": st.text(),
}
Typed = tuple[str, Any]


def typed(kind: str) -> st.SearchStrategy[Typed]:
    return NUMBERS[kind].map(lambda value: (kind, value))


def lists_of(one: Typed) -> Typed:
    kind, value = one
    return f"a{kind}", [value, value]


def structures_of(parts: list[Typed]) -> Typed:
    return f"({''.join(kind for kind, _ in parts)})", tuple(value for _, value in parts)


# A list of bytes comes back as bytes, so it is left to a test of its own.
VALUES = st.recursive(
    st.sampled_from(sorted(NUMBERS)).flatmap(typed),
    lambda inner: st.one_of(
        inner.filter(lambda one: one[0] != "y").map(lists_of),
        st.lists(inner, min_size=1, max_size=4).map(structures_of),
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=5))
def test_values_come_back(values: list[Typed]) -> None:
    writer = Writer()
    for kind, value in values:
        writer.write(kind, value)
    signature = "".join(kind for kind, _ in values)
    assert list(split(signature)) == [kind for kind, _ in values]
    assert Reader(bytes(writer.data)).read_all(signature) == [value for _, value in values]


@given(VALUES)
def test_a_variant_comes_back_as_its_value(one: Typed) -> None:
    writer = Writer()
    writer.write("v", one)
    assert Reader(bytes(writer.data)).read_all("v") == [one[1]]


def test_the_bytes_are_those_of_the_specification() -> None:
    """Strings with length and NUL, aligned to four; an array of structures aligned to eight."""
    writer = Writer()
    writer.write("s", "foo")
    writer.write("a(yu)", [(1, 2)])
    assert bytes(writer.data) == (
        b"\x03\0\0\0foo\0" + b"\x08\0\0\0" + bytes(4) + b"\x01\0\0\0\x02\0\0\0"
    )
    assert Reader(b"\x02\0\0\0\xab\xcd").read_all("ay") == [b"\xab\xcd"]


@given(st.binary(max_size=200), st.sampled_from(["a(yv)", "v", "as", "a(ssssssouso)", "g"]))
def test_hostile_bytes_are_refused(data: bytes, signature: str) -> None:
    with contextlib.suppress(ValueError):
        Reader(data).read_all(signature)


FIELDS = st.tuples(
    st.integers(1, 9),
    st.one_of(
        st.tuples(st.just("u"), NUMBERS["u"]),
        st.tuples(st.sampled_from("so"), NUMBERS["s"]),
        st.tuples(st.just("g"), st.text("asuv(){}", max_size=50)),
    ),
)


@given(st.lists(FIELDS, unique_by=lambda field: field[0]))
def test_a_header_comes_back(fields: list[tuple[int, Typed]]) -> None:
    writer = Writer()
    writer.write("t", 0)
    writer.write("u", 0)  # a header's fields begin 12 bytes into the message
    writer.write("a(yv)", fields)
    found = read_fields(bytes(writer.data[12:]))
    assert found == {number: value for number, (_, value) in fields}


@given(st.binary(max_size=60), st.integers(0, 70))
def test_a_hostile_header_is_refused(data: bytes, length: int) -> None:
    with contextlib.suppress(ValueError):
        read_fields(length.to_bytes(4, "little") + data)


@pytest.mark.parametrize("signature", ["a", "(", "(s", "()", "z", "a()", ")"])
def test_a_signature_that_is_none_is_refused(signature: str) -> None:
    with pytest.raises(ValueError):
        split(signature)


def test_deep_nesting_is_refused() -> None:
    data = b"\x01v\0" * 100
    with pytest.raises(ValueError, match="deep"):
        Reader(data).read_all("v")


def test_a_unit_is_an_object() -> None:
    path = unit_path("nomarr-worker@tag-0.service")
    assert path == "/org/freedesktop/systemd1/unit/nomarr_2dworker_40tag_2d0_2eservice"
    assert Call("Reload").path == "/org/freedesktop/systemd1"
