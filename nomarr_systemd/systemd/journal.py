"""Journal entries about workers and pools, with fields (docs/contract.md#journal).

An entry about a worker carries the worker's unit, so ``systemctl status`` of the worker shows it.
Each kind of entry has a MESSAGE_ID, which packaging/nomarr.catalog explains.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.job import describe_quarantine, release_command
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import one_line

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
}
_ACT_PRIORITY: Final = 5
_SOCKET: Final = "/run/systemd/journal/socket"


def write_decision(component: Component, record: Record, line: str, *, user: bool) -> None:
    """Write one entry about one decision; ``line`` says how the worker died."""
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
    text = f"{component.instance}: {line}. {describe(record)}"
    _write(record.action, text, _name_worker(component, user=user) | fields)


def write_incident(pool: str, text: str, *, opened: bool) -> None:
    """Write one entry when an incident of a pool opens, one when it closes."""
    kind = "incident-opened" if opened else "incident-closed"
    _write(kind, text, {"NOMARR_POOL": pool, "NOMARR_REASON": text})


def write_pool_failure(pool: str, reason: str, workers: Sequence[Component], *, user: bool) -> None:
    """Write one entry about a pool whose workers were stopped and masked, and one to each."""
    text = f"pool {pool} has failed: {reason}"
    fields = {"NOMARR_POOL": pool, "NOMARR_REASON": text}
    _write("pool-failed", text, fields)
    for each in workers:
        own = f"{each.instance}: masked, because {text}. When mended: nomarrctl reset --pool {pool}"
        _write("pool-failed", own, _name_worker(each, user=user) | fields)


def write_quarantine(
    component: Component, jobs: Sequence[str], given_back: int, *, user: bool
) -> None:
    """Write one entry about quarantined jobs to a worker that died of one; ``given_back`` is the
    number of restarts that it got back."""
    many = "restart was" if given_back == 1 else "restarts were"
    text = (
        f"{component.instance}: {describe_quarantine(', '.join(jobs))}; {given_back} {many} given"
        " back to this worker."
    )
    if command := release_command(jobs[0]):
        text += f" To let it run again: {command}"
    fields = {"NOMARR_POOL": component.pool, "NOMARR_JOB": jobs[0]}
    _write("quarantine", text, _name_worker(component, user=user) | fields)


def write_act(component: Component, act: str, by: str, *, user: bool) -> None:
    """Write one entry about what a person did: ``act`` is a participle: paused."""
    fields = {"NOMARR_ACT": act, "NOMARR_BY": by}
    text = f"{component.instance}: {act} by {by}"
    _send(text, ACT_ID, _ACT_PRIORITY, "nomarrctl", _name_worker(component, user=user) | fields)


def describe(record: Record) -> str:
    """Return the decision as one sentence."""
    match record.action:
        case "restart":
            return f"Decided: {record.text}."
        case "fail":
            return f"Masked: {record.text}. When mended: nomarrctl reset, then start it."
        case "hold":
            return f"Held: {record.text}."
        case _:
            return f"Not counted: {record.text}."


def _name_worker(component: Component, *, user: bool) -> dict[str, str]:
    return {
        "NOMARR_COMPONENT_ID": component.component_id,
        "NOMARR_INSTANCE": component.instance,
        "OBJECT_SYSTEMD_USER_UNIT" if user else "OBJECT_SYSTEMD_UNIT": component.unit,
    }


def _write(kind: str, text: str, fields: Mapping[str, str]) -> None:
    _send(text, MESSAGE_IDS[kind], _PRIORITIES[kind], "nomarr-controller", fields)


def _send(
    text: str, message_id: str, priority: int, identifier: str, fields: Mapping[str, str]
) -> None:
    head = {"MESSAGE_ID": message_id, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": identifier}
    _transmit({"MESSAGE": text, **head, **fields})


def _transmit(fields: Mapping[str, str]) -> None:
    """Send an entry in journald's native protocol, and never wait: a journald that hangs must not
    hold up a restart. libsystemd would wait, and costs the controller half of its start.

    Each value is made one printable line, so that no value can begin another field.
    """
    entry = "".join(f"{name}={one_line(value)}\n" for name, value in fields.items()).encode()
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as link, contextlib.suppress(OSError):
        link.sendto(entry, _SOCKET)
