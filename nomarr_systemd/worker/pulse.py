"""The background thread: frames for the supervisor, notifications for systemd.

It alone talks to systemd; a change of condition is also framed by the main thread itself, so that
a job that kills the process at once has been named. The main loop proves its progress by a token,
and WATCHDOG=1 is only sent while that is young: this thread must not speak for a hung loop.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self

from nomarr_systemd.core.frames import encode
from nomarr_systemd.worker.environment import Environment
from nomarr_systemd.worker.errors import SupervisorLost
from nomarr_systemd.worker.notify import Notifier
from nomarr_systemd.worker.pipe import HealthPipe
from nomarr_systemd.worker.vitals import Condition, Tally, describe
from nomarr_systemd.worker.wakeup import Bell

log = logging.getLogger(__name__)

BURST_S = 0.1  # frames for changes come no closer than this: short jobs must not flood the pipe
STATUS_EVERY_S = 1.0  # each one makes PID 1 tell everybody who listens
EXTEND_EVERY_S = 10.0  # and each time by three times as much
RETRY_S = 0.1  # when PID 1 had no room


class Recovery(NamedTuple):
    seconds: float
    until: float


class Pulse:
    """A context: the thread runs inside it. The methods are for the main thread."""

    def __init__(self, environment: Environment, tally: Tally, on_lost: Callable[[], None]) -> None:
        self._environment = environment
        self._settings = environment.settings
        self._tally = tally
        self._on_lost = on_lost
        self.bell = Bell()
        self._notifier = Notifier()
        path = environment.health_pipe
        self._pipe = HealthPipe(path) if path else None
        self.lost = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # for the pipe, and the five below
        self._condition = Condition("pending", "initializing")
        self._recovery: Recovery | None = None
        self._seq = 0
        self._framed_at = -inf
        self._frame_due = 0.0
        self._token = monotonic()
        self._withheld = False  # the token is too old: progress() is to ring
        self._is_ready = False  # the main thread says so
        self._ended = self._farewell = False
        # The thread's own.
        self._ready_sent = False
        self._stop_asked = False
        self._ping_due = self._extend_due = 0.0
        stall_s = self._settings.stall_timeout_s
        self._extend_s = min(EXTEND_EVERY_S, max(stall_s / 3, 0.01)) if stall_s else EXTEND_EVERY_S
        self._told = ""
        self._told_at = -inf
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self.bell.ring()
        self._thread.join()
        self.close()
        self.bell.close()

    def close(self) -> None:
        """Let go of the pipe and of systemd; a forked child does so too."""
        pipe, self._pipe = self._pipe, None
        if pipe:
            pipe.close()
        self._notifier.close()

    def progress(self) -> None:
        """The main loop lives. Cheap, and takes no lock: jobs call it as often as they like."""
        self._token = monotonic()
        if self._withheld:
            self.bell.ring()

    def rest(self, seconds: float) -> None:
        """The main loop will wait that long on purpose; its token ages only after that."""
        self._token = monotonic() + seconds

    def set(self, condition: Condition, *, hurry: bool = True) -> None:
        """Say what the worker is at: now, or BURST_S after the frame before.

        Without hurry, BURST_S from now: the next job's frame, if it comes before, finds its turn
        not taken.
        """
        if condition == self._condition:
            return
        with self._lock:
            self._condition = condition
            self._frame_soon(hurry=hurry)

    def recover(self, seconds: float) -> None:
        """From now on, for so long or until ``recovered``, the worker is recovering."""
        with self._lock:
            self._recovery = Recovery(seconds, monotonic() + seconds)
            self._frame_soon()

    def recovered(self) -> None:
        with self._lock:
            if self._recovery:
                self._recovery = None
                self._frame_soon()

    def ready(self) -> None:
        """READY=1, with the condition as it is now."""
        self._is_ready = True
        self.bell.ring()

    def end(self) -> None:
        """The worker leaves of its own will: the thread's last words are ``stopping``."""
        self._farewell = True

    def _frame_soon(self, *, hurry: bool = True) -> None:
        """With the lock."""
        now = monotonic()
        due = (self._framed_at if hurry else now) + min(BURST_S, self._settings.frame_interval_s)
        if now >= due:
            self._write_frame(now)
        else:
            self._frame_due = min(self._frame_due, due)
        self.bell.ring()  # also for the status line

    def _write_frame(self, now: float) -> None:
        """With the lock. A frame that finds no room is gone; its number shows that."""
        if self._pipe is None or self._broken:
            self._frame_due = inf
            return
        self._framed_at = now
        self._frame_due = now + self._settings.frame_interval_s
        condition = self._judge(now)
        recovering = condition.status == "recovering" and self._recovery
        self._seq += 1
        frame = encode(
            self._environment.component_id,
            condition.status,
            phase=condition.phase,
            job=condition.job,
            pid=self._pid,
            invocation=self._environment.invocation or None,
            recover_for_s=recovering.seconds if recovering else None,
            metrics=self._tally.metrics(),
            seq=self._seq,
            progress_age_s=round(self._age(now), 3),
        )
        try:
            self._pipe.write(frame)
        except SupervisorLost as error:
            log.warning("%s; leaving when the job in hand is done", error)
            self._pipe.close()
            self._pipe = None
            self.lost = True
            self._on_lost()

    def _judge(self, now: float) -> Condition:
        """The condition, with a recovery that is still going on."""
        condition, recovery = self._condition, self._recovery
        if recovery and now < recovery.until and condition.status in ("healthy", "pending"):
            return condition._replace(status="recovering")
        return condition

    def _age(self, now: float) -> float:
        return max(0.0, now - self._token)

    def _run(self) -> None:
        try:
            while not self._ended:
                heard = self.bell.wait(self._beat(monotonic()))
                if signal.SIGTERM in heard or signal.SIGINT in heard:
                    self._stop_asked = True
            if self._farewell:
                self._say_farewell()
        except Exception:
            # Without pings and frames, systemd or the supervisor ends this worker.
            self._broken = True
            log.critical("the frame thread failed; this worker is silent now", exc_info=True)

    def _beat(self, now: float) -> float:
        """All that is due, and how long nothing will be."""
        # Raised first: progress made between the look and the wait must ring.
        self._withheld = True
        stall_s = self._settings.stall_timeout_s
        young = stall_s == 0 or self._age(now) < stall_s
        self._withheld = not young
        due = self._beat_frame(now)
        if self._notifier.listening:
            due = min(due, self._beat_status(now))
            if young:
                due = min(due, self._beat_watchdog(now), self._beat_extension(now))
        return max(0.0, due - now)

    def _beat_frame(self, now: float) -> float:
        with self._lock:
            if now >= self._frame_due:
                self._write_frame(now)
            return self._frame_due

    def _beat_watchdog(self, now: float) -> float:
        period_s = self._environment.watchdog_s / 2
        if not (period_s and self._ready_sent):
            return inf  # systemd watches from READY=1 on
        if now >= self._ping_due:
            if not self._notifier.send("WATCHDOG=1"):
                return now + RETRY_S
            self._ping_due = now + period_s
        return self._ping_due

    def _beat_extension(self, now: float) -> float:
        """While it starts, and while it finishes its last job, as long as there is progress."""
        if self._ready_sent and not self._stop_asked:
            return inf
        if now >= self._extend_due:
            if not self._notifier.send(f"EXTEND_TIMEOUT_USEC={round(self._extend_s * 3e6)}"):
                return now + RETRY_S
            self._extend_due = now + self._extend_s
        return self._extend_due

    def _beat_status(self, now: float) -> float:
        text = f"STATUS={self._describe(now)}"
        if self._is_ready and not self._ready_sent:
            if not self._notifier.send(f"READY=1\n{text}"):
                return now + RETRY_S
            self._ready_sent = True
            self._extend_due = 0.0
        elif text == self._told:
            return inf
        elif now < self._told_at + STATUS_EVERY_S:
            return self._told_at + STATUS_EVERY_S
        elif not self._notifier.send(text):
            return now + RETRY_S
        self._told, self._told_at = text, now
        return inf

    def _describe(self, now: float) -> str:
        ending = "supervisor gone" if self.lost else ""
        return describe(
            self._judge(now), self._tally, ending="stopping" if self._stop_asked else ending
        )

    def _say_farewell(self) -> None:
        with self._lock:
            self._condition = Condition("stopping", "stopping")
            self._write_frame(monotonic())
        self._notifier.send(f"STOPPING=1\nSTATUS={self._describe(monotonic())}")
