"""The background thread: frames for the supervisor, notifications for systemd.

Only this thread notifies systemd. The main thread also writes a frame when the condition changes,
so that a frame names a job which kills the process at once. It waits until READY=1 was sent: its
first job may keep Python's lock. The main loop reports progress by setting a time, and WATCHDOG=1
is sent only while that is recent: this thread must not hide a hung loop.
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
from nomarr_systemd.worker.wakeup import Wakeup

log = logging.getLogger(__name__)

# Frames for changes: BURST at once, then one each BURST_S. Short jobs must not flood the pipe.
BURST = 10
BURST_S = 0.1
MAX_NOTE = 200  # characters
READY_S = 5.0  # the longest wait of the main thread until READY=1 was sent
STATUS_EVERY_S = 1.0  # each one makes PID 1 send signals on the bus
EXTEND_EVERY_S = 10.0  # by three times as much each time
RETRY_S = 0.1  # if PID 1's socket is full


class Recovery(NamedTuple):
    seconds: float
    until: float


class Pulse:
    """A context manager: the thread runs inside it. The methods are for the main thread."""

    def __init__(self, environment: Environment, tally: Tally, on_lost: Callable[[], None]) -> None:
        self._environment = environment
        self._settings = environment.settings
        self._tally = tally
        self._on_lost = on_lost
        self.wakeup = Wakeup()
        self._notifier = Notifier()
        path = environment.health_pipe
        self._pipe = HealthPipe(path) if path else None
        self.lost = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # for the pipe and the next seven attributes
        self._condition = Condition("pending", "initializing")
        self._recovery: Recovery | None = None
        self._seq = 0
        self._framed_at = -inf
        self._room = float(BURST)
        self._room_at = monotonic()
        self._frame_due = 0.0
        self._token = monotonic()
        self._withheld = False  # pings are withheld: progress() wakes the thread
        self._is_ready = False  # set by the main thread
        self._ready_done = threading.Event()
        self._ended = self._farewell = False
        # Used by the thread only.
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
        self.wakeup.wake()
        self._thread.join()
        self.close()
        self.wakeup.close()

    def close(self) -> None:
        """Close the pipe and the notification socket; also called in a forked child."""
        pipe, self._pipe = self._pipe, None
        if pipe:
            pipe.close()
        self._notifier.close()

    def progress(self) -> None:
        """Report progress of the main loop. Cheap and without a lock: jobs may call it often."""
        self._token = monotonic()
        if self._withheld:
            self.wakeup.wake()

    def rest(self, seconds: float) -> None:
        """Report that the main loop waits for ``seconds``: lack of progress counts from then on."""
        self._token = monotonic() + seconds

    def set(self, condition: Condition, *, hurry: bool = True) -> None:
        """Report a new condition: now, or BURST_S after the last frame if there were many.

        Without ``hurry``, BURST_S from now: the next job's frame may come before that.
        """
        if condition == self._condition:
            return
        with self._lock:
            self._condition = condition
            self._frame_soon(hurry=hurry)

    def recover(self, seconds: float) -> None:
        """Report ``recovering`` for ``seconds``, or until ``recovered`` is called."""
        with self._lock:
            self._recovery = Recovery(seconds, monotonic() + seconds)
            self._frame_soon()

    def recovered(self) -> None:
        with self._lock:
            if self._recovery:
                self._recovery = None
                self._frame_soon()

    def ready(self) -> None:
        """Have the thread send READY=1, with the present condition, and wait for that."""
        self._is_ready = True
        self.wakeup.wake()
        if self._notifier.listening:
            self._ready_done.wait(READY_S)

    def end(self) -> None:
        """Report that the worker ends by itself: the thread's last frame is ``stopping``."""
        self._farewell = True

    def _frame_soon(self, *, hurry: bool = True) -> None:
        """Write a frame now, or as soon as BURST and BURST_S allow. Call it with the lock."""
        now = monotonic()
        self._room = min(BURST, self._room + (now - self._room_at) / BURST_S)
        self._room_at = now
        if hurry and self._room >= 1:
            self._room -= 1
            self._write_frame(now)
        else:
            due = (self._framed_at if hurry else now) + min(
                BURST_S, self._settings.frame_interval_s
            )
            self._frame_due = min(self._frame_due, due)
        self.wakeup.wake()  # also for the status line

    def _write_frame(self, now: float) -> None:
        """Write a frame; if the pipe is full it is dropped, as seq shows. Call it with the lock."""
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
            note=condition.note[:MAX_NOTE] or None,
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
            log.warning("%s; ending when the current job is done", error)
            self._pipe.close()
            self._pipe = None
            self.lost = True
            self._on_lost()

    def _judge(self, now: float) -> Condition:
        """Return the condition, with ``recovering`` while a recovery lasts."""
        condition, recovery = self._condition, self._recovery
        if recovery and now < recovery.until and condition.status in ("healthy", "pending"):
            return condition._replace(status="recovering")
        return condition

    def _age(self, now: float) -> float:
        return max(0.0, now - self._token)

    def _run(self) -> None:
        try:
            while not self._ended:
                signals = self.wakeup.wait(self._beat(monotonic()))
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    self._stop_asked = True
            if self._farewell:
                self._send_farewell()
        except Exception:
            # Without pings and frames systemd or the supervisor ends this worker.
            self._broken = True
            self._ready_done.set()
            log.critical("the frame thread failed; this worker sends no more frames", exc_info=True)

    def _beat(self, now: float) -> float:
        """Send what is due; returns the seconds until something is due again."""
        # Set first: progress between this check and the wait must wake the thread.
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
            return inf  # the watchdog starts with READY=1
        if now >= self._ping_due:
            if not self._notifier.send("WATCHDOG=1"):
                return now + RETRY_S
            self._ping_due = now + period_s
        return self._ping_due

    def _beat_extension(self, now: float) -> float:
        """Extend the timeout of the start, and of the stop, while there is progress."""
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
            self._ready_done.set()
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
            self._judge(now),
            self._tally,
            ending="stopping" if self._stop_asked else ending,
            past=self._environment.past,
        )

    def _send_farewell(self) -> None:
        with self._lock:
            self._condition = Condition("stopping", "stopping")
            self._write_frame(monotonic())
        self._notifier.send(f"STOPPING=1\nSTATUS={self._describe(monotonic())}")
