"""Failures that happened while the store was away: kept as files, booked later, exactly once.

A file is written whole before the worker is restarted, and removed only after its booking is
durable. A kill in between books it again, and the ledger knows the invocation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import NamedTuple

from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.model import Decision, Evidence, Failure, Moment, Rules
from nomarr_systemd.host.files import remove, sync_directory, write_durably
from nomarr_systemd.ledger import Booked, Ledger

SUFFIX = ".json"
BAD_SUFFIX = ".bad"


class Spooled(NamedTuple):
    """One failure, what was decided without the store, and when."""

    component_id: str
    failure: Failure
    decision: Decision
    at: Moment


class Replay(NamedTuple):
    """What a replay did: bookings in order of time, and files that were no failures."""

    booked: list[tuple[Spooled, Booked]]
    bad: list[str]


class Spool:
    """The directory ``<state>/spool``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def write(self, entry: Spooled) -> None:
        """Keep an entry, durably. Writing it again is harmless."""
        split_invocation(entry.failure.invocation)  # it becomes a file's name
        path = os.path.join(self.directory, entry.failure.invocation + SUFFIX)
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            write_durably(path, _encode(entry))
        except OSError as error:
            raise StoreUnavailable(
                f"cannot spool a failure to {path}: {error.strerror}",
                hint="the failure stays pending; free space there or mend the store",
            ) from error

    def read(self) -> tuple[list[Spooled], list[str]]:
        """All entries, oldest first, and the names of files that are none."""
        entries, bad = [], []
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return [], []
        for name in names:
            if not name.endswith(SUFFIX):
                continue  # a write that was killed halfway, or one set aside
            with open(os.path.join(self.directory, name), "rb") as file:
                content = file.read()
            try:
                entries.append(_decode(content, name.removesuffix(SUFFIX)))
            except (ValueError, TypeError, KeyError, BadName, RecursionError):
                bad.append(name)
        return sorted(entries, key=lambda entry: (entry.at.wall_ms, entry.failure.invocation)), bad

    def replay(self, ledger: Ledger, rules_for: Callable[[str], Rules]) -> Replay:
        """Book every entry and remove its file. Raises StoreUnavailable if the store is still
        away; what was booked by then is done. A file that is no failure is set aside."""
        entries, bad = self.read()
        booked = []
        for entry in entries:
            rules = rules_for(entry.component_id)
            result = ledger.book(*entry[:3], rules, entry.at)
            remove(os.path.join(self.directory, entry.failure.invocation + SUFFIX))
            booked.append((entry, result))
        for name in bad:
            path = os.path.join(self.directory, name)
            os.rename(path, path.removesuffix(SUFFIX) + BAD_SUFFIX)
        if booked or bad:
            sync_directory(self.directory)
        return Replay(booked, bad)


def _encode(entry: Spooled) -> bytes:
    decision = {**entry.decision._asdict(), "evidence": entry.decision.evidence._asdict()}
    document = {
        "component_id": entry.component_id,
        "failure": entry.failure._asdict(),
        "decision": decision,
        "at": entry.at._asdict(),
    }
    return json.dumps(document).encode()


def _decode(content: bytes, invocation: str) -> Spooled:
    """The entry, or any of ValueError, TypeError, KeyError, BadName."""
    document = json.loads(content)
    evidence = Evidence(**document["decision"].pop("evidence"))
    entry = Spooled(
        parse_component(document["component_id"]).component_id,
        Failure(**document["failure"]),
        Decision(**document["decision"], evidence=evidence),
        Moment(**document["at"]),
    )
    split_invocation(entry.failure.invocation)
    if entry.failure.invocation != invocation:
        raise ValueError("the file has another failure's name")
    numbers = (entry.at.wall_ms, entry.at.boottime_ms, entry.failure.code, entry.decision.delay_ms)
    if not all(type(number) is int for number in numbers):
        raise TypeError("a number is not one")
    return entry
