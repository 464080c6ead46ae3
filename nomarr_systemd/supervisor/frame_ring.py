"""The last 200 frames of a worker, each with when it came and the run it belongs to. A worker's
frames hardly differ, so all but the newest are compressed, with the first one as zlib's dictionary:
2,000 workers need 13 MB instead of 120. Of frames that cannot be compressed fewer are kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from nomarr_systemd.core.named_tuple import NamedTuple

CAPACITY: Final = 200
MAX_PACKED: Final = 65_536  # bytes, compressed; usual are 3,500
_PACK: Final = 10
# By default zlib takes 256 KiB for each call, which is more than all that it is given here.
_WINDOW_BITS, _MEMORY_LEVEL = 13, 5


class Received(NamedTuple):
    """One frame: its line without the newline, when it came, and its run ("": not known)."""

    line: bytes
    at_ms: int  # wall time
    invocation: str


class FrameRing:
    """Frames, oldest first."""

    __slots__ = ("_first", "_packs", "_recent")

    def __init__(self) -> None:
        self._first = b""
        self._packs: list[bytes] = []  # a deque would take 600 bytes more
        self._recent: list[bytes] = []

    def add(self, lines: Sequence[bytes], at_ms: int, invocation: str) -> None:
        stamp = f"{at_ms} {invocation} ".encode()
        recent = self._recent
        for line in lines[-CAPACITY:]:
            recent.append(stamp + line)
        while len(recent) >= _PACK:
            self._packs.append(self._pack(b"\n".join(recent[:_PACK])))
            del recent[:_PACK], self._packs[: -CAPACITY // _PACK]
            while sum(map(len, self._packs)) > MAX_PACKED:
                del self._packs[0]

    def frames(self) -> list[Received]:
        found: list[bytes] = []
        for pack in self._packs:
            found += self._unpack(pack).split(b"\n")
        found += self._recent
        return [_split(row) for row in found[-CAPACITY:]]

    def _pack(self, rows: bytes) -> bytes:
        self._first = self._first or rows.partition(b"\n")[0]
        packer = zlib.compressobj(1, wbits=_WINDOW_BITS, memLevel=_MEMORY_LEVEL, zdict=self._first)
        return packer.compress(rows) + packer.flush()

    def _unpack(self, pack: bytes) -> bytes:
        return zlib.decompressobj(_WINDOW_BITS, zdict=self._first).decompress(pack)


def _split(row: bytes) -> Received:
    at_ms, invocation, line = row.split(b" ", 2)
    return Received(line, int(at_ms), invocation.decode())
