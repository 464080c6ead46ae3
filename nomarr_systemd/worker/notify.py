"""sd_notify that never blocks: if PID 1's socket is full, the caller retries."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import sdnotify

log = logging.getLogger(__name__)


class Notifier:
    """Without NOTIFY_SOCKET it is not ``listening``, and messages are dropped."""

    def __init__(self) -> None:
        self._notifier: Any = None
        path = os.environ.get("NOTIFY_SOCKET")
        if not path:
            return
        try:
            self._notifier = sdnotify.SystemdNotifier(debug=True)  # else it hides errors
            self._notifier.socket.setblocking(False)
        except OSError as error:
            self._notifier = None
            log.error("no notifications are sent: cannot connect to %s: %s", path, error)

    @property
    def listening(self) -> bool:
        return self._notifier is not None

    def send(self, message: str) -> bool:
        """Send a message; False if the socket is full: then retry."""
        if self._notifier is None:
            return True
        try:
            # sdnotify encodes Latin-1: this way it sends the bytes of UTF-8.
            self._notifier.notify(message.encode(errors="replace").decode("latin-1"))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            log.error("no more notifications are sent: %s", error)
            self.close()
        return True

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.socket.close()
            self._notifier = None
