"""What the helper for the store does: reads messages, and gives each to the thread it is for. Three
threads, so that a slow question delays neither the settling of jobs nor history.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from nomarr_systemd.supervisor.helper import LEAVE_S, Channel
from nomarr_systemd.supervisor.work_store import POLITE_S, Inbox

# All other messages are for the thread "jobs".
_THREAD_OF: Final = {"samples": "history", "write": "history", "ask": "queries"}


class Work(Protocol):
    """The work of one thread: ends when it reads None."""

    def run(self) -> None: ...


def serve(channel: Channel, units_directory: str, public: str) -> None:
    """Serve the supervisor until it closes the channel."""

    are_jobs_done = threading.Event()
    are_jobs_done.set()

    def make_history(inbox: Inbox) -> Work:
        are_jobs_done.wait(POLITE_S)
        from nomarr_systemd.supervisor.history_thread import HistoryThread

        return HistoryThread(inbox, public, channel.send, are_jobs_done)

    def make_queries(inbox: Inbox) -> Work:
        from nomarr_systemd.supervisor.query_thread import QueryThread

        return QueryThread(inbox, public, channel.send)

    def make_jobs(inbox: Inbox) -> Work:
        from nomarr_systemd.supervisor.settle_thread import SettleThread

        return SettleThread(inbox, units_directory, channel.send, are_jobs_done)

    makers = {"history": make_history, "queries": make_queries, "jobs": make_jobs}
    started: dict[str, tuple[threading.Thread, Inbox]] = {}
    while (message := channel.read()) is not None:
        if message[0] == "ping":
            channel.send(["pong"])
            continue
        name = _THREAD_OF.get(message[0], "jobs")
        if name not in started:
            started[name] = _start(name, makers[name])
        if name == "jobs":
            are_jobs_done.clear()
        started[name][1].put(message)
    ends = time.monotonic() + LEAVE_S / 2
    for _, inbox in started.values():
        inbox.put(None)
    for thread, _ in started.values():
        thread.join(max(0.0, ends - time.monotonic()))


def _start(name: str, make: Callable[[Inbox], Work]) -> tuple[threading.Thread, Inbox]:
    inbox: Inbox = SimpleQueue()
    # A daemon: a store that hangs must not delay the end of the process.
    thread = threading.Thread(target=lambda: make(inbox).run(), name=name, daemon=True)
    thread.start()
    return thread, inbox
