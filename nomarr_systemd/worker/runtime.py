"""A worker in Python: the class to subclass, and the loop that runs it (docs/contract.md).

The loop handles signals, waits, errors and the pulse; a worker handles jobs.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nomarr_systemd.core.death import EX_SOFTWARE, EX_TEMPFAIL
from nomarr_systemd.jobs.source import OwnJobs, Source
from nomarr_systemd.worker.environment import Environment
from nomarr_systemd.worker.errors import NonFatal, NotReady, OutOfMemory, Recovering
from nomarr_systemd.worker.pulse import Pulse
from nomarr_systemd.worker.vitals import Condition, Tally
from nomarr_systemd.worker.wakeup import Wakeup

if TYPE_CHECKING:
    from nomarr_systemd.jobs.store_source import StoreJobs

log = logging.getLogger(__name__)

MAX_ERRORS = 10  # in a row
CLAIM_TRIES = 10  # then other workers are faster: wait as if there were no job
SIGNALS = (signal.SIGTERM, signal.SIGINT)

_Result = TypeVar("_Result")
_OF_A_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class Waits(NamedTuple):
    """Waits that grow by ``factor`` from ``first_s`` to ``most_s``."""

    first_s: float
    factor: float
    most_s: float

    def after(self, previous_s: float) -> float:
        """Return the wait after ``previous_s``; after 0, the first."""
        return min(previous_s * self.factor, self.most_s) if previous_s else self.first_s


class Worker:
    """The base class of workers. It is instantiated without arguments, in the main thread."""

    lazy = False  # it loads in its first job, and is pending until that job is done
    needs_gpu = False  # no job is begun while the store says that the GPU is not available
    idle_waits = Waits(1.0, 1.5, 30.0)
    backoff_waits = Waits(1.0, 2.0, 60.0)
    nonfatal: tuple[type[Exception], ...] = ()  # exceptions of ``process`` that are the job's fault
    _pulse: Pulse | None = None

    def load(self) -> None:
        """Load what jobs need; may take minutes. Called again before a job after ``evict``."""

    def next_job(self) -> str | None:
        """Return the next job of a worker that finds its jobs itself; None: there is none."""
        return None

    def source(self) -> Source | None:
        """Return the source of jobs; called once, after the first ``load``.

        None: the queue of the worker's pool. By default ``next_job`` if it is overridden.
        """
        return OwnJobs(self.next_job) if type(self).next_job is not Worker.next_job else None

    def preflight(self) -> None:
        """Raise NotReady if no job can be done now. Called before each job."""

    def process(self, job: str) -> object:
        """Do one job; the result is stored with it, if it is JSON.

        An exception fails the job. It counts against the worker, too, unless it is NonFatal, named
        in ``nonfatal``, or says that the job's own file is missing, not permitted or a directory.
        Call ``progress`` in between if it may take longer than stall_timeout_s.
        """
        raise NotImplementedError

    def evict(self) -> None:
        """Free what ``load`` loaded: there was no job for idle_evict_s."""

    def progress(self) -> None:
        """Report progress of the job. Without this for stall_timeout_s it counts as hung."""
        if self._pulse:
            self._pulse.progress()


class Stop(BaseException):
    """Raised by the signal handler while loading, when there is no job to finish."""


class Runtime:
    """One run of one worker."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._idle_evict_s = environment.settings.idle_evict_s
        self._queue: StoreJobs | None = None  # set if the jobs come from the pool's queue
        self._wakeup = Wakeup()
        self._tally = Tally()
        self._pulse = Pulse(environment, self._tally, on_lost=self._wakeup.wake)
        self._stop = False
        self._interruptible = False
        self._proven = True  # False: lazy, and no job done since it was loaded
        self._evicted = False
        self._unready = False
        self._knows_average = False  # the average of its earlier runs was read
        self._idle_since: float | None = None
        self._idle_s = self._backoff_s = 0.0  # the last waits

    def run(self, make: Callable[[], Worker]) -> int:
        """Make the worker and run it to its end; returns the exit status."""
        with self._pulse:
            self._catch_signals()
            try:
                status = self._live(make)
                self._pulse.end()
            finally:
                signal.set_wakeup_fd(-1)
        return status

    def _live(self, make: Callable[[], Worker]) -> int:
        try:
            self._worker = self._interruptibly(make)
            self._worker._pulse = self._pulse
            self._load()
        except Stop:
            return 0
        self._source = self._worker.source() or self._open_queue()
        self._can_evict = type(self._worker).evict is not Worker.evict and self._idle_evict_s > 0
        self._pulse.set(Condition(self._status(), "idle"))
        self._pulse.ready()
        # journald looks a process up at its first line: that must not be just before its end.
        log.info("ready")
        try:
            return self._work()
        finally:
            if self._queue:
                self._queue.close(self._pause)

    def _work(self) -> int:
        while not self._ending():
            try:
                self._turn()
            except NotReady as error:
                self._back_off(error)
            except Stop:
                break
            except Exception as error:  # of the source, of evict() or of a second load()
                self._blame(error, "between jobs")
                if self._tally.consecutive_errors < MAX_ERRORS:
                    self._rest(evict=False)
            if self._tally.consecutive_errors >= MAX_ERRORS:
                log.critical("%d errors in a row: giving up", MAX_ERRORS)
                return EX_SOFTWARE
        return 0 if self._stop else EX_TEMPFAIL

    def _turn(self) -> None:
        """Do at most one job."""
        if self._unready:
            self._check()
        job = self._take()
        if job is None:
            self._unready = False
            self._backoff_s = 0.0
            self._rest(evict=True)
            return
        self._idle_since = None
        self._idle_s = 0.0
        try:
            self._check()
            if self._evicted:
                self._load(job)
        except BaseException:
            self._source.release(job)
            raise
        self._unready = False
        self._backoff_s = 0.0
        self._do(job)

    def _take(self) -> str | None:
        for _ in range(CLAIM_TRIES):
            self._tally.discovery_attempts += 1
            if self._queue and not self._knows_average:
                self._tally.avg_time_s = self._queue.read_average()
                self._knows_average = True
            job = self._source.discover()
            if job is None or self._source.claim(job):
                return job
            self._tally.claim_conflicts += 1
        return None

    def _check(self) -> None:
        try:
            if self._queue and self._worker.needs_gpu:
                self._queue.check_gpu()
            if self._worker.preflight() is False:  # type: ignore[func-returns-value]
                raise TypeError("it returned False; to say that no job can be done, raise NotReady")
        except NotReady:
            raise
        except Exception as error:  # a check that fails must not end the worker
            log.exception("preflight failed")
            raise NotReady(f"preflight failed: {error}") from error

    def _load(self, job: str | None = None) -> None:
        self._pulse.progress()
        self._pulse.set(Condition("pending", "loading_models", job))
        self._interruptibly(self._worker.load)
        self._pulse.progress()
        self._evicted = False
        self._proven = not self._worker.lazy

    def _do(self, job: str) -> None:
        self._pulse.progress()
        self._pulse.set(Condition(self._status(), "processing", job))
        begun = monotonic()
        end: Callable[[], None]
        try:
            result = self._worker.process(job)
        except NotReady:
            self._source.release(job)
            raise
        except Exception as error:
            if self._is_of_job(error, job):
                log.warning("job %r failed: %s: %s", job, type(error).__name__, error)
            else:
                self._blame(error, f"job {job!r}")
                if isinstance(error, Recovering | MemoryError):
                    recovering = error if isinstance(error, Recovering) else OutOfMemory()
                    self._pulse.recover(recovering.seconds)
            end = partial(self._source.fail, job, error)
        else:
            end = partial(self._source.complete, job, result)
            self._tally.count_done(monotonic() - begun)
            self._proven = True
            self._pulse.recovered()
        self._end(end)

    def _is_of_job(self, error: Exception, job: str) -> bool:
        """Return True if the job is to blame for an exception of ``process``, not the worker: it is
        named in ``nonfatal``, or the operating system refuses the job's own file."""
        if isinstance(error, (NonFatal, *self._worker.nonfatal)):
            return True
        if not isinstance(error, _OF_A_FILE) or not isinstance(error.filename, str | bytes):
            return False
        return os.path.abspath(os.fsdecode(error.filename)) == os.path.abspath(job)

    def _end(self, end: Callable[[], None]) -> None:
        """Report the end of the job to its source."""
        self._pulse.progress()
        try:
            end()
        finally:
            # Still processing, but a death from here on is not caused by this job.
            self._pulse.progress()
            self._pulse.set(Condition(self._status(), "processing"), hurry=False)

    def _rest(self, *, evict: bool) -> None:
        """Wait for a job; evict once after idle_evict_s."""
        self._pulse.set(Condition(self._status(), "idle"))
        if self._idle_since is None:
            self._idle_since = monotonic()
        self._idle_s = self._worker.idle_waits.after(self._idle_s)
        wait_s = self._idle_s
        if evict and self._can_evict and not self._evicted:
            left_s = self._idle_since + self._idle_evict_s - monotonic()
            if left_s <= 0:
                self._evicted = True  # once, also when it fails
                self._worker.evict()
            else:
                wait_s = min(wait_s, left_s)
        self._wait(wait_s)

    def _back_off(self, error: NotReady) -> None:
        self._unready = True
        self._backoff_s = self._worker.backoff_waits.after(self._backoff_s)
        note = f"{error}; retrying in {self._backoff_s:g} s"
        log.warning("not ready: %s", note)
        self._pulse.set(Condition("unhealthy", "backing_off", note=note))
        self._wait(self._backoff_s)

    def _open_queue(self) -> Source:
        """Return the queue of the worker's pool; without a store there are no jobs."""
        settings = self._environment.settings
        if settings.store is None or not self._environment.component_id:
            return OwnJobs(self._worker.next_job)
        from nomarr_systemd.jobs.store_source import (
            StoreJobs,
        )  # imported only by workers that need it

        self._queue = StoreJobs(
            settings.store,
            self._environment.component_id,
            self._environment.invocation,
            gpu_max_age_s=settings.gpu_health_max_age_s,
            state_directory=self._environment.state_directory,
            claim_batch=settings.claim_batch,
        )
        return self._queue

    def _pause(self, seconds: float) -> None:
        """Wait also when the worker is about to end."""
        self._pulse.progress()
        sleep(seconds)

    def _wait(self, seconds: float) -> None:
        self._pulse.rest(seconds)
        if not self._ending():
            self._wakeup.wait(seconds)
        self._pulse.progress()

    def _blame(self, error: Exception, where: str) -> None:
        self._tally.consecutive_errors += 1
        count = self._tally.consecutive_errors
        log.error("%s: error %d of %d in a row", where, count, MAX_ERRORS, exc_info=error)

    def _status(self) -> str:
        return "healthy" if self._proven else "pending"

    def _ending(self) -> bool:
        return self._stop or self._pulse.lost

    def _interruptibly(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``; a signal raises Stop in it."""
        try:
            self._interruptible = True
            if self._stop:
                raise Stop
            return action()
        finally:
            self._interruptible = False

    def _catch_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        # A handler runs in the main thread, which may be in a long call into C. The pulse gets the
        # signal at once, and extends the stop timeout meanwhile.
        signal.set_wakeup_fd(self._pulse.wakeup.fd, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True
        self._wakeup.wake()
        if self._interruptible:
            self._interruptible = False
            raise Stop

    def _forget(self) -> None:
        """Undo the set-up in a forked child: it must close the pipe, and die of SIGTERM."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._pulse.close()
