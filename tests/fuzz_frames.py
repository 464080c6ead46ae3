"""Hostile bytes for the frame decoder: ``python -m tests.fuzz_frames 1000000 [SEED]``.

Inputs are grown from valid frames by mutation. ``check`` holds what must be true of any of them,
and that both decoders agree; the unit tests run it on a few thousand, this program on as many as it
is told.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence

from nomarr_systemd.core.frames import DROPS, MAX_FRAME, Decoder, Frame, encode, parse_fields
from nomarr_systemd.core.typed_frames import TypedDecoder

ID = "worker:tag:0"


def split(frames: Sequence[Frame]) -> list[tuple[object, ...]]:
    """All that frames consist of, to compare."""
    for frame in frames:
        fields = parse_fields(frame.line)
        assert frame.invocation == (fields.get("invocation") or "")
        assert frame.progress_age_s == (fields.get("progress_age_s") or 0.0)
    return [
        (frame.kind, frame.recover_for_s, frame.line, frame.invocation, frame.progress_age_s)
        for frame in frames
    ]


def feed_both(component_id: str, *chunks: bytes) -> tuple[list[Frame], Decoder]:
    """Feed both decoders; returns the frames of the first, and it."""
    careful, typed = Decoder(component_id), TypedDecoder(component_id)
    frames = [frame for chunk in chunks for frame in careful.feed(chunk)]
    others = [frame for chunk in chunks for frame in typed.feed(chunk)]
    assert split(others) == split(frames), "the decoders take different frames"
    assert typed.drops == careful.drops, "the decoders drop different lines"
    assert typed.dropped == careful.dropped
    return frames, careful


def check(data: bytes, cuts: list[int]) -> int:
    """Feed ``data`` whole and in pieces; returns how many frames it held."""
    frames, whole = feed_both(ID, data)
    pieces = Decoder(ID)
    found: list[Frame] = []
    start = 0
    for cut in [*cuts, len(data)]:
        found += pieces.feed(data[start : start + cut])
        start += cut
        assert len(pieces._rest) < MAX_FRAME
    assert split(found) == split(frames), "frames depend on how the bytes were cut"
    alone = [frame for line in data.split(b"\n")[:-1] for frame in feed_both(ID, line + b"\n")[0]]
    assert split(alone) == split(frames), "a frame depends on the one before"
    whole.finish()
    pieces.finish()
    assert pieces.drops == whole.drops, "drops depend on how the bytes were cut"
    lines = data.count(b"\n")
    ended = sum(whole.drops.values()) - whole.drops.get("cut", 0)
    assert lines <= len(frames) + ended <= lines + 1, "a line was neither taken nor counted"
    assert whole.drops.keys() <= set(DROPS)
    for frame in frames:
        assert len(frame.line) < MAX_FRAME
        fields = parse_fields(frame.line)
        assert fields["component_id"] == ID
        # Whoever shows or sends it on can: it is finite, and it is text.
        json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
        assert len(encode(**{**fields, "status": frame.kind})) <= MAX_FRAME
    return len(frames)


SEEDS = [
    encode(ID, "healthy", phase="processing", job="/m/a.flac", seq=7, progress_age_s=1.5),
    encode(ID, "recovering", recover_for_s=30, metrics={"files": 1}, pid=3),
    encode(ID, "pending"),
    b'HEALTH|{"component_id":"worker:tag:0","phase":"idle"}\n',
    b'HEALTH|{"component_id":"worker:tag:0","status":"healthy","x":"\\ud83d\\ude00\\n"}\r\n',
]
PARTS = [
    b"\n", b"HEALTH|", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"0", b"-", b".", b"e999",
    b"NaN", b"Infinity", b"null", b"true", b"\xff", b"\xc3", b"\x00", b"\\ud800", b"\\u0000",
    b',"seq":', b'"status":"dead"', b'"component_id":"worker:tag:1"', b"9" * 400, b"[" * 1200,
    b" " * 4096, b"\r", b'"progress_age_s":', b"\xf0\x9f\x98\x80", b'"metrics":{"a":', b'"job":',
    b"1.0", b"-0", b"1e2", b'"\\u0073eq":1', b"\xed\xa0\x80", b'"note":null',
]  # fmt: skip


def grow(rng: random.Random) -> bytes:
    """A few frames, mutated."""
    data = bytearray(b"".join(rng.choices(SEEDS, k=rng.randint(1, 3))))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[place:place] = rng.choice(PARTS)
            case 1:
                del data[place : place + rng.choice((1, 2, 8, 60))]
            case 2 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 3:
                data[place:place] = bytes(data[place : place + rng.choice((1, 9, 80))])
            case _:
                data[place:place] = rng.randbytes(rng.choice((1, 3, 20)))
    return bytes(data)


def main(count: int, seed: int) -> int:
    rng = random.Random(seed)
    started = time.monotonic()
    frames = 0
    for number in range(1, count + 1):
        data = grow(rng)
        cuts = [rng.randint(1, len(data) + 1) for _ in range(rng.randint(0, 4))]
        try:
            frames += check(data, cuts)
        except BaseException:
            print(f"input {number} of seed {seed}: {data!r}, cut at {cuts}", file=sys.stderr)
            raise
        if number % 100_000 == 0:
            print(f"{number:,} inputs, {frames:,} frames taken", flush=True)
    print(f"{count:,} inputs in {time.monotonic() - started:.0f} s, {frames:,} frames, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
