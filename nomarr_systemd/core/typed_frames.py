"""The decoder of frames with msgspec, which checks names and types while it parses.

What it does not take, core/frames judges with the standard library: lines that are dropped, fields
of a worker's own, null, nested metrics. So both take the same lines, and drop the same for the same
reason; tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from nomarr_systemd.core.frames import MAX_FRAME, PREFIX, Decoder, Frame


class _Frame(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields that have a type (docs/contract.md), in the order of most frames."""

    component_id: str
    kind: Literal["pending", "healthy", "unhealthy", "recovering", "stopping"] = msgspec.field(
        name="status"
    )
    phase: str = ""
    job: str | int = ""
    pid: int = 0
    invocation: str = ""
    seq: int = 0
    progress_age_s: int | float = 0.0
    recover_for_s: int | float | None = None
    metrics: dict[str, str | int | float | bool | None] | None = None
    note: str = ""
    line: bytes = b""  # set after decoding: what a worker says here is its own


_decode: Final = msgspec.json.Decoder(_Frame).decode


class TypedDecoder(Decoder):
    """Decodes one worker's pipe."""

    __slots__ = ()

    def feed(self, chunk: bytes) -> Sequence[Frame]:
        line, newline, more = chunk.partition(b"\n")
        if more or self._rest or not newline:
            return Decoder.feed(self, chunk)
        noise, _, text = line.partition(PREFIX)
        try:
            frame = _decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return Decoder.feed(self, chunk)
        if noise or frame.component_id != self._component_id or len(line) >= MAX_FRAME:
            return Decoder.feed(self, chunk)
        frame.line = line
        return (frame,)
