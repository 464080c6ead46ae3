"""Exceptions that a worker raises. Any other one fails the job and counts as an error."""

from __future__ import annotations

from nomarr_systemd.core.errors import NomarrError, NotReady

__all__ = ["NonFatal", "NotReady", "OutOfMemory", "Recovering", "SupervisorLost"]


class NonFatal(NomarrError):
    """The job cannot be done, but the worker is healthy: a bad or missing file."""

    code = "non-fatal"


class Recovering(NomarrError):
    """The job failed and the worker needs ``seconds`` to recover.

    After max_recovery_s (120) the supervisor ends the worker.
    """

    code = "recovering"

    def __init__(self, seconds: float = 30.0, message: str = "recovering") -> None:
        super().__init__(message)
        self.seconds = seconds


class OutOfMemory(Recovering):
    """Out of memory, of the GPU or of the machine. A MemoryError is treated alike."""

    code = "out-of-memory"

    def __init__(self, seconds: float = 30.0, message: str = "out of memory") -> None:
        super().__init__(seconds, message)


class SupervisorLost(NomarrError):
    """The health pipe has no reader; the worker ends when its job is done."""

    code = "supervisor-lost"
    exit_status = 75
