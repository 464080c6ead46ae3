"""D-Bus values to bytes and back ("marshalling" in the specification), little-endian."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, pack_into
from struct import error as struct_error
from typing import Any, Final

_NUMBERS: Final = {
    name: Struct("<" + code)
    for name, code in zip("ynqiuxtdb", "BhHiIqQdI", strict=True)  # a boolean has four bytes
}
_ALIGN: Final = {
    **{name: number.size for name, number in _NUMBERS.items()},
    "s": 4,
    "o": 4,
    "g": 1,
    "v": 1,
    "a": 4,
    "(": 8,
    "{": 8,
}
U32: Final = _NUMBERS["u"]
MAX_DEPTH: Final = 64


@lru_cache(maxsize=256)
def split(signature: str) -> tuple[str, ...]:
    """Return the complete types of a signature: ``sa(sv)u`` is s, a(sv) and u."""
    found = []
    begins = 0
    while begins < len(signature):
        ends = _end_of(signature, begins)
        found.append(signature[begins:ends])
        begins = ends
    return tuple(found)


def _end_of(signature: str, begins: int) -> int:
    kind = signature[begins : begins + 1]
    if kind == "a":
        return _end_of(signature, begins + 1)
    if kind not in ("(", "{"):
        if kind not in _ALIGN:
            raise ValueError(f"not a D-Bus type: {signature!r:.80}")
        return begins + 1
    ends = begins + 1
    while signature[ends : ends + 1] not in (")", "}"):
        ends = _end_of(signature, ends)
    if ends == begins + 1:
        raise ValueError("an empty structure")
    return ends + 1


class Writer:
    """Values to bytes. A variant is given as (type, value), a structure as a sequence."""

    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, size: int) -> None:
        self.data += bytes(-len(self.data) % size)

    def write(self, kind: str, value: Any) -> None:
        head = kind[0]
        self.align(_ALIGN[head])
        if number := _NUMBERS.get(head):
            self.data += number.pack(value)
        elif head == "g":
            self.data += bytes((len(value),)) + value.encode() + b"\0"
        elif head in "so":
            text = value.encode()
            self.data += U32.pack(len(text)) + text + b"\0"
        elif head == "v":
            self.write("g", value[0])
            self.write(*value)
        elif head == "a":
            self._write_array(kind[1:], value)
        else:
            for each, part in zip(split(kind[1:-1]), value, strict=True):
                self.write(each, part)

    def _write_array(self, kind: str, values: Sequence[Any]) -> None:
        at = len(self.data)
        self.data += bytes(4)
        self.align(_ALIGN[kind[0]])  # padding does not count in the length
        begins = len(self.data)
        for value in values:
            self.write(kind, value)
        pack_into("<I", self.data, at, len(self.data) - begins)


class Reader:
    """Bytes to values: a variant becomes its value, an array a list, a structure a tuple."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self._at = at

    def read_all(self, signature: str) -> list[Any]:
        try:
            return [self._read(kind, 0) for kind in split(signature)]
        except (IndexError, struct_error) as error:
            raise ValueError("a message ends too early") from error

    def _read(self, kind: str, depth: int) -> Any:
        head = kind[0]
        self._at += -self._at % _ALIGN[head]
        if number := _NUMBERS.get(head):
            (value,) = number.unpack_from(self._data, self._at)
            self._at += number.size
            return bool(value) if head == "b" else value
        if head in "so":
            return self._read_text()
        if head == "g":
            return self._take(self._data[self._at] + 2)[1:-1].decode()
        if depth > MAX_DEPTH:
            raise ValueError("a message nests too deep")
        if head == "v":
            (inner,) = split(self._read("g", depth))
            return self._read(inner, depth + 1)
        if head == "a":
            return self._read_array(kind[1:], depth)
        # Thousands of units are thousands of structures of texts.
        kinds = split(kind[1:-1])
        return tuple(
            [self._read_text() if each == "s" else self._read(each, depth + 1) for each in kinds]
        )

    def _read_text(self) -> str:
        at = self._at + (-self._at & 3)
        begins = at + 4
        self._at = begins + U32.unpack_from(self._data, at)[0] + 1
        if self._at > len(self._data):
            raise ValueError("a message ends too early")
        return self._data[begins : self._at - 1].decode("utf-8", "surrogateescape")

    def _read_array(self, kind: str, depth: int) -> Any:
        length = self._read("u", depth)
        self._at += -self._at % _ALIGN[kind[0]]
        if kind == "y":
            return self._take(length)
        ends = self._at + length
        values = []
        while self._at < ends:
            values.append(self._read(kind, depth + 1))
        return values

    def _take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise ValueError("a message ends too early")
        self._at += size
        return piece


def read_fields(data: bytes) -> dict[int, Any]:
    """Return the fields of a message's header (an array of byte and variant) by number; ``data``
    begins at its length. As ``Reader`` would, but quicker: a question about thousands of units has
    thousands of answers, and each of them a header."""
    try:
        return _read_fields(data)
    except (IndexError, struct_error) as error:
        raise ValueError("a header is cut off") from error


def _read_fields(data: bytes) -> dict[int, Any]:
    fields: dict[int, Any] = {}
    ends = 4 + U32.unpack_from(data)[0]
    at = 4
    if ends > len(data):
        raise ValueError("a message ends too early")
    while at < ends:
        at += (4 - at) % 8  # the array begins 12 bytes into the message
        number, length, kind = data[at], data[at + 1], data[at + 2 : at + 3]
        at += 4  # of a signature with one letter
        if length != 1 or kind not in (b"u", b"s", b"o", b"g"):
            raise ValueError("a header has a field of another type")
        if kind == b"g":
            begins, size = at + 1, data[at]
        else:
            begins, size = at + 4, U32.unpack_from(data, at)[0]
        if kind == b"u":
            fields[number], at = size, begins
            continue
        at = begins + size + 1
        if at > ends:
            raise ValueError("a header ends too early")
        fields[number] = data[begins : at - 1].decode("utf-8", "surrogateescape")
    return fields
