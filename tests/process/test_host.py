"""Files of the host that every part reads: the lock, holds, and what was applied; and what systemd
is told."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import ConfigError, NotPermitted
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.configuration import NotApplied, read_applied
from nomarr_systemd.host.files import locked, write_all_durably
from nomarr_systemd.host.holds import Holds, make_pause
from nomarr_systemd.host.layout import Paths, make_programs
from nomarr_systemd.systemd import notify
from tests.support.capabilities import needs_root
from tests.support.users import NOBODY, open_to_all, run_as

TAG = Component("tag", 0)
CHECKOUT = Path(__file__).parents[2]


def test_many_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    files = {str(tmp_path / f"{number}"): b"new" for number in range(3)}
    write_all_durably(str(tmp_path), files, mode=0o644)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(
        "012", b"new"
    )
    assert (tmp_path / "0").stat().st_mode & 0o777 == 0o644
    (tmp_path / "1").unlink()
    (tmp_path / "1").mkdir()
    with pytest.raises(IsADirectoryError):
        write_all_durably(str(tmp_path), dict.fromkeys(files, b"newer"), mode=0o644)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert (tmp_path / "2").read_bytes() == b"new"


def test_a_lock_with_patience_gives_up_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with locked(str(path)):
        began = time.monotonic()
        with (
            pytest.raises(TimeoutError, match=r"stayed locked for 0\.1 s.*lock"),
            locked(str(path), 0.1),
        ):
            raise AssertionError("it is ours")
        assert time.monotonic() - began >= 0.1
        with pytest.raises(TimeoutError), locked(str(path), 0):
            raise AssertionError("it is ours")
    with locked(str(path), 0):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_is_had_as_soon_as_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = os.fork()
    if not child:
        os.close(fd)  # the lock goes with the last of its descriptors
        try:
            with locked(str(path), 20):
                os._exit(0)
        finally:
            os._exit(1)
    os.close(fd)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels"), locked(str(tmp_path / "lock")):
        raise AssertionError("it followed")
    assert not (tmp_path / "elsewhere").exists()


def test_a_hold_that_cannot_be_read_holds(tmp_path: Path) -> None:
    """Finding H: one such entry, and the controller restarted nobody."""
    holds = Holds(str(tmp_path))
    (tmp_path / "tag-0").mkdir()
    assert holds.read(TAG).startswith("its hold cannot be read: Is a directory")
    assert not holds.is_paused(TAG)
    holds.release(TAG)
    assert (tmp_path / "tag-0").is_dir()
    assert holds.instances() == ["tag-0"]


def test_the_end_of_a_pause_is_that_of_a_worker_that_there_is(tmp_path: Path) -> None:
    """A worker that was removed while it finished its job keeps its hold until the next apply."""
    holds = Holds(str(tmp_path))
    holds.pause(Component("gone", 0), make_pause("anna", "", 1000))
    assert holds.next_end_ms([TAG]) is None
    holds.pause(TAG, make_pause("anna", "", 2000))
    assert holds.next_end_ms([TAG]) == 2000


def test_a_resume_that_was_cut_off_ends_no_hold_of_an_incident(tmp_path: Path) -> None:
    holds = Holds(str(tmp_path))
    holds.pause(TAG, make_pause("anna"))
    holds.begin_resume(TAG)
    assert holds.is_over(TAG, 0)
    holds.hold(TAG, "incident: its pool is down")
    assert not holds.is_over(TAG, 0)
    holds.release(TAG)
    assert holds.is_over(TAG, 0)


@needs_root
def test_a_hold_that_is_not_ours_to_read_holds(tmp_path: Path) -> None:
    holds = Holds(str(tmp_path))
    holds.hold(TAG, "why not")
    (tmp_path / "tag-0").chmod(0o600)
    open_to_all(tmp_path)
    said = run_as(NOBODY, lambda: holds.read(TAG))
    assert said.startswith("its hold cannot be read: Permission denied")


def test_what_was_applied(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path), str(tmp_path))
    with pytest.raises(NotApplied) as before:
        read_applied(paths)
    assert before.value.hint == "run nomarrctl apply first"
    config = Config(pools=(Pool("tag", command=("/bin/true",)),))
    file = Path(paths.resolved)
    file.write_text(json.dumps(config.to_dict()))
    assert read_applied(paths) == config
    for broken in ("", "[]", '{"pools": 1}', "[" * 100_000, "\udcff"):
        file.write_text(broken, errors="surrogateescape")
        with pytest.raises(ConfigError) as found:
            read_applied(paths)
        assert not isinstance(found.value, NotApplied)


@needs_root
def test_what_was_applied_and_is_closed_is_not_called_missing(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path), str(tmp_path))
    Path(paths.resolved).write_text(json.dumps(Config().to_dict()))
    Path(paths.resolved).chmod(0o600)
    open_to_all(tmp_path)

    def look() -> str:
        try:
            read_applied(paths)
        except NotApplied:
            return "nothing"
        except NotPermitted as error:
            return str(error)
        return "read"

    assert run_as(NOBODY, look) == f"this user may not read {paths.resolved}"


@pytest.mark.parametrize("directory", ["with a space", "x" * 150])
def test_programs_find_a_python_whose_path_the_kernel_cannot_read(
    tmp_path: Path, directory: str
) -> None:
    """Of a checkout in such a directory, and its .venv."""
    python = tmp_path / directory / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    make_programs(str(tmp_path / "libexec"), python=str(python), search=[str(CHECKOUT)])
    done = subprocess.run(
        [tmp_path / "libexec/nomarr-controller", "an argument"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "usage: nomarr-controller" in done.stderr


def test_systemd_is_told_of_progress_eight_times_in_a_period_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0nomarr-test-{os.getpid()}")
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@nomarr-test-{os.getpid()}")
        monkeypatch.setattr(notify, "_fed_s", 0.0)
        monkeypatch.setenv("WATCHDOG_USEC", "80000000")
        clock_s = 1000.0
        monkeypatch.setattr(notify, "monotonic", lambda: clock_s)
        told = []
        for clock_s in (1000.0, 1000.5, 1009.9, 1010.0, 1019.0, 1020.1):
            notify.feed_watchdog()
            with contextlib.suppress(BlockingIOError):
                assert manager.recv(100) == b"WATCHDOG=1"
                told.append(clock_s)
        assert told == [1000.0, 1010.0, 1020.1]
