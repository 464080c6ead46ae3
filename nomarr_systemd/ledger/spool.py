"""Failures that happened while the store was away: kept as files, booked later, exactly once.

A file is written whole before the worker is restarted, and removed only after its booking is
durable. After a kill in between it is booked again, which changes nothing: the ledger knows the
invocation.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import BadName, StoreUnavailable
from nomarr_systemd.core.ids import parse_component, split_invocation
from nomarr_systemd.core.json import (
    as_object,
    get_bool,
    get_dict,
    get_int,
    get_int_or_none,
    get_str,
)
from nomarr_systemd.core.ledger_record import DECISIONS
from nomarr_systemd.core.policy import Action, Decision, Evidence
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host.files import remove, sync_directory, write_durably

if TYPE_CHECKING:
    from nomarr_systemd.core.world import Spooled

SUFFIX = ".json"
BAD_SUFFIX = ".bad"
MAX_BYTES = 65536

# The fields of a death that are kept.
_DEATH: Final = (
    *("invocation", "kind", "code", "run_ms", "stop_asked", "shutting_down", "held"),
    *("supervisor_away", "incident"),
)


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
        """Return all entries, oldest first, and the names of files that are not entries."""
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

    def has(self, invocation: str) -> bool:
        """Return True if the death of this run is spooled."""
        return os.path.exists(os.path.join(self.directory, invocation + SUFFIX))

    def count(self) -> int:
        """Return the number of entries; 0 if this user may not list them."""
        try:
            return sum(name.endswith(SUFFIX) for name in os.listdir(self.directory))
        except OSError:
            return 0

    def remove(self, invocations: Iterable[str]) -> None:
        """Remove entries that are booked."""
        names = [os.path.join(self.directory, each + SUFFIX) for each in invocations]
        with contextlib.suppress(OSError):  # what stays is booked again, which changes nothing
            gone = [remove(name) for name in names]
            if any(gone):
                sync_directory(self.directory)

    def set_aside(self, name: str) -> None:
        """Rename a file that is no entry, so that it is not read again."""
        path = os.path.join(self.directory, name)
        with contextlib.suppress(OSError):
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
    """Return the entry, or raise ValueError or BadName. Fields of a newer version are ignored."""
    doc = as_object(json.loads(content))
    failure, decision, at = (get_dict(doc, name) for name in ("failure", "decision", "at"))
    evidence = get_dict(decision, "evidence")
    from nomarr_systemd.core.world import Spooled  # `status` only counts the files

    entry = Spooled(
        Death(
            parse_component(get_str(doc, "component_id")).component_id,
            get_str(failure, "invocation"),
            get_str(failure, "kind"),
            get_int(failure, "code"),
            run_ms=get_int_or_none(failure, "run_ms"),
            stop_asked=get_bool(failure, "stop_asked"),
            shutting_down=get_bool(failure, "shutting_down"),
            held=get_str(failure, "held"),
            supervisor_away=get_bool(failure, "supervisor_away"),
            incident=get_str(failure, "incident"),
        ),
        Decision(
            cast(Action, get_str(decision, "action")),
            get_int(decision, "delay_ms"),
            get_str(decision, "reason"),
            Evidence._make(
                [
                    *(get_int(evidence, name) for name in Evidence._fields[:-1]),
                    get_int_or_none(evidence, Evidence._fields[-1]),
                ]
            ),
        ),
        Moment(get_int(at, "wall_ms"), get_str(at, "boot_id"), get_int(at, "boottime_ms")),
    )
    split_invocation(entry.death.invocation)
    # Half a surrogate pair, which JSON can write and no store can keep, is a UnicodeEncodeError.
    if not set(entry.at.boot_id) <= set("0123456789abcdef"):
        raise ValueError("the moment has no boot id")
    for text in (entry.death.kind, entry.death.held, entry.death.incident, entry.decision.reason):
        text.encode()
    if entry.death.invocation != invocation or entry.decision.action not in DECISIONS:
        raise ValueError("the file has another failure's name, or no decision")
    return entry
