"""What a worker raises to say how bad it is. Any other exception fails the job and counts."""

from __future__ import annotations

from nomarr_systemd.core.errors import NomarrError, NotReady

__all__ = ["NonFatal", "NotReady", "OutOfMemory", "Recovering", "SupervisorLost"]


class NonFatal(NomarrError):
    """The job cannot be done and the worker is well: a bad file, a missing file."""

    code = "non-fatal"


class Recovering(NomarrError):
    """The job failed and the worker needs ``seconds`` to be itself again.

    The supervisor grants at most max_recovery_s (120) before it takes the worker for dead.
    """

    code = "recovering"

    def __init__(self, seconds: float = 30.0, message: str = "recovering") -> None:
        super().__init__(message)
        self.seconds = seconds


class OutOfMemory(Recovering):
    """Memory ran out, the GPU's or the machine's. A MemoryError is taken for the same."""

    code = "out-of-memory"

    def __init__(self, seconds: float = 30.0, message: str = "out of memory") -> None:
        super().__init__(seconds, message)


class SupervisorLost(NomarrError):
    """Nobody reads the health pipe any more; the worker leaves when its job is done."""

    code = "supervisor-lost"
    exit_status = 75
