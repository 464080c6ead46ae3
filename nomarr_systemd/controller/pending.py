"""What the hook and ``nomarr-restart@`` left for the controller: a file per failed invocation,
until it is booked, and a file per worker whose backoff is over.

Both only write down what systemd told them. What that means is found out by the controller.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component, split_invocation
from nomarr_systemd.host.files import remove

MAX_BYTES = 4096


class Pending(NamedTuple):
    """The hook's words about one failure."""

    component: Component
    invocation: str
    result: str = ""
    exit_code: str = ""
    exit_status: str = ""


class Waiting(NamedTuple):
    """All that waits for the controller."""

    failures: list[Pending]
    due: list[Component]  # their backoff is over


def read_pending(directory: str) -> Waiting:
    """Every complete file. One without its end is being written; one that is neither is removed:
    the reconciler finds whatever it stood for."""
    waiting = Waiting([], [])
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return waiting
    for name in sorted(names):
        path = os.path.join(directory, name)
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                text = file.read(MAX_BYTES)
        except OSError:
            continue  # another controller was faster
        if not text.endswith("\n") or "END=1" not in text.splitlines():
            continue
        try:
            found = parse_pending(text)
        except BadName:
            remove(path)
            continue
        if isinstance(found, Pending):
            waiting.failures.append(found)
        else:
            waiting.due.append(found)
    return waiting


def parse_pending(text: str) -> Pending | Component:
    """The failure that a file describes, or the worker whose backoff is over; or BadName."""
    words = dict(line.partition("=")[::2] for line in text.splitlines())
    component = parse_component(words.get("INSTANCE", ""))
    if "DUE" in words:
        return component
    invocation = words.get("MONITOR_INVOCATION_ID", "")
    split_invocation(invocation)
    return Pending(
        component,
        invocation,
        words.get("MONITOR_SERVICE_RESULT", ""),
        words.get("MONITOR_EXIT_CODE", ""),
        words.get("MONITOR_EXIT_STATUS", ""),
    )


def due_file(directory: str, component: Component) -> str:
    """What ``nomarr-restart@`` leaves for the controller."""
    return os.path.join(directory, f"due-{component.instance}")
