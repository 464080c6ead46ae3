"""Kill a function at each system call that it makes. A fork of this process runs it, and strace is
attached to that: no Python starts, and nothing but the function is traced. What holds a SQLite
database open must not fork: the child would believe that it has its locks.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

CALLS: Final = "pwrite64,write,fdatasync,fsync,rename,unlink,ftruncate,fchmod,mkdir,link,flock"
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)

Act = Callable[[], object]


def run(act: Act) -> int:
    """Do it in a child; return the child's exit status."""
    pid, go = _fork(act)
    os.close(go)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trace(act: Act, *options: str) -> int:
    """Do it in a child under strace; return the child's exit status, negative for a signal."""
    pid, go = _fork(act)
    command = ["strace", "-p", str(pid), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        said = strace.stderr.readline()
        os.close(go)
        _, status = os.waitpid(pid, 0)
        assert said.endswith("attached\n"), said + strace.stderr.read()
    return os.waitstatus_to_exitcode(status)


def _fork(act: Act) -> tuple[int, int]:
    """The child's pid, and what it waits for: that this is closed."""
    closed, go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, if a test left one
        pid = os.fork()
    if not pid:
        _do(act, closed, go)
    os.close(closed)
    return pid, go


def _do(act: Act, closed: int, go: int) -> None:
    """In the child, which never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        os.close(go)
        os.read(closed, 1)
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def kill_points(act: Act, log: Path) -> list[tuple[str, int]]:
    """Every call that one good run makes: its name and its number."""
    assert trace(act, *_options(log)) == 0
    counts = collections.Counter(re.findall(r"^\d+ +([a-z0-9]+)\(", log.read_text(), re.MULTILINE))
    return [(name, number) for name, count in counts.items() for number in range(1, count + 1)]


def kill(act: Act, log: Path, name: str, number: int) -> None:
    """Do it in a child that is killed at this call."""
    status = trace(act, *_options(log), "-e", f"inject={name}:signal=SIGKILL:when={number}")
    assert status == -9, (name, number)


def _options(log: Path) -> tuple[str, ...]:
    return ("-f", "-e", f"trace={CALLS}", "-o", str(log))
