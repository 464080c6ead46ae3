"""The worker's end of its health pipe: opened once, written without blocking."""

from __future__ import annotations

import errno
import os
import stat

from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.worker.errors import SupervisorLost


class HealthPipe:
    """An open health pipe. Raises SupervisorLost if it has no reader."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            # The FIFOs are in the supervisor's runtime directory, which is removed when it stops.
            if error.errno in (errno.ENXIO, errno.ENOENT):
                raise SupervisorLost(f"the health pipe {path} has no reader") from error
            raise ConfigError(
                f"cannot open the health pipe {path}: {error.strerror}",
                hint="NOMARR_HEALTH_PIPE names a FIFO that this user may write",
            ) from error
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            self.close()
            raise ConfigError(
                f"the health pipe {path} is not a FIFO", hint="remove it; the supervisor makes it"
            )

    def write(self, frame: bytes) -> bool:
        """Write a frame, at most PIPE_BUF long and so atomically; False if the pipe is full."""
        try:
            os.write(self._fd, frame)
        except BlockingIOError:
            return False
        except BrokenPipeError as error:
            raise SupervisorLost("the health pipe has no reader any more") from error
        return True

    def close(self) -> None:
        os.close(self._fd)
