"""Failures that happened while the store was away: kept as files, booked later, exactly once.

A file is written whole before the worker is restarted, and removed only after its booking is
durable. A kill in between books it again, and the ledger knows the invocation.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from types import NoneType
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.death import Failure
from nomarr_systemd.core.errors import BadDocument, BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.ledger_record import DECISIONS
from nomarr_systemd.core.policy import Decision, Evidence, Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host.files import remove, sync_directory, write_durably
from nomarr_systemd.ledger.ledger import Booked, Ledger

SUFFIX = ".json"
BAD_SUFFIX = ".bad"
MAX_BYTES = 65536

# A failure's fields, each with the types it may have.
_FAILURE: Final[dict[str, tuple[type, ...]]] = {
    "invocation": (str,),
    "kind": (str,),
    "code": (int,),
    "run_ms": (int, NoneType),
    "stop_asked": (bool,),
    "shutting_down": (bool,),
    "held": (str,),
    "supervisor_away": (bool,),
    "incident": (str,),
}


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
            if not os.path.isdir(self.directory):
                os.makedirs(self.directory, 0o700, exist_ok=True)
                sync_directory(os.path.dirname(self.directory))
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
            try:
                with open(os.path.join(self.directory, name), "rb") as file:
                    entries.append(_decode(file.read(MAX_BYTES), name.removesuffix(SUFFIX)))
            except FileNotFoundError:
                continue  # another process has booked it
            except (OSError, ValueError, BadName, RecursionError):
                bad.append(name)
        return sorted(entries, key=lambda entry: (entry.at.wall_ms, entry.failure.invocation)), bad

    def replay(self, ledger: Ledger, rules_for: Callable[[str], Rules]) -> Replay:
        """Book every entry and remove its file. Raises StoreUnavailable if the store is still
        away; what was booked by then is done. A file that is no failure is set aside."""
        entries, bad = self.read()
        booked = []
        for entry in entries:
            name = entry.failure.invocation + SUFFIX
            rules = rules_for(entry.component_id)
            try:
                result = ledger.book(*entry[:3], rules, entry.at)
            except BadDocument:
                bad.append(name)
                continue
            remove(os.path.join(self.directory, name))
            booked.append((entry, result))
        for name in bad:
            path = os.path.join(self.directory, name)
            with contextlib.suppress(FileNotFoundError):
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
    """The entry, or ValueError or BadName. What a newer version has added is passed over."""
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    decision = _table(document, "decision")
    entry = Spooled(
        parse_component(_checked(document, "component_id", str)).component_id,
        Failure(
            **{
                name: _checked(_table(document, "failure"), name, *types)
                for name, types in _FAILURE.items()
            }
        ),
        Decision(
            _checked(decision, "action", str),
            _checked(decision, "delay_ms", int),
            _checked(decision, "reason", str),
            Evidence(
                **{
                    name: _checked(_table(decision, "evidence"), name, int, NoneType)
                    for name in Evidence._fields
                }
            ),
        ),
        Moment(
            _checked(_table(document, "at"), "wall_ms", int),
            _checked(_table(document, "at"), "boot_id", str),
            _checked(_table(document, "at"), "boottime_ms", int),
        ),
    )
    split_invocation(entry.failure.invocation)
    if entry.failure.invocation != invocation or entry.decision.action not in DECISIONS:
        raise ValueError("the file has another failure's name, or no decision")
    return entry


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table: dict[str, Any] = _checked(document, name, dict)
    return table


def _checked(table: dict[str, Any], name: str, *types: type) -> Any:
    """The value, if it is there and of one of these types."""
    value = table.get(name)
    if type(value) not in types:
        raise ValueError(f"{name} is not what it should be")
    return value
