"""Jobs from a folder: new files once, changed ones again, and a lock that dies with its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import folder_jobs as example
import pytest
from folder_jobs import STATE, FolderJobs

from nomarr_systemd.core.errors import ConfigError, NotReady
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY

EXAMPLE = os.path.dirname(example.__file__)
# Takes everything there is; at "kill" it dies in the middle.
CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from folder_jobs import FolderJobs
source = FolderJobs(sys.argv[1], quiet_s=0)
while job := source.discover():
    if source.claim(job):
        os.write(1, f"{os.path.basename(job)}\\n".encode())
        if "kill" in job:
            os.kill(os.getpid(), signal.SIGKILL)
        source.complete(job, {"by": os.getpid()})
"""


def folder_jobs(folder: Path, *patterns: str) -> FolderJobs:
    return FolderJobs(str(folder), *patterns, quiet_s=0)


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What systemd gives to a worker."""
    state = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    return state


def states(state: Path) -> list[Path]:
    [place] = (state / "folders").iterdir()
    return list(place.iterdir())


def notes(state: Path) -> dict[str, dict[str, object]]:
    found = [json.loads(path.read_text()) for path in states(state)]
    return {os.path.basename(note["path"]): note for note in found}


def test_new_and_changed_files_are_jobs(tmp_path: Path, state: Path) -> None:
    for name in ("b.flac", "a.flac", "c.txt", "sub/d.flac"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    source = folder_jobs(tmp_path, "*.flac")
    done = []
    while job := source.discover():
        assert source.claim(job)
        done.append(os.path.relpath(job, tmp_path))
        source.complete(job, {"n": 1})
    assert done == ["a.flac", "b.flac", "sub/d.flac"]
    (tmp_path / "b.flac").write_text("longer")
    job = source.discover()
    assert job == str(tmp_path / "b.flac")
    assert source.claim(job)
    source.fail(job, RuntimeError("bad \udcff"))
    assert source.discover() is None
    assert notes(state)["b.flac"]["status"] == "error"
    assert notes(state)["a.flac"]["result"] == {"n": 1}


def test_a_file_on_its_way_waits(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert FolderJobs(str(tmp_path), quiet_s=3600).discover() is None
    os.utime(tmp_path / "a", (1, 1))
    assert FolderJobs(str(tmp_path), quiet_s=3600).discover()


def test_one_owner_and_release(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    one, other = folder_jobs(tmp_path), folder_jobs(tmp_path)
    job = one.discover()
    assert job
    assert one.claim(job)
    assert not other.claim(job)
    one.release(job)
    assert other.claim(job)
    (tmp_path / "a").write_text("changed meanwhile")
    other.complete(job, object())
    assert one.discover() == job  # it is new again
    os.unlink(job)
    assert not one.claim(job)
    assert one.discover() is None


def test_names_and_notes_of_any_kind(tmp_path: Path, state: Path) -> None:
    name = os.fsdecode(b"\xff\n")
    (tmp_path / name).write_text("x")
    source = folder_jobs(tmp_path)
    job = source.discover()
    assert job
    assert source.claim(job)
    source.release(job)
    [note] = states(state)
    for text in ("", "{", "[1]", '{"stamp": 7, "begun": "x"}'):
        note.write_text(text)
        assert source.claim(job)
        source.release(job)


def test_many_processes_and_one_that_kills(tmp_path: Path, state: Path) -> None:
    for n in range(100):
        (tmp_path / f"{n:03d}").write_text("x")
    (tmp_path / "050-kill").write_text("x")
    begun: Counter[str] = Counter()
    while folder_jobs(tmp_path).discover():
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path), EXAMPLE],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        for child in children:
            begun.update(child.communicate()[0].split())
    assert begun.pop("050-kill") == 2
    assert set(begun.values()) == {1}
    assert len(begun) == 100
    assert notes(state)["050-kill"]["status"] == "quarantined"


def test_a_state_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text("a file")
    with pytest.raises(ConfigError, match="cannot use"):
        FolderJobs(str(tmp_path), state=str(tmp_path / STATE))


def test_the_state_of_a_version_before_is_kept(tmp_path: Path, state: Path) -> None:
    (tmp_path / STATE).mkdir()
    (tmp_path / "a").write_text("x")
    source = folder_jobs(tmp_path)
    job = source.discover()
    assert job
    assert source.claim(job)
    source.complete(job, None)
    assert len(list((tmp_path / STATE).iterdir())) == 1
    assert folder_jobs(tmp_path).discover() is None
    assert not list(state.iterdir())


# Another user may write the folder: security finding 20


@needs_root
def test_pipes_of_another_user_hang_nobody(tmp_path: Path) -> None:
    """In the place of a state, and of a job."""
    (tmp_path / "a").write_text("x")
    os.mkfifo(tmp_path / "b")
    foreign = tmp_path / STATE
    foreign.mkdir()
    source = folder_jobs(tmp_path)
    job = source.discover()
    assert job == str(tmp_path / "a")
    os.mkfifo(foreign / source._name(job))
    for path in (foreign, foreign / source._name(job)):
        os.chown(path, NOBODY, NOBODY)
    source = folder_jobs(tmp_path)
    assert source.discover() == job
    assert source.claim(job)
    source.complete(job, None)
    assert source.discover() is None


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_state_that_is_no_plain_file_is_refused(tmp_path: Path, state: Path, kind: str) -> None:
    (tmp_path / "a").write_text("x")
    source = folder_jobs(tmp_path)
    job = source.discover()
    assert job
    [place] = (state / "folders").iterdir()
    name = place / source._name(job)
    os.mkfifo(name) if kind == "pipe" else name.symlink_to(tmp_path / "elsewhere")
    assert source.discover() == job
    with pytest.raises(NotReady, match="cannot write the state"):
        source.claim(job)
    assert not (tmp_path / "elsewhere").exists()


@needs_root
def test_a_state_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="another user's"):
        FolderJobs(str(tmp_path), state=str(foreign))
    os.chown(foreign, os.geteuid(), os.getegid())
    foreign.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        FolderJobs(str(tmp_path), state=str(foreign))
