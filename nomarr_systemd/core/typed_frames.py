"""The decoder of frames with msgspec, which checks names and types while it parses.

What it does not take, core/frames judges with the standard library: lines that are dropped, fields
of a worker's own, null, nested metrics. So both take the same lines, and drop the same for the same
reason; tests compare them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from nomarr_systemd.core.frames import EVENTS, MAX_FRAME, PREFIX, Decoder, Frame

_OBJECT: Final = PREFIX + b"{"  # white space before it is not accepted


class _Fields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields that have a type (docs/contract.md), except that of a recovery."""

    component_id: str
    status: Literal["pending", "healthy", "unhealthy", "stopping"]
    phase: str = ""
    job: str | int = ""
    seq: int = 0
    pid: int = 0
    invocation: str = ""
    progress_age_s: int | float = 0.0
    metrics: dict[str, str | int | float | bool | None] = {}
    note: str = ""


_decode: Final = msgspec.json.Decoder(_Fields).decode


class TypedDecoder(Decoder):
    """Decodes one worker's pipe."""

    __slots__ = ()

    def _parse(self, line: bytes) -> Frame | None:
        try:
            fields = _decode(line[len(PREFIX) :])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return super()._parse(line)
        if (
            fields.component_id != self._component_id
            or not line.startswith(_OBJECT)
            or len(line) >= MAX_FRAME
        ):
            return super()._parse(line)
        frame = Frame()
        frame.event = EVENTS[fields.status]
        frame.line = line
        frame.invocation = fields.invocation
        frame.progress_age_s = fields.progress_age_s or 0.0
        return frame
