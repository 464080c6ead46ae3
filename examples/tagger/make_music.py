"""Makes a folder of small sound files for the tagger: good ones, broken ones, and two that stand in
for a bug in a decoder. Usage: python3 make_music.py FOLDER
"""

from __future__ import annotations

import io
import math
import os
import random
import struct
import sys
import wave
from collections.abc import Callable, Sequence

import sound

RATE = 16000
FULL = 32767


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    try:
        make(arguments[0])
    except OSError as error:
        print(f"make_music: {error}; name a folder that is not there yet", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def make(folder: str) -> None:
    """Write ``songs`` (can be tagged), ``broken`` (cannot) and ``deadly`` (kill the worker)."""
    for name in ("songs", "broken", "deadly"):
        os.makedirs(os.path.join(folder, name))

    def write(name: str, data: bytes) -> None:
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)

    for name, samples in SONGS.items():
        write(f"songs/{name}.wav", to_wav(samples()))
    loud = sine(440)
    write("songs/stereo.wav", to_wav([value for each in loud for value in (each, 0)], channels=2))
    write("songs/24-bit.wav", to_wav(loud, width=3))
    write("songs/8-bit.wav", to_wav(loud, width=1))
    write_flac(os.path.join(folder, "songs/sine-440.flac"), loud)
    whole = to_wav(loud)
    write("broken/cut-header.wav", whole[:30])
    write("broken/cut-sound.wav", whole[: len(whole) // 2])
    write("broken/empty.wav", b"")
    write("broken/text.wav", b"This is no sound.\n")
    os.symlink("nowhere.wav", os.path.join(folder, "broken/missing.wav"))
    write("deadly/crash.wav", with_note(whole, sound.CRASH))
    write("deadly/hang.wav", with_note(whole, sound.HANG))


def sine(hertz: float, level: float = 1.0) -> list[int]:
    """Return one second of a tone."""
    step = 2 * math.pi * hertz / RATE
    return [round(FULL * level * math.sin(step * n)) for n in range(RATE)]


def chirp(low: float, high: float) -> list[int]:
    """Return one second that rises from one frequency to another."""

    def phase(t: float) -> float:
        return 2 * math.pi * (low * t + (high - low) * t * t / 2)

    return [round(FULL / 2 * math.sin(phase(n / RATE))) for n in range(RATE)]


def noise(level: float) -> list[int]:
    """Return noise, the same every time."""
    chance = random.Random(1)  # noqa: S311 (nothing secret)
    return [round(FULL * level * chance.uniform(-1, 1)) for _ in range(RATE)]


SONGS: dict[str, Callable[[], list[int]]] = {
    "chirp-200-4000": lambda: chirp(200, 4000),
    "noise": lambda: noise(0.5),
    "silence": lambda: [0] * RATE,
    "sine-100": lambda: sine(100),
    "sine-1000": lambda: sine(1000),
    "sine-1000-quiet": lambda: sine(1000, 0.1),
    "sine-5000": lambda: sine(5000, 0.5),
}


def to_wav(samples: Sequence[int], *, channels: int = 1, width: int = 2) -> bytes:
    """Return samples of 16 bits as a WAV of 8, 16 or 24."""
    match width:
        case 1:
            data = bytes((value >> 8) + 128 for value in samples)
        case 2:
            data = struct.pack(f"<{len(samples)}h", *samples)
        case _:
            data = b"".join((value << 8).to_bytes(3, "little", signed=True) for value in samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(RATE)
        writer.writeframes(data)
    return file.getvalue()


def with_note(data: bytes, note: bytes) -> bytes:
    """Return the WAV with one more chunk between its header and its sound."""
    note += b" " * (len(note) % 2)
    chunk = b"note" + struct.pack("<I", len(note)) + note
    size = struct.pack("<I", len(data) + len(chunk) - 8)
    return data[:4] + size + data[8:36] + chunk + data[36:]


def write_flac(path: str, samples: Sequence[int]) -> None:
    """Write a FLAC, if python3-soundfile is installed."""
    try:
        import soundfile
    except (ImportError, OSError):
        return
    with soundfile.SoundFile(path, "w", RATE, 1, "PCM_16", format="FLAC") as file:
        file.buffer_write(struct.pack(f"={len(samples)}h", *samples), "int16")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
