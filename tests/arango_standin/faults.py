"""What can go wrong on purpose: answers, silence, connections that break before or after a write.

Set through ``/_standin/fault``, which no real server has; a fault is met by real requests on
real sockets, so that whoever talks to the stand-in sees what it would see of a sick server.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "answer",
    "hang",
    "drop",
    "apply-then-drop",
    "body",
    "mutate",
    "trickle-head",
    "trickle-body",
    "endless",
]


class Fault(NamedTuple):
    """Befalls the next ``times`` requests that contain ``match`` in ``METHOD /path``.

    ``body`` is answered as it stands, one character a byte; ``seed`` is for ``mutate``; a trickle
    is a byte now and then, and neither it nor an endless body ends before the fault is gone.
    """

    kind: Kind
    match: str = ""
    times: int = 1_000_000
    status: int = 503
    number: int = 503
    message: str = "a fault was set"
    body: str = ""
    seed: int = 0


class Faults:
    """The fault in force, if any, and a record of the requests that came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._released = threading.Event()
        self._seen: list[str] = []

    def set(self, wanted: dict[str, Any]) -> None:
        """Put a fault into force; an empty one clears it, and lets the hanging go."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()
            self._fault = Fault(**wanted) if wanted else None
            self._seen.clear()

    def seen(self) -> list[str]:
        with self._lock:
            return list(self._seen)

    def meet(self, request: str) -> Fault | None:
        """Note the request; the fault that befalls it, if any."""
        with self._lock:
            self._seen.append(request)
            fault = self._fault
            if fault is None or fault.match not in request or fault.times < 1:
                return None
            self._fault = fault._replace(times=fault.times - 1)
            return fault

    def hang(self, timeout_s: float | None = None) -> bool:
        """Wait until the fault is taken away; False if it is not, so far."""
        return self._released.wait(timeout_s)
