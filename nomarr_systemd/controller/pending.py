"""What the OnFailure= hook left behind: one file per failed invocation, until it is booked.

The hook only writes down what systemd told it. What that means is found out by the controller.
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


def read_pending(directory: str) -> list[Pending]:
    """Every complete file. One without its end is being written; one that is no failure is
    removed: the reconciler finds whatever it stood for."""
    found = []
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    for name in sorted(names):
        path = os.path.join(directory, name)
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                text = file.read(MAX_BYTES)
        except OSError:
            continue  # another controller was faster
        if not text.endswith("\n") or "\nEND=1" not in text:
            continue
        try:
            found.append(parse_pending(text))
        except BadName:
            remove(path)
    return found


def parse_pending(text: str) -> Pending:
    """The failure that a file describes, or BadName."""
    words = dict(line.partition("=")[::2] for line in text.splitlines())
    invocation = words.get("MONITOR_INVOCATION_ID", "")
    split_invocation(invocation)
    return Pending(
        parse_component(words.get("INSTANCE", "")),
        invocation,
        words.get("MONITOR_SERVICE_RESULT", ""),
        words.get("MONITOR_EXIT_CODE", ""),
        words.get("MONITOR_EXIT_STATUS", ""),
    )
