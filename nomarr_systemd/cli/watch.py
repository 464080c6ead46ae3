"""``nomarrctl status --watch``: the status on the screen, drawn again at each change.

The supervisor's events say when to draw again; drawing is the same as without --watch, so what is
shown never depends on having seen every event. While the supervisor is away, the subscription is
retried.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import click

from nomarr_systemd.cli.common import dump_json
from nomarr_systemd.cli.status_table import draw
from nomarr_systemd.cli.table import fit
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.live import client
from nomarr_systemd.operate.overview import Memory, Overview, look

_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_SOONEST_S: Final = 0.2  # many events at once are one change of the screen
_LATEST_S: Final = 1.0  # so that countdowns and uptimes advance
_AGAIN_S: Final = 0.5
Gather = Callable[[], Overview]
_TOPICS: Final = ["worker:*:status", "system:health"]


class Feed(threading.Thread):
    """Subscribes to the supervisor's events, and again when the connection ends. Each event makes
    ``fd`` readable; its content is not used."""

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.fd, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        while True:
            with contextlib.suppress(client.NoSupervisor, OSError):
                for _ in client.subscribe(self._path, _TOPICS):
                    self._ring()
            self._ring()  # the end of the connection is a change, too
            time.sleep(_AGAIN_S)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b".")


def watch(scope: Scope, names: tuple[str, ...], *, as_json: bool, problems: bool = False) -> int:
    """Show the status until the program is interrupted."""
    if not as_json and not sys.stdout.isatty():
        raise click.UsageError(
            "--watch needs a terminal; with --json it prints a line for each change"
        )

    memory = Memory()

    def gather() -> Overview:
        # The configuration is read each time: workers come and go with an apply.
        return look(scope, scope.read_in_force(), names, problems=problems, memory=memory)

    feed = Feed(scope.paths.live)
    show = _Lines() if as_json else _Screen()
    with _signals() as wake:
        feed.start()  # after the handlers are set: they run in this thread
        try:
            with show:
                _follow(gather, feed.fd, wake, show)
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:  # the reader of our lines has closed its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    return 0


def _follow(gather: Gather, feed: int, wake: int, show: _Screen | _Lines) -> None:
    while True:
        began = time.monotonic()
        try:
            overview: Overview | NomarrError = gather()
        except NomarrError as error:
            overview = error
        show.show(overview)
        _wait(feed, wake, began)


def _wait(feed: int, wake: int, began: float) -> None:
    """Wait for an event, at least _SOONEST_S and at most _LATEST_S after the last drawing."""
    ends = began + _LATEST_S
    while (left_s := ends - time.monotonic()) > 0:
        ready, _, _ = select.select([wake, feed], [], [], left_s)
        if wake in ready:
            os.read(wake, 4096)
            return  # the terminal was resized: draw at once
        if ready:
            os.read(feed, 65536)
            ends = min(ends, max(time.monotonic(), began + _SOONEST_S))


class _Screen:
    """The terminal's alternate screen, overwritten in place so that nothing flickers."""

    def __enter__(self) -> None:
        sys.stdout.write(_ENTER)

    def __exit__(self, *_error: object) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()

    def show(self, overview: Overview | NomarrError) -> None:
        columns, rows = _size()
        columns -= 1  # erasing to the end of a full line would erase its last character
        lines = _compose(overview, columns, rows)
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            lines = [*lines[: rows - 1], fit(f"… and {hidden} lines more", columns)]
        if os.environ.get("NO_COLOR"):
            lines = [click.unstyle(line) for line in lines]
        text = "\x1b[K\r\n".join(lines)
        sys.stdout.write(f"\x1b[H{text}\x1b[K\x1b[J")
        sys.stdout.flush()


class _Lines:
    """Prints a JSON document in one line for each change; passing time is no change."""

    def __init__(self) -> None:
        self._shown: object = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass

    def show(self, overview: Overview | NomarrError) -> None:
        if isinstance(overview, NomarrError):
            document: dict[str, object] = {"error": str(overview)}
        else:
            workers = [view.to_json() for view in overview.views]
            document = {"supervisor": bool(overview.supervisor), "workers": workers}
        # Durations change all the time: compare without them.
        steady = json.dumps(document, default=str)
        if isinstance(overview, Overview):
            steady = json.dumps([document["supervisor"], [_steady(each) for each in workers]])
        if steady != self._shown:
            self._shown = steady
            sys.stdout.write(dump_json(document) + "\n")
            sys.stdout.flush()


def _steady(worker: dict[str, object]) -> dict[str, object]:
    passing = {
        "uptime_s": worker["uptime_s"] is None,
        "next_restart_in_s": worker["next_restart_in_s"] is None,
        "last_frame_wall_ms": worker["last_frame_wall_ms"] is None,
        "metrics": worker["metrics"] is None,
    }
    return worker | passing


def _size() -> tuple[int, int]:
    """Return the terminal's size now: it may have changed."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns = rows = 0
    return columns or 80, rows or 24


def _compose(overview: Overview | NomarrError, columns: int, rows: int) -> list[str]:
    clock = time.strftime("%H:%M:%S")
    lines = [click.style(fit(f"nomarrctl status   {clock}   Ctrl-C ends it", columns), dim=True)]
    if isinstance(overview, NomarrError):
        lines.append(fit(str(overview), columns))
        lines.append(fit(f"hint: {overview.hint}", columns) if overview.hint else "")
        return lines
    return lines + draw(overview, columns, rows - 1)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor that is readable after a resize; SIGTERM and SIGHUP end us as Ctrl-C does,
    so that the terminal is left as it was."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def note(_number: int, _frame: FrameType | None) -> None:
        """Do nothing: the descriptor becomes readable by itself."""

    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    kept = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGWINCH, note),
            (signal.SIGTERM, end),
            (signal.SIGHUP, end),
        )
    }
    try:
        yield reading
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
