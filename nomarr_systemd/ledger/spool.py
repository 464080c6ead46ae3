"""Failures that happened while the store was away: kept as files, booked later, exactly once.

A file is written whole before the worker is restarted, and removed only after its booking is
durable. A kill in between books it again, and the ledger knows the invocation.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from types import NoneType
from typing import Any, Final

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.ledger_record import DECISIONS
from nomarr_systemd.core.policy import Decision, Evidence
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import Spooled
from nomarr_systemd.host.files import remove, sync_directory, write_durably

SUFFIX = ".json"
BAD_SUFFIX = ".bad"
MAX_BYTES = 65536

# The fields of a death that are kept, each with the types it may have.
_DEATH: Final[dict[str, tuple[type, ...]]] = {
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


class Spool:
    """The directory ``<state>/spool``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def write(self, entry: Spooled) -> None:
        """Write an entry durably. Writing it again is harmless."""
        split_invocation(entry.death.invocation)  # it becomes a file's name
        path = os.path.join(self.directory, entry.death.invocation + SUFFIX)
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
        """Return all entries, oldest first, and the names of files that are none."""
        entries, bad = [], []
        try:
            names = os.listdir(self.directory)
        except OSError:  # not there, or what is there is no directory
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
        return sorted(entries, key=lambda entry: (entry.at.wall_ms, entry.death.invocation)), bad

    def remove(self, invocations: Iterable[str]) -> None:
        """Remove entries that are booked."""
        names = [os.path.join(self.directory, each + SUFFIX) for each in invocations]
        gone = [remove(name) for name in names]
        if any(gone):
            sync_directory(self.directory)

    def set_aside(self, name: str) -> None:
        """Rename a file that is no entry, so that it is not read again."""
        path = os.path.join(self.directory, name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, path.removesuffix(SUFFIX) + BAD_SUFFIX)


def _encode(entry: Spooled) -> bytes:
    decision = {**entry.decision._asdict(), "evidence": entry.decision.evidence._asdict()}
    document = {
        "component_id": entry.death.component_id,
        "failure": {name: getattr(entry.death, name) for name in _DEATH},
        "decision": decision,
        "at": entry.at._asdict(),
    }
    return json.dumps(document).encode()


def _decode(content: bytes, invocation: str) -> Spooled:
    """The entry, or ValueError or BadName. Fields of a newer version are ignored."""
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    decision = _table(document, "decision")
    entry = Spooled(
        Death(
            parse_component(_checked(document, "component_id", str)).component_id,
            **{
                name: _checked(_table(document, "failure"), name, *types)
                for name, types in _DEATH.items()
            },
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
    split_invocation(entry.death.invocation)
    if entry.death.invocation != invocation or entry.decision.action not in DECISIONS:
        raise ValueError("the file has another failure's name, or no decision")
    return entry


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table: dict[str, Any] = _checked(document, name, dict)
    return table


def _checked(table: dict[str, Any], name: str, *types: type) -> Any:
    """Return the value if it has one of these types; else ValueError."""
    value = table.get(name)
    if type(value) not in types:
        raise ValueError(f"{name} is not what it should be")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair, which JSON can write, no store can keep
    return value
