"""What the supervisor must still know after it was killed: runs, own kills, crashes, failures.

A file in the runtime directory, which systemd keeps over a restart and removes at a stop. One
record of fixed size per worker, written in one piece within a page: a kill tears none.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

RECORD: Final = 2048


class Memory:
    """Small JSON objects by component id."""

    def __init__(self, path: str) -> None:
        """OSError if the file cannot be used. A record that is none is passed over."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._found: dict[str, dict[str, Any]] = {}
        self._end = (os.fstat(self._fd).st_size + RECORD - 1) // RECORD
        for slot in range(self._end):
            fields = _parse(os.pread(self._fd, RECORD, slot * RECORD))
            name = fields.get("id")
            if isinstance(name, str) and name not in self._slots:
                self._slots[name] = slot
                self._found[name] = fields
            else:
                self._free.append(slot)

    def recall(self, component_id: str) -> dict[str, Any]:
        """What the supervisor before this one kept; {} if nothing."""
        return self._found.pop(component_id, {})

    def remembered(self) -> list[str]:
        return list(self._slots)

    def keep(self, component_id: str, fields: dict[str, Any]) -> None:
        """Replace a worker's record. What does not fit is left out, the longest value first."""
        fields = {"id": component_id, **fields}
        while len(data := json.dumps(fields).encode()) >= RECORD:
            longest = max(fields, key=lambda name: (name != "id", len(str(fields[name]))))
            del fields[longest]
        slot = self._slots.get(component_id)
        if slot is None:
            slot = self._slots[component_id] = self._take_slot()
        os.pwrite(self._fd, data.ljust(RECORD - 1) + b"\n", slot * RECORD)

    def forget(self, component_id: str) -> None:
        slot = self._slots.pop(component_id, None)
        self._found.pop(component_id, None)
        if slot is not None:
            os.pwrite(self._fd, b"\n".rjust(RECORD), slot * RECORD)
            self._free.append(slot)

    def close(self) -> None:
        os.close(self._fd)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
