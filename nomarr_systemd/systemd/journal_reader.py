"""Reads the journal: entries that match, backwards from a moment, within a bounded time.

The content of an entry is untrusted. Only journald sets the fields that begin with an underscore;
callers match on those where the writer of an entry matters.
"""

from __future__ import annotations

import glob
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from systemd import journal

# MESSAGE_IDs of systemd and journald.
EXITED: Final = "98e322203f7a4ed290d09fe03c09fe15"
FAILED: Final = "d9b373ed55a64feb8242e02dbe79a49c"
RESOURCES: Final = "ae8f7b866b0347b9af31fe1c80b127c0"
COREDUMP: Final = "fc2e22bc6ee647b6b90729ab34a250b1"
DROPPED: Final = "a596d6fe7bfa4994828e72309e95d61e"

# A list of alternatives; each is a list of FIELD=value that must all match.
Terms = Sequence[Sequence[str]]

_OWN_FIELDS: Final = ("__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "__CURSOR")
_MAX_FIELD: Final = 65_536
_FILES: Final = ("/var/log/journal/*/system.journal", "/run/log/journal/*/system.journal")


class Entry(NamedTuple):
    """One entry; ``fields`` has the first value of each field."""

    wall_us: int
    fields: dict[str, str]

    @property
    def text(self) -> str:
        return self.fields.get("MESSAGE", "")

    @property
    def message_id(self) -> str:
        return self.fields.get("MESSAGE_ID", "")

    def get(self, name: str) -> str:
        return self.fields.get(name, "")


class Journal:
    """The journal of this machine, as far as we may read it. ``deadline`` is CLOCK_MONOTONIC."""

    def __init__(self, *, deadline: float) -> None:
        self._deadline = deadline
        self._reader = journal.Reader(flags=journal.LOCAL_ONLY)
        # No conversion: making a UUID of each id costs more than reading it.
        self._reader.converters = dict.fromkeys(_OWN_FIELDS, lambda value: value)
        self._reader.data_threshold = _MAX_FIELD
        self.cut_short = False  # True once the deadline ended a search

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()

    @property
    def is_readable(self) -> bool:
        """True if we may read the entries of the system: root and systemd-journal may."""
        files = [name for pattern in _FILES for name in glob.glob(pattern)]
        return any(os.access(name, os.R_OK) for name in files)

    @property
    def is_there(self) -> bool:
        """True if we may read any entries, if only our own."""
        return bool(self._reader.has_persistent_files() or self._reader.has_runtime_files())

    @property
    def is_volatile(self) -> bool:
        """True if a reboot deletes it."""
        return not self._reader.has_persistent_files()

    def read_back(
        self,
        terms: Terms,
        *,
        limit: int,
        until_us: int | None = None,
        since_us: int = 0,
        wanted: Callable[[Entry], bool] | None = None,
    ) -> list[Entry]:
        """Return the last ``limit`` wanted entries before ``until_us``, oldest first."""
        self._match(terms)
        if until_us is None:
            self._reader.seek_tail()
        else:
            self._reader.seek_realtime(until_us)
        found: list[Entry] = []
        for entry in self._walk(self._reader.get_previous):
            if entry.wall_us < since_us or len(found) >= limit:
                break
            if wanted is None or wanted(entry):
                found.append(entry)
        found.reverse()
        return found

    def find_after(
        self, terms: Terms, since_us: int, wanted: Callable[[Entry], bool]
    ) -> Entry | None:
        """Return the first wanted entry from ``since_us`` on."""
        self._match(terms)
        self._reader.seek_realtime(since_us)
        return next(filter(wanted, self._walk(self._reader.get_next)), None)

    def follow(self, terms: Terms, since_us: int) -> Iterator[Entry]:
        """Yield entries after ``since_us``, then new ones as they are written, without end."""
        self._match(terms)
        self._reader.seek_realtime(since_us)
        poll = select.poll()
        poll.register(self._reader.fileno(), self._reader.get_events())
        while True:
            while raw := self._reader.get_next():
                entry = _make_entry(raw)
                if entry.wall_us > since_us:
                    yield entry
            poll.poll(self._reader.get_timeout_ms())
            self._reader.process()

    def _match(self, terms: Terms) -> None:
        self._reader.flush_matches()
        for term in terms:
            for match in term:
                self._reader.add_match(match)
            self._reader.add_disjunction()

    def _walk(self, step: Callable[[], dict[str, Any]]) -> Iterator[Entry]:
        while not self.cut_short:
            try:
                raw = step()
            except OSError:  # a file is damaged or was just removed
                return
            if not raw:
                return
            yield _make_entry(raw)
            self.cut_short = time.monotonic() > self._deadline


def _make_entry(raw: dict[str, Any]) -> Entry:
    wall_us = raw.pop("__REALTIME_TIMESTAMP", 0)
    return Entry(int(wall_us), dict(_texts(raw.items())))


def _texts(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, value in items:
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, bytes):  # not UTF-8
            yield name, first.decode(errors="replace")
        elif isinstance(first, str):
            yield name, first
