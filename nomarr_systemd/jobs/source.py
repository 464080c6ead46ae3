"""Sources of a worker's jobs. A job is a text; the runtime discovers one, claims it, and reports
its end. The queue in a store is a source, and so is a worker's own next_job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Source(Protocol):
    """Any method may raise NotReady (the store is away): the worker backs off and retries."""

    def discover(self) -> str | None:
        """Return a job that seems to be free; None if there is none."""

    def claim(self, job: str) -> bool:
        """Claim a job; False if another worker was faster."""

    def complete(self, job: str, result: object) -> None:
        """Report that a job is done; ``result`` is what ``process`` returned."""

    def fail(self, job: str, error: Exception) -> None: ...

    def release(self, job: str) -> None:
        """Report that a job was not done: any worker may take it again."""


class OwnJobs:
    """The jobs of a worker that finds them itself; no other worker claims them."""

    def __init__(self, next_job: Callable[[], str | None]) -> None:
        self._next_job = next_job
        self._released: str | None = None

    def discover(self) -> str | None:
        job, self._released = self._released, None
        return self._next_job() if job is None else job

    def claim(self, job: str) -> bool:  # noqa: ARG002  # the protocol's
        return True

    def complete(self, job: str, result: object) -> None:
        pass

    def fail(self, job: str, error: Exception) -> None:
        pass

    def release(self, job: str) -> None:
        self._released = job
