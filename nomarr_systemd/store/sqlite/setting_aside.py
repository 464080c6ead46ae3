"""Renames a corrupt database and its companions, so that a new one can begin at its path.

A note is written first: after a kill, the next process that opens the file finishes the renaming,
and no file is ever opened without its log. The note holds only a time stamp: no name is read from a
file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Final

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.host.log import CRITICAL, log
from nomarr_systemd.store.sqlite.beside import COMPANIONS, read_note

_STAMP: Final = re.compile(r"\d{8}T\d{6}Z(?:-\d{1,4})?\n")


def is_begun(path: str) -> bool:
    """True if a process was killed while it renamed the database at ``path``."""
    return os.path.lexists(_note(path))


def begin(path: str, why: str) -> None:
    """Rename the database; call it with the lock."""
    stamp = moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 1
    while os.path.lexists(_aside(path, stamp)):
        number += 1
        stamp = f"{moment}-{number}"
    try:
        with open(_note(path), "x", encoding="ascii") as file:
            file.write(f"{stamp}\n")
            file.flush()
            os.fsync(file.fileno())
        finish(path, why)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} is corrupt ({why}) and cannot be set aside: {error.strerror}",
            hint=f"move {path}* away by hand",
        ) from error


def finish(path: str, why: str = "found earlier") -> None:
    """Finish the renaming that the note names; call it with the lock, any number of times."""
    try:
        note = read_note(_note(path))
    except FileNotFoundError:
        return  # another process was faster
    if not _STAMP.fullmatch(note):
        os.unlink(_note(path))  # cut short by a kill: nothing had been renamed yet
        return
    aside = _aside(path, note.strip())
    # The database last: a new one must never get the old one's write-ahead log.
    for companion in COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path + companion, aside + companion)
    os.unlink(_note(path))
    log(
        CRITICAL,
        f"{path} is corrupt ({why}). It was set aside as {aside} and a new, empty one begun."
        " Masks in systemd still hold; restart counts begin again.",
    )


def _note(path: str) -> str:
    return f"{path}.setting-aside"


def _aside(path: str, stamp: str) -> str:
    return f"{path}.corrupt-{stamp}"
