"""The example application: what it measures is so, bad files fail alone, and tags are never half
written.
"""

from __future__ import annotations

import cmath
import errno
import functools
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import make_music
import pytest
import sound
import tagger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nomarr_systemd.config.file import parse
from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.worker.errors import NonFatal, NotReady
from tests.support.depth import times
from tests.support.kill_points import kill, kill_points
from tests.support.running_worker import ROOT, Start, workers

EXAMPLE = ROOT / "examples/tagger"
SYSTEM_PYTHON = "/usr/bin/python3"
TAG = """
import sys
sys.path[:0] = {search!r}
from tagger import Tagger
Tagger().process(sys.argv[1])
""".replace("{search!r}", repr([str(EXAMPLE), str(ROOT)]))
FLAC = """
import json, sys
sys.path.insert(0, sys.argv[1])
import make_music, sound
path = sys.argv[2]
make_music.write_flac(path, make_music.sine(1000))
print(json.dumps(sound.measure(path, lambda: None)))
data = open(path, "rb").read()
for size in (4, 20, 42, 100, len(data) // 2, len(data) - 1):
    with open(path, "wb") as file:
        file.write(data[:size])
    try:
        sound.measure(path, lambda: None)
    except sound.BadSound as error:
        print(error)
"""


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagger") / "music"
    assert make_music.main([str(folder)]) == 0
    return folder


@pytest.fixture(name="start")
def start_workers() -> Iterator[Start]:
    with workers() as start:
        yield start


def measure(path: Path, data: bytes) -> dict[str, object]:
    path.write_bytes(data)
    return sound.measure(str(path), lambda: None)


@pytest.mark.parametrize("level", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("hertz", [250, 1000, 3000, 6000])
def test_a_sine(hertz: int, level: float, tmp_path: Path) -> None:
    found = measure(tmp_path / "a.wav", make_music.to_wav(make_music.sine(hertz, level)))
    assert found["loudness_dbfs"] == pytest.approx(-3.01 + 20 * math.log10(level), abs=0.01)
    assert found["peak_dbfs"] == pytest.approx(20 * math.log10(level), abs=0.01)
    # A window cuts a sine short, and what that adds lies all over the spectrum.
    assert found["centroid_hz"] == pytest.approx(hertz, rel=0.01, abs=5)
    assert (found["rate_hz"], found["channels"], found["duration_s"]) == (16000, 1, 1.0)


def test_other_sounds(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    silent = measure(path, make_music.to_wav([0] * 5000))
    assert [silent[name] for name in ("loudness_dbfs", "peak_dbfs", "centroid_hz")] == [None] * 3
    square = measure(path, make_music.to_wav([-32768, -32768, 32767, 32767] * 4000))
    assert square["loudness_dbfs"] == square["peak_dbfs"] == 0.0
    chirp = measure(path, make_music.to_wav(make_music.chirp(1000, 3000)))
    assert chirp["centroid_hz"] == pytest.approx(2000, rel=0.1)  # all of it, not its beginning
    noise = measure(path, make_music.to_wav(make_music.noise(1.0)))
    assert noise["loudness_dbfs"] == pytest.approx(-4.77, abs=0.1)  # 1/√3
    assert noise["centroid_hz"] == pytest.approx(4000, rel=0.05)
    one = measure(path, make_music.to_wav([1000]))
    assert one["peak_dbfs"] == pytest.approx(-30.31, abs=0.01)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_width_and_channel_counts(width: int, channels: int, tmp_path: Path) -> None:
    samples = [value for each in make_music.sine(1000) for value in [each, 0][:channels]]
    data = make_music.to_wav(samples, channels=channels, width=width)
    found = measure(tmp_path / "a.wav", data)
    loudness = -3.01 - 10 * math.log10(channels)  # half of the samples are silent
    assert found["loudness_dbfs"] == pytest.approx(loudness, abs=0.02)
    assert found["channels"] == channels
    assert found["peak_dbfs"] == pytest.approx(0, abs=0.1)


def test_a_long_file_is_read_in_blocks(tmp_path: Path) -> None:
    blocks = []
    path = tmp_path / "a.wav"
    path.write_bytes(make_music.to_wav(make_music.sine(1000) * 70))
    found = sound.measure(str(path), lambda: blocks.append(1))
    assert found["duration_s"] == 70.0
    assert found["centroid_hz"] == pytest.approx(1000, rel=0.01)
    assert len(blocks) == math.ceil(70 * 16000 / sound.BLOCK)


def test_the_spectrum_is_fouriers() -> None:
    chance = random.Random(7)
    samples = array("h", [chance.randrange(-9999, 9999) for _ in range(sound.WINDOW)])
    mean = sum(samples) / len(samples)
    found = sound.spectrum(samples)
    for k in (0, 1, 100, 777, sound.WINDOW // 2 - 1):
        expected = sum(
            (value - mean)
            * (0.5 - 0.5 * math.cos(2 * math.pi * n / sound.WINDOW))
            * cmath.exp(-2j * math.pi * k * n / sound.WINDOW)
            for n, value in enumerate(samples)
        )
        assert found[k] == pytest.approx(abs(expected), rel=1e-6)


def test_the_music_that_is_made(music: Path) -> None:
    for path in sorted((music / "songs").glob("*.*")):
        tagger.Tagger().process(str(path))
    for path in sorted((music / "broken").iterdir()):
        with pytest.raises(NonFatal):
            tagger.Tagger().process(str(path))
        assert not os.path.exists(tagger.sidecar_of(str(path)))
    assert make_music.main([str(music)]) == 1  # never over what is there
    assert make_music.main([]) == 2


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe of that name must not keep the worker waiting."""
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "folder.wav").mkdir()
    for name in ("pipe.wav", "folder.wav"):
        with pytest.raises(NonFatal, match="no regular file"):
            tagger.Tagger().process(str(tmp_path / name))
    with pytest.raises(NonFatal, match="No such file"):
        tagger.Tagger().process(str(tmp_path / "nowhere.wav"))
    with pytest.raises(NonFatal, match="Not a directory"):
        tagger.Tagger().process("/dev/null/a.wav")


WHOLE = make_music.to_wav(make_music.sine(1000)[:3000])


@settings(
    max_examples=times(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 47), st.integers(0, 255)), max_size=6),
    size=st.one_of(st.just(len(WHOLE)), st.integers(0, len(WHOLE))),
)
def test_hostile_headers(tmp_path: Path, changes: list[tuple[int, int]], size: int) -> None:
    """Whatever is written there, it is measured or it is bad."""
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    try:
        found = measure(tmp_path / "a.wav", bytes(data[:size]))
    except sound.BadSound:
        return
    json.dumps(found, allow_nan=False)


def test_a_header_that_asks_for_too_much(tmp_path: Path) -> None:
    many = WHOLE[:22] + struct.pack("<H", 60000) + WHOLE[24:]
    with pytest.raises(sound.BadSound, match="60000 channels"):
        measure(tmp_path / "a.wav", many)
    still = WHOLE[:24] + struct.pack("<I", 0) + WHOLE[28:]
    with pytest.raises(sound.BadSound, match="0 frames a second"):
        measure(tmp_path / "a.wav", still)


def test_flac_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    (tmp_path / "a.flac").write_bytes(b"fLaC" + bytes(100))
    with pytest.raises(NonFatal, match="FLAC needs the Debian package python3-soundfile"):
        tagger.Tagger().process(str(tmp_path / "a.flac"))


def test_flac(tmp_path: Path) -> None:
    """With Debian's library, which Debian's Python has."""
    have = subprocess.run([SYSTEM_PYTHON, "-c", "import soundfile"], check=False)
    if have.returncode:
        pytest.skip("python3-soundfile is missing: run packaging/prepare test")
    command = [SYSTEM_PYTHON, "-B", "-c", FLAC, str(EXAMPLE), str(tmp_path / "a.flac")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *errors = done.stdout.splitlines()
    found = json.loads(first)
    assert (found["format"], found["loudness_dbfs"]) == ("flac", -3.01)
    assert found["centroid_hz"] == pytest.approx(1000, rel=0.01)
    assert len(errors) == 6
    assert all("broken FLAC" in error for error in errors), errors


@pytest.mark.parametrize("before", [None, "of an earlier day"])
def test_a_sidecar_is_whole_or_absent(before: str | None, tmp_path: Path) -> None:
    """Killed at every system call that writes, with and without one from before."""
    if not shutil.which("strace"):
        pytest.skip("strace is missing: run packaging/prepare test")

    def prepare(folder: str) -> tuple[Path, Path]:
        (tmp_path / folder).mkdir()
        song = tmp_path / folder / "song.wav"
        song.write_bytes(WHOLE)
        sidecar = Path(tagger.sidecar_of(str(song)))
        if before:
            sidecar.write_text(before)
        return song, sidecar

    def tag(song: Path) -> None:
        tagger.Tagger().process(str(song))

    song, sidecar = prepare("good")
    points = kill_points(functools.partial(tag, song), song.with_suffix(".strace"))
    whole = sidecar.read_text()
    assert json.loads(whole)["format"] == "wav"
    assert {name for name, _ in points} == {"unlink", "write", "fsync", "rename"}
    found = set()
    for name, number in points:
        song, sidecar = prepare(f"{name}-{number}")
        kill(functools.partial(tag, song), song.with_suffix(".strace"), name, number)
        text = sidecar.read_text() if sidecar.exists() else None
        assert text in (before, whole), (name, number)
        found.add(text)
        tag(song)
        left = {path.name for path in song.parent.iterdir()}
        assert left == {"song.wav", "song.strace", sidecar.name}
    assert found == {before, whole}


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    song = tmp_path / "song.wav"
    song.write_bytes(WHOLE)

    def fail(code: int) -> None:
        def fsync(_fd: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(errno.ENOSPC)
    with pytest.raises(NotReady, match="No space left"):
        tagger.Tagger().process(str(song))
    fail(errno.EIO)
    with pytest.raises(NonFatal, match="cannot write its tags"):
        tagger.Tagger().process(str(song))
    assert list(tmp_path.iterdir()) == [song]


def test_a_link_in_the_way(tmp_path: Path) -> None:
    song, other = tmp_path / "song.wav", tmp_path / "other"
    song.write_bytes(WHOLE)
    other.write_text("mine")
    (tmp_path / ".song.wav.tags.json.new").symlink_to(other)
    tagger.Tagger().process(str(song))
    assert other.read_text() == "mine"


def test_the_deadly_ones(music: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [sys.executable, "-B", "-c", TAG, str(music / "deadly/crash.wav")]
    done = subprocess.run(crash, capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV

    naps = iter(range(1000))

    def nap(_seconds: float) -> None:
        if next(naps) == 999:  # as good as for ever
            raise TimeoutError

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(TimeoutError):
        sound.measure(str(music / "deadly/hang.wav"), lambda: None)


def test_a_folder_is_watched(start: Start, tmp_path: Path) -> None:
    def put(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        os.utime(path, (1, 1))  # not on its way any more
        return Path(tagger.sidecar_of(str(path)))

    first, broken = put("a.wav", WHOLE), put("b.wav", b"no sound")
    worker = start(
        "tagger:FolderTagger",
        environment={"PYTHONPATH": f"{ROOT}:{EXAMPLE}", tagger.FOLDER: str(tmp_path)},
    )
    worker.until(first.exists)
    later = put("c.wav", WHOLE)
    worker.until(later.exists)
    assert worker.stop() == 0
    assert not broken.exists()
    assert "neither WAV nor FLAC" in worker.stderr


def test_a_folder_that_is_not_there(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tagger.FOLDER, "/nowhere")
    with pytest.raises(ConfigError, match="TAGGER_FOLDER is '/nowhere'"):
        tagger.FolderTagger().source()
    worker = start("tagger:FolderTagger", environment={"PYTHONPATH": f"{ROOT}:{EXAMPLE}"})
    assert worker.wait() == 78


def test_its_configuration() -> None:
    config = parse((EXAMPLE / "nomarr.toml").read_text(), state_directory="/var/lib/nomarr")
    assert [pool.name for pool in config.pools] == ["tag"]
    text = (EXAMPLE / "nomarr.toml").read_text().replace("\n#[", "\n[").replace("\n#e", "\ne")
    config = parse(text.replace("\n#E", "\nE"), state_directory="/var/lib/nomarr")
    assert [pool.entrypoint for pool in config.pools] == ["tagger:Tagger", "tagger:FolderTagger"]
