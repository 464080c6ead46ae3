"""The worker's end of its health pipe: opened once, never waited for."""

from __future__ import annotations

import errno
import os
import stat

from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.worker.errors import SupervisorLost


class HealthPipe:
    """Raises SupervisorLost as soon as nobody reads it."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            # The supervisor keeps the FIFOs in its runtime directory, which goes when it stops.
            if error.errno in (errno.ENXIO, errno.ENOENT):
                raise SupervisorLost(f"nobody reads the health pipe {path}") from error
            raise ConfigError(
                f"cannot open the health pipe {path}: {error.strerror}",
                hint="NOMARR_HEALTH_PIPE names a FIFO that this user may write",
            ) from error
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            self.close()
            raise ConfigError(
                f"the health pipe {path} is no FIFO", hint="the supervisor makes it; remove this"
            )

    def write(self, frame: bytes) -> bool:
        """Whether there was room. A frame is at most PIPE_BUF: it is written whole or not."""
        try:
            os.write(self._fd, frame)
        except BlockingIOError:
            return False
        except BrokenPipeError as error:
            raise SupervisorLost("nobody reads the health pipe any more") from error
        return True

    def close(self) -> None:
        os.close(self._fd)
