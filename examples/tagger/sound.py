"""Sound files, read and measured in plain Python: how loud they are, and how bright.

WAV is read by the standard library, FLAC by python3-soundfile where that is installed. Nothing here
knows of workers. A file is read in blocks, so its length costs time and no memory.
"""

from __future__ import annotations

import cmath
import importlib.util
import math
import os
import signal
import stat
import sys
import time
import wave
from array import array
from collections.abc import Callable, Iterator
from operator import mul
from typing import BinaryIO, NamedTuple

BLOCK = 65536  # frames: one sample of each channel
MAX_CHANNELS = 32
WINDOW = 2048  # frames that one spectrum is made of
SPECTRA = 16  # taken from one file
# In the first bytes of a file: makes it crash or hang, in place of a bug in a native decoder.
CRASH = b"nomarr-example: crash"
HANG = b"nomarr-example: hang"

_HANN = [0.5 - 0.5 * math.cos(2 * math.pi * n / WINDOW) for n in range(WINDOW)]
_ROOTS = [cmath.exp(-2j * math.pi * n / WINDOW) for n in range(WINDOW // 2)]


class BadSound(Exception):
    """The file cannot be measured; the message says why."""


class Sound(NamedTuple):
    """An open file. ``blocks`` has the samples of all channels in turns."""

    kind: str
    rate: int
    channels: int
    frames: int
    full_scale: int
    blocks: Iterator[array[int]]


def can_read_flac() -> bool:
    return importlib.util.find_spec("soundfile") is not None


def measure(path: str, on_block: Callable[[], None]) -> dict[str, object]:
    """Return the measures of a file; BadSound or OSError if it cannot be read.

    ``on_block`` is called after each block, as progress. Silence has no loudness and no centroid.
    """
    with _open(path) as file:
        head = file.read(4096)
        file.seek(0)
        _decode_natively(head)
        if head.startswith(b"fLaC"):
            sound = _open_flac(file)
        elif head.startswith(b"RIFF"):
            sound = _open_wav(file)
        else:
            raise BadSound("neither WAV nor FLAC" if head else "the file is empty")
        return _measure(sound, on_block)


def _measure(sound: Sound, on_block: Callable[[], None]) -> dict[str, object]:
    squares = peak = 0
    magnitudes = [0.0] * (WINDOW // 2)
    every = max(1, sound.frames // (_block_of(sound.frames) * SPECTRA))
    for number, block in enumerate(sound.blocks):
        squares += sum(map(mul, block, block))
        peak = max(peak, max(block), -min(block))
        mono = block[:: sound.channels][:WINDOW]  # the first channel will do for the brightness
        if number % every == 0 and (len(mono) == WINDOW or not number):
            magnitudes = [a + b for a, b in zip(magnitudes, spectrum(mono), strict=True)]
        on_block()
    rms = math.sqrt(squares / (sound.frames * sound.channels))
    weight = sum(magnitudes)
    step_hz = sound.rate / WINDOW
    centroid = sum(n * step_hz * value for n, value in enumerate(magnitudes))
    return {
        "format": sound.kind,
        "rate_hz": sound.rate,
        "channels": sound.channels,
        "duration_s": round(sound.frames / sound.rate, 3),
        "loudness_dbfs": _decibels(rms / sound.full_scale),
        "peak_dbfs": _decibels(peak / sound.full_scale),
        "centroid_hz": round(centroid / weight, 1) if weight else None,
    }


def spectrum(samples: array[int]) -> list[float]:
    """Return the magnitudes of frequencies from 0 to half the rate; a short window is padded."""
    mean = sum(samples) / len(samples)
    padded = [*(value - mean for value in samples), *[0.0] * (WINDOW - len(samples))]
    found = _transform([complex(a * b) for a, b in zip(padded, _HANN, strict=True)], _ROOTS)
    return [abs(value) for value in found[: WINDOW // 2]]


def _transform(values: list[complex], roots: list[complex]) -> list[complex]:
    """Return the Fourier transform; ``roots`` are half as many as the values."""
    if len(values) == 1:
        return values
    even, odd = (_transform(values[start::2], roots[::2]) for start in (0, 1))
    turned = list(map(mul, roots, odd))
    return [a + b for a, b in zip(even, turned, strict=True)] + [
        a - b for a, b in zip(even, turned, strict=True)
    ]


def _decibels(ratio: float) -> float | None:
    return round(20 * math.log10(ratio), 2) + 0.0 if ratio else None  # never -0.0


def _open(path: str) -> BinaryIO:
    """Open a regular file without waiting for a pipe or device of that name."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadSound("it is no regular file")
    return open(fd, "rb")


def _block_of(frames: int) -> int:
    """Return the block size: short for a short file, so that all of it is measured."""
    return min(BLOCK, max(WINDOW, frames // SPECTRA))


def _check(kind: str, rate: int, channels: int, frames: int) -> None:
    if rate <= 0 or not 0 < channels <= MAX_CHANNELS:
        raise BadSound(f"a {kind} with {channels} channels and {rate} frames a second")
    if frames <= 0:
        raise BadSound("there is no sound in it")


def _open_wav(file: BinaryIO) -> Sound:
    try:
        reader = wave.open(file)  # noqa: SIM115 (the file is closed by who opened it)
    except (wave.Error, EOFError, RuntimeError) as error:
        raise BadSound(f"a broken WAV: {str(error) or 'the header is cut short'}") from error
    rate, channels, frames = reader.getframerate(), reader.getnchannels(), reader.getnframes()
    width = reader.getsampwidth()
    _check("WAV", rate, channels, frames)
    if width > 4:
        raise BadSound(f"a WAV with {width} bytes a sample")

    def read() -> Iterator[array[int]]:
        left = frames
        while left:
            wanted = min(left, _block_of(frames))
            data = reader.readframes(wanted)
            if len(data) < wanted * channels * width:
                raise BadSound(f"a broken WAV: cut short, {left} of {frames} frames to go")
            yield _samples(data, width)
            left -= wanted

    full_scale = 1 << (31 if width == 3 else 8 * width - 1)
    return Sound("wav", rate, channels, frames, full_scale, read())


def _samples(data: bytes, width: int) -> array[int]:
    """Return little-endian samples as integers; 24 bits become the upper bits of 32."""
    if width == 1:  # the only width without a sign
        return array("b", bytes(value ^ 0x80 for value in data))
    if width == 3:
        wide = bytearray(len(data) // 3 * 4)
        for n in range(3):
            wide[n + 1 :: 4] = data[n::3]
        data = bytes(wide)
    samples = array("h" if width == 2 else "i", data)
    if sys.byteorder == "big":
        samples.byteswap()
    return samples


def _open_flac(file: BinaryIO) -> Sound:
    try:
        import soundfile  # only who has FLACs needs it
    except (ImportError, OSError) as error:  # OSError: the C library is missing
        raise BadSound("FLAC needs the Debian package python3-soundfile") from error
    try:
        reader = soundfile.SoundFile(file)
    except RuntimeError as error:
        raise BadSound(f"a broken FLAC: {_said_by(error)}") from error
    _check("FLAC", reader.samplerate, reader.channels, reader.frames)

    def read() -> Iterator[array[int]]:
        left = reader.frames
        while left:
            try:
                data = bytes(reader.buffer_read(min(left, _block_of(reader.frames)), "int32"))
            except RuntimeError as error:
                raise BadSound(f"a broken FLAC: {_said_by(error)}") from error
            if not data:
                raise BadSound(f"a broken FLAC: cut short, {left} of {reader.frames} frames to go")
            yield array("i", data)
            left -= len(data) // (4 * reader.channels)

    return Sound("flac", reader.samplerate, reader.channels, reader.frames, 1 << 31, read())


def _said_by(error: RuntimeError) -> str:
    """Return the message without the name of the file object."""
    return str(getattr(error, "error_string", error))


def _decode_natively(head: bytes) -> None:
    """Stands in for a bug in a native decoder: plain Python neither crashes nor hangs by itself.

    Only files that make_music.py made for it have the marks; take this out of a tagger of your own.
    """
    if CRASH in head:
        signal.raise_signal(signal.SIGSEGV)
    if HANG in head:
        _wait_for_ever()


def _wait_for_ever() -> None:
    while True:
        time.sleep(1)
