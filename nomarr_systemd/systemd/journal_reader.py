"""Reading the journal: entries that match, backwards from a moment, within a bounded time.

What the entries say is untrusted. Only fields that begin with an underscore are journald's own
word; callers ask for those wherever it matters who is speaking.
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

# Entries that mean the same on every system (systemd's catalogue).
STOPPED: Final = "9d1aaa27d60140bd96365438aad20286"
EXITED: Final = "98e322203f7a4ed290d09fe03c09fe15"
FAILED: Final = "d9b373ed55a64feb8242e02dbe79a49c"
RESOURCES: Final = "ae8f7b866b0347b9af31fe1c80b127c0"
COREDUMP: Final = "fc2e22bc6ee647b6b90729ab34a250b1"
DROPPED: Final = "a596d6fe7bfa4994828e72309e95d61e"

# Alternatives, each of them fields that must all be so.
Terms = Sequence[Sequence[str]]

_OWN_FIELDS: Final = ("__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "__CURSOR")
_MAX_FIELD: Final = 65_536
_FILES: Final = ("/var/log/journal/*/system.journal", "/run/log/journal/*/system.journal")


class Entry(NamedTuple):
    """One entry; ``fields`` as journald keeps them, but only their first value."""

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
    """This machine's journal, as far as we may read it. ``deadline`` is CLOCK_MONOTONIC."""

    def __init__(self, *, deadline: float) -> None:
        self._deadline = deadline
        self._reader = journal.Reader(flags=journal.LOCAL_ONLY)
        # As they are: making a UUID of each id costs more than reading it.
        self._reader.converters = dict.fromkeys(_OWN_FIELDS, lambda value: value)
        self._reader.data_threshold = _MAX_FIELD
        self.cut_short = False  # the deadline came first

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
        """Whether the system's own entries can be seen: root's and a group's privilege."""
        files = [name for pattern in _FILES for name in glob.glob(pattern)]
        return any(os.access(name, os.R_OK) for name in files)

    @property
    def is_there(self) -> bool:
        """Whether any of it can be read, be it only one's own."""
        return bool(self._reader.has_persistent_files() or self._reader.has_runtime_files())

    @property
    def is_volatile(self) -> bool:
        """Whether a reboot forgets it."""
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
        """The last ``limit`` entries before ``until_us`` that are wanted, oldest first."""
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
        """The first entry from that moment on that is wanted."""
        self._match(terms)
        self._reader.seek_realtime(since_us)
        return next(filter(wanted, self._walk(self._reader.get_next)), None)

    def follow(self, terms: Terms, since_us: int) -> Iterator[Entry]:
        """Entries after that moment, and new ones as they come, for ever."""
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
            except OSError:  # a file that is damaged, or was removed under our hands
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
        if isinstance(first, bytes):  # no UTF-8
            yield name, first.decode(errors="replace")
        elif isinstance(first, str):
            yield name, first
