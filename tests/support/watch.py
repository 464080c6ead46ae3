"""Events of the live socket, as they come."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from tests.support.supervision import Live


class Watch:
    """All events of some topics, read in a thread of its own."""

    def __init__(self, path: str, *topics: str) -> None:
        self._live = Live(path)
        self._live.socket.settimeout(None)
        self._live.send(op="subscribe", topics=list(topics))
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for line in self._live._file:
            self.events.append(json.loads(line))
        self._live.close()

    def last(self, key: str) -> Any:
        """What the last event of a kind is about."""
        return next((event[key] for event in reversed(tuple(self.events)) if key in event), None)

    def close(self) -> list[dict[str, Any]]:
        """The frames; what else there was stays in ``events``. It may have ended already."""
        with contextlib.suppress(OSError):
            self._live.socket.shutdown(socket.SHUT_RDWR)
        return self.read_all()

    def read_all(self) -> list[dict[str, Any]]:
        """The frames, until the supervisor hangs up."""
        self._thread.join()
        lines = [line for event in self.events for line in event.get("frames", [])]
        return [json.loads(line.removeprefix("HEALTH|")) for line in lines]
