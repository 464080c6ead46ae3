"""Journal entries about workers and pools, with fields (docs/contract.md#journal).

An entry about a worker carries the worker's unit, so ``systemctl status`` of the worker shows it.
Each kind of entry has a MESSAGE_ID, which packaging/nomarr.catalog explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.intents import BlameJobs
from nomarr_systemd.core.job import (
    describe_failed,
    describe_quarantine,
    release_command,
    retry_command,
)
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.systemd.journal_socket import JournalSocket

MESSAGE_IDS: Final = {
    "restart": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f01",
    "fail": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f02",
    "hold": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f03",
    "ignore": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f04",
    "incident-opened": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f05",
    "incident-closed": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f06",
    "quarantine": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f07",
    "pool-failed": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f08",
    "job-failed": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f09",
}
ACT_ID: Final = "0d4c7f5b1c2e4c7b8f0e3a96d21b7c58"  # an act of a person
_PRIORITIES: Final = {
    "restart": 4,
    "fail": 2,
    "hold": 5,
    "ignore": 6,
    "incident-opened": 3,
    "incident-closed": 5,
    "quarantine": 4,
    "pool-failed": 2,
    "job-failed": 4,
}
_ACT_PRIORITY: Final = 5


class Journal:
    """Writes entries; one that journald cannot take now is written later."""

    def __init__(self, paths: Paths) -> None:
        self.socket = JournalSocket(paths.kept_entries)
        self._user = paths.user
        self._ours = paths.nomarrctl

    def write_decision(
        self, component: Component, record: Record, line: str, *, is_masked: bool = True
    ) -> None:
        """Write one entry about one decision; ``line`` says how the worker died, ``is_masked``
        whether systemd has masked one that failed for good."""
        fields = {
            "NOMARR_DECISION": record.action,
            "NOMARR_DELAY_MS": str(record.delay_ms),
            "NOMARR_CLASS": record.kind,
            "NOMARR_CODE": str(record.code),
            "NOMARR_INVOCATION_ID": record.invocation,
            "NOMARR_WINDOW": f"{record.window_used}/{record.window_limit}",
            "NOMARR_LIFETIME": f"{record.lifetime_used}/{record.lifetime_limit}",
            "NOMARR_REASON": record.text,
        }
        text = f"{component.instance}: {line}. {self._describe(record, is_masked=is_masked)}"
        self._write(record.action, text, self._name_worker(component) | fields)

    def write_incident(self, pool: str, text: str, *, opened: bool) -> None:
        """Write one entry when an incident of a pool opens, one when it closes."""
        kind = "incident-opened" if opened else "incident-closed"
        self._write(kind, text, {"NOMARR_POOL": pool, "NOMARR_REASON": text})

    def write_pool_failure(self, pool: str, reason: str, workers: Sequence[Component]) -> None:
        """Write one entry about a pool whose workers were stopped and masked, and one to each."""
        text = f"pool {pool} has failed: {reason}"
        fields = {"NOMARR_POOL": pool, "NOMARR_REASON": text}
        self._write("pool-failed", text, fields)
        for each in workers:
            mend = f"When mended: {self._ours} reset --pool {pool}"
            own = f"{each.instance}: failed for good, because {text}. {mend}"
            self._write("pool-failed", own, self._name_worker(each) | fields)

    def write_blame(self, component: Component, blame: BlameJobs, refunded: int) -> None:
        """Write one entry about jobs to a worker that died of one; ``refunded``: the number of its
        restarts that were refunded."""
        is_set_aside = blame.quarantined
        many = "restart was" if refunded == 1 else "restarts were"
        describe_jobs = describe_quarantine if is_set_aside else describe_failed
        what = describe_jobs(", ".join(blame.jobs))
        text = f"{component.instance}: {what}; {refunded} {many} refunded to this worker."
        command = (release_command if is_set_aside else retry_command)(blame.jobs[0])
        if command:
            text += f" To let it run again: {command.replace('nomarrctl', self._ours, 1)}"
        fields = {"NOMARR_POOL": component.pool, "NOMARR_JOB": blame.jobs[0]}
        kind = "quarantine" if is_set_aside else "job-failed"
        self._write(kind, text, self._name_worker(component) | fields)

    def write_act(self, component: Component, act: str, by: str) -> None:
        """Write one entry about an act of a person; ``act`` is a participle, such as ``paused``."""
        fields = {"NOMARR_ACT": act, "NOMARR_BY": by}
        text = f"{component.instance}: {act} by {by}"
        self._send(text, ACT_ID, _ACT_PRIORITY, "nomarrctl", self._name_worker(component) | fields)

    def _name_worker(self, component: Component) -> dict[str, str]:
        return {
            "NOMARR_COMPONENT_ID": component.component_id,
            "NOMARR_INSTANCE": component.instance,
            "OBJECT_SYSTEMD_USER_UNIT" if self._user else "OBJECT_SYSTEMD_UNIT": component.unit,
        }

    def _write(self, kind: str, text: str, fields: Mapping[str, str]) -> None:
        self._send(text, MESSAGE_IDS[kind], _PRIORITIES[kind], "nomarr-controller", fields)

    def _send(
        self, text: str, message_id: str, priority: int, identifier: str, fields: Mapping[str, str]
    ) -> None:
        head = {
            "MESSAGE_ID": message_id,
            "PRIORITY": str(priority),
            "SYSLOG_IDENTIFIER": identifier,
        }
        self.socket.send({"MESSAGE": text, **head, **fields})

    def _describe(self, record: Record, *, is_masked: bool) -> str:
        """Return the decision as one sentence or two."""
        mend = f"When mended: {self._ours} reset, then start it."
        match record.action:
            case "restart":
                return f"Decided: {record.text}."
            case "fail" if is_masked:
                return f"Masked: {record.text}. {mend}"
            case "fail":
                refused = "systemd refuses to mask it, which is tried again"
                return f"Failed for good: {record.text}; {refused}. {mend}"
            case "hold":
                return f"Held: {record.text}."
            case _:
                return f"Not counted: {record.text}."
