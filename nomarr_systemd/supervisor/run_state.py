"""What the supervisor must know after it was killed: runs, its own kills, crashes, failures.

A file in the runtime directory, which systemd keeps over a restart and removes at a stop. It has
one record of fixed size per worker, written with one write within a page: none is half written.
If the file cannot be written (/run is full), the supervisor goes on and retries later.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final

from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.workers import Worker

RECORD: Final = 2048
RETRY_S: Final = 5.0


class RunState:
    """Small JSON objects by component id."""

    def __init__(self, path: str, loop: Loop) -> None:
        """Read the file. A record that cannot be parsed is skipped."""
        self._path = path
        self._loop = loop
        self._fd = -1
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._found: dict[str, dict[str, Any]] = {}
        self._unwritten: dict[str, bytes] = {}  # records that a write failed for
        self._end = 0
        self._rate = RateLimit(burst=1, every_s=60)
        try:
            self._open()
        except OSError as error:
            self._complain(error)

    def recall(self, component_id: str) -> dict[str, Any]:
        """Return what the supervisor before this one kept of the worker; {} if nothing."""
        return self._found.pop(component_id, {})

    def component_ids(self) -> list[str]:
        return list(self._slots)

    def keep(self, worker: Worker) -> None:
        """Replace a worker's record."""
        fields = {
            "invocation": worker.invocation,
            "label": worker.label,
            "failed": worker.state.status == "failed",
            "ended": worker.ended,
            "crash": worker.crash,
        }
        self._write(worker.component_id, encode(worker.component_id, fields))

    def forget(self, component_id: str) -> None:
        self._found.pop(component_id, None)
        self._unwritten.pop(component_id, None)
        slot = self._slots.pop(component_id, None)
        if slot is not None:
            with contextlib.suppress(OSError):  # else the next supervisor forgets it
                os.pwrite(self._fd, b"\n".rjust(RECORD), slot * RECORD)
            self._free.append(slot)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._end = (os.fstat(self._fd).st_size + RECORD - 1) // RECORD
        for slot in range(self._end):
            fields = _parse(os.pread(self._fd, RECORD, slot * RECORD))
            name = fields.get("id")
            if isinstance(name, str) and name not in self._slots:
                self._slots[name] = slot
                self._found[name] = fields
            else:
                self._free.append(slot)

    def _write(self, component_id: str, record: bytes) -> None:
        self._unwritten.pop(component_id, None)
        try:
            self._put(component_id, record)
        except OSError as error:
            self._complain(error)
            if not self._unwritten:
                self._loop.at(self._loop.now + RETRY_S, self._retry)
            self._unwritten[component_id] = record

    def _put(self, component_id: str, record: bytes) -> None:
        if self._fd < 0:
            self._open()
        slot = self._slots.get(component_id)
        if slot is None:
            slot = self._slots[component_id] = self._take_slot()
        if os.pwrite(self._fd, record, slot * RECORD) != len(record):
            raise OSError("only a part of the record was written")

    def _retry(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        for component_id, record in unwritten.items():
            self._write(component_id, record)
        if not self._unwritten:
            log(NOTICE, "the run state can be written again", records=len(unwritten))

    def _complain(self, error: OSError) -> None:
        self._rate.log(WARNING, "the run state cannot be written", path=self._path, error=error)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        return self._end - 1


def encode(component_id: str, fields: dict[str, Any]) -> bytes:
    """A record. If it is too long, the longest values are left out."""
    fields = {"id": component_id, **fields}
    while len(data := json.dumps(fields).encode()) >= RECORD:
        longest = max(fields, key=lambda name: (name != "id", len(str(fields[name]))))
        del fields[longest]
    return data.ljust(RECORD - 1) + b"\n"


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
