"""Structured journal entries about a worker, where ``systemctl status`` of the worker shows them.

Each kind of entry has a MESSAGE_ID of its own, which the message catalog explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record

MESSAGE_IDS: Final = {
    "restart": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f01",
    "fail": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f02",
    "hold": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f03",
    "ignore": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f04",
    "incident-opened": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f05",
    "incident-closed": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f06",
    "quarantine": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f07",
    "pool-failed": "6a1f0c7b2f7a4d0c9c0e5d8b1a7e4f08",
}
ACT_ID: Final = "0d4c7f5b1c2e4c7b8f0e3a96d21b7c58"  # what a person did
_NOTICE: Final = 5
_PRIORITIES: Final = {"restart": 4, "fail": 2, "hold": 5, "ignore": 6}


def write_decision(component: Component, record: Record, line: str, *, user: bool) -> None:
    """One entry for one decision; ``line`` is how the worker died."""
    from systemd import journal  # half of the controller's start, needed last

    unit_field = "OBJECT_SYSTEMD_USER_UNIT" if user else "OBJECT_SYSTEMD_UNIT"
    journal.send(
        f"{component.instance}: {line}. {describe(record)}",
        MESSAGE_ID=MESSAGE_IDS[record.action],
        PRIORITY=_PRIORITIES[record.action],
        SYSLOG_IDENTIFIER="nomarr-controller",
        NOMARR_COMPONENT_ID=component.component_id,
        NOMARR_INSTANCE=component.instance,
        NOMARR_DECISION=record.action,
        NOMARR_DELAY_MS=str(record.delay_ms),
        NOMARR_CLASS=record.kind,
        NOMARR_CODE=str(record.code),
        NOMARR_INVOCATION_ID=record.invocation,
        NOMARR_WINDOW=f"{record.window_used}/{record.window_limit}",
        NOMARR_LIFETIME=f"{record.lifetime_used}/{record.lifetime_limit}",
        NOMARR_REASON=record.text,
        **{unit_field: component.unit},
    )


def write_incident(pool: str, text: str, *, opened: bool) -> None:
    """One entry when an outage of a pool begins, one when it is over."""
    _write_pool("incident-opened" if opened else "incident-closed", 3 if opened else 5, pool, text)


def write_pool_failure(pool: str, reason: str) -> None:
    """A whole pool was stopped and masked."""
    _write_pool("pool-failed", 2, pool, f"pool {pool} has failed: {reason}")


def write_quarantine(component: Component, jobs: Sequence[str], *, user: bool) -> None:
    """Jobs that killed too many workers were set aside, and what they cost was given back."""
    from systemd import journal

    unit_field = "OBJECT_SYSTEMD_USER_UNIT" if user else "OBJECT_SYSTEMD_UNIT"
    journal.send(
        f"{component.instance}: job {', '.join(jobs)} was quarantined; restarts are given back",
        MESSAGE_ID=MESSAGE_IDS["quarantine"],
        PRIORITY=4,
        SYSLOG_IDENTIFIER="nomarr-controller",
        NOMARR_COMPONENT_ID=component.component_id,
        NOMARR_INSTANCE=component.instance,
        NOMARR_POOL=component.pool,
        NOMARR_JOB=jobs[0],
        **{unit_field: component.unit},
    )


def _write_pool(kind: str, priority: int, pool: str, text: str) -> None:
    from systemd import journal

    journal.send(
        text,
        MESSAGE_ID=MESSAGE_IDS[kind],
        PRIORITY=priority,
        SYSLOG_IDENTIFIER="nomarr-controller",
        NOMARR_POOL=pool,
        NOMARR_REASON=text,
    )


def describe(record: Record) -> str:
    """The decision in the words of the journal."""
    match record.action:
        case "restart":
            return f"Decided: {record.text}."
        case "fail":
            return f"Masked: {record.text}. When mended: nomarrctl reset, then start it."
        case "hold":
            return f"Held: {record.text}."
        case _:
            return f"Not counted: {record.text}."


def write_act(component: Component, act: str, by: str, *, user: bool) -> None:
    """One entry: ``act`` is a word such as paused, ``by`` who did it."""
    from systemd import journal

    unit_field = "OBJECT_SYSTEMD_USER_UNIT" if user else "OBJECT_SYSTEMD_UNIT"
    journal.send(
        f"{component.instance}: {act} by {by}",
        MESSAGE_ID=ACT_ID,
        PRIORITY=_NOTICE,
        SYSLOG_IDENTIFIER="nomarrctl",
        NOMARR_COMPONENT_ID=component.component_id,
        NOMARR_INSTANCE=component.instance,
        NOMARR_ACT=act,
        NOMARR_BY=by,
        **{unit_field: component.unit},
    )
