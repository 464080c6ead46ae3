"""Users that tests run as."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NOBODY = 65534
T = TypeVar("T")


def open_to_all(directory: Path) -> None:
    """Let every user enter this directory of pytest's, and read it."""
    place = Path(tempfile.gettempdir())
    for each in (directory, *directory.parents):
        if each == place:
            return
        each.chmod(0o755)


def run_as(uid: int, function: Callable[[], T]) -> T:
    """What a function returns that runs as this user, without groups, in a child of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with open(writing, "wb") as pipe:
                pickle.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    result: T = pickle.loads(content)
    return result
