"""sd_notify for a thread that must not wait: what PID 1 has no room for now is sent later."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import sdnotify

log = logging.getLogger(__name__)


class Notifier:
    """Without NOTIFY_SOCKET it is not ``listening``, and all it is told goes nowhere."""

    def __init__(self) -> None:
        self._notifier: Any = None
        path = os.environ.get("NOTIFY_SOCKET")
        if not path:
            return
        try:
            self._notifier = sdnotify.SystemdNotifier(debug=True)  # else it hides its errors
            self._notifier.socket.setblocking(False)
        except OSError as error:
            self._notifier = None
            log.error("systemd is not told anything: cannot connect to %s: %s", path, error)

    @property
    def listening(self) -> bool:
        return self._notifier is not None

    def send(self, message: str) -> bool:
        """False: there is no room in the socket, try again."""
        if self._notifier is None:
            return True
        try:
            # sdnotify sends Latin-1: the bytes of UTF-8 pass through it unharmed.
            self._notifier.notify(message.encode(errors="replace").decode("latin-1"))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            log.error("systemd is not told anything any more: %s", error)
            self.close()
        return True

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.socket.close()
            self._notifier = None
