"""Status as lines of text: a table that fits the terminal, or one worker in full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import click

from nomarr_systemd.cli.common import clean, count
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.core.text import describe_ms
from nomarr_systemd.operate.overview import Overview, View, crash_word

_WIDE: Final = 120
_PIPED: Final = 1000
_MAX_CELL: Final = 60
_SHORTEST_JOB: Final = 8
_COLOURS: Final = {
    "healthy": "green",
    "active": "green",
    "masked": "red",
    "failed": "red",
    "crashed": "red",
    "unhealthy": "yellow",
    "recovering": "yellow",
    "restarting": "yellow",
    "paused": "cyan",
    "held": "cyan",
}
_DISAGREEMENTS: Final = {
    "hung-but-pinging": "frames come, and say that the work stands still",
    "pipe-wedged": "systemd hears from it, but no frames come any more",
    "supervisor-blind": "systemd calls it running, but the supervisor has heard nothing",
}
_LEAST: Final = {"UNIT": 8, "HEALTH": 10, "UP": 6, "NEXT": 7}
_JOB: Final = {True: 4, False: 2}  # the column that is cut when there is no room: JOB, DOING


def fit(text: str, room: int) -> str:
    """Clean, and cut where it would not fit; a sign of Chinese takes the room of two."""
    text = clean(text, 1000)
    if len(text) <= room and text.isascii():
        return text
    taken, used = "", 0
    for sign in text:
        used += _width(sign)
        if used > room:
            while taken and _room(taken) > room - 1:
                taken = taken[:-1]
            return taken + "…"
        taken += sign
    return taken


def _room(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(sign: str) -> int:
    if sign.isascii():
        return 1
    from unicodedata import combining, east_asian_width

    return 0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1


def width_of_terminal() -> int:
    """As wide as COLUMNS or the terminal; for a file or a pipe as wide as it takes."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isascii() and wanted.isdigit() and int(wanted[:6]) > 0:
        return int(wanted[:6])
    try:  # shutil's would ask the same, but costs a tenth of our start
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return _PIPED


def draw(overview: Overview, width: int) -> Iterator[str]:
    """Everything on one screen."""
    views = overview.views
    yield from _draw_supervisor(overview, width)
    if not views:
        yield "No workers are configured: add [pool.NAME] to nomarr.toml, then nomarrctl apply."
        return
    wide = width >= _WIDE
    heads = _heads(wide)
    rows = [_row(view, wide) for view in views]
    column = _JOB[wide]
    widths = [max(map(_room, cells)) for cells in zip(heads, *rows, strict=True)]
    # The table of a --watch should not move with every word.
    widths = [max(room, _LEAST.get(head, 0)) for head, room in zip(heads, widths, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    if over > 0:
        widths[column] = max(_SHORTEST_JOB, widths[column] - over)
    yield click.style(_line(heads, widths, width), bold=True)
    for pool, members in groupby(zip(views, rows, strict=True), key=lambda each: each[0].worker[0]):
        group = list(members)
        words = _count_states([view for view, _ in group])
        yield click.style(fit(f"{pool}: {words}", max(20, width)), dim=True)
        for view, cells in group:
            yield _line(cells, widths, width, colour=_COLOURS.get(view.state))
    yield from _notes(views, width)


def _draw_supervisor(overview: Overview, width: int) -> Iterator[str]:
    if not overview.supervisor:
        unit = overview.supervisor_unit or "unknown"
        text = f"The supervisor does not answer (unit: {unit}): health and jobs are not known."
        yield click.style(fit(text, width), fg="yellow")
        systemctl = "systemctl --user" if overview.user else "systemctl"
        yield fit(f"To start it: {systemctl} start nomarr-supervisor.service", width)


def _heads(wide: bool) -> tuple[str, ...]:
    if wide:
        names = ("WORKER", "UNIT", "HEALTH", "PHASE", "JOB", "UP", "WINDOW", "LIFETIME", "NEXT")
        return (*names, "LAST CRASH")
    return ("WORKER", "HEALTH", "DOING", "UP", "WINDOW", "LIFE", "NEXT", "LAST")


def _row(view: View, wide: bool) -> tuple[str, ...]:
    up = "-" if view.uptime_ms is None else _brief(view.uptime_ms)
    limit = f"/{view.lifetime_limit}" if view.lifetime_limit else ""
    window = f"{view.window_used}/{view.window_limit}"
    lifetime = f"{view.lifetime_used}{limit}"
    job, phase = clean(view.job, _MAX_CELL), clean(view.phase, 20)
    upcoming = _next(view)
    if wide:
        unit = "masked" if view.load == "masked" else view.active
        last = "-"
        if view.last and view.last_age_ms is not None:
            last = f"{crash_word(view.last)} {_brief(view.last_age_ms)} ago"
        health = clean(view.health, 12) or "-"
        if view.state in ("paused", "held"):
            health = view.state
        cells = (unit, health, phase or "-", job or "-", up, window, lifetime, upcoming, last)
        return (view.worker.instance, *cells)
    last = crash_word(view.last) if view.last else "-"
    state = clean(view.state, 12)
    return (view.worker.instance, state, job or phase or "-", up, window, lifetime, upcoming, last)


def _next(view: View) -> str:
    if view.load == "masked":
        return "reset"
    if view.held:
        return "held" if _is_held(view) else "resume"
    if view.next_restart_ms is not None:
        return f"in {_brief(view.next_restart_ms)}"
    return "-"


def _brief(ms: int) -> str:
    """A duration in one unit, to fit a column."""
    if ms < 1000:
        return "0 s" if ms <= 0 else "1 s"
    return " ".join(describe_ms(ms // 1000 * 1000).split()[:2])


def _line(
    cells: Sequence[str], widths: Sequence[int], width: int, *, colour: str | None = None
) -> str:
    shown = []
    for number, (text, room) in enumerate(zip(cells, widths, strict=True)):
        cut = fit(text, room)
        padding = 0 if number == len(cells) - 1 else room - _room(cut)
        shown.append(cut + " " * padding)
    if sum(map(_room, shown)) + 2 * (len(shown) - 1) > width:  # the names alone are too long
        return fit("  ".join(shown), max(20, width))
    if colour:
        shown[1] = click.style(shown[1], fg=colour)
    return "  ".join(shown)


def _count_states(views: Sequence[View]) -> str:
    counts: dict[str, int] = {}
    for view in views:
        counts[view.state] = counts.get(view.state, 0) + 1
    parts = ", ".join(f"{number} {clean(word, 12)}" for word, number in sorted(counts.items()))
    return f"{count(len(views))}, {parts}"


def _is_held(view: View) -> bool:
    """For another reason than that a person paused it."""
    return bool(view.held) and not view.held.startswith("paused")


def _notes(views: Sequence[View], width: int) -> Iterator[str]:
    """What a column has no room for."""
    reasons = dict.fromkeys((view.worker.pool, view.held) for view in views if _is_held(view))
    for pool, why in reasons:
        names = [
            view.worker.instance for view in views if (view.worker.pool, view.held) == (pool, why)
        ]
        hint = (
            f"; to start them now: nomarrctl resume {pool}" if why.startswith("incident:") else ""
        )
        yield click.style(fit(f"{', '.join(names)}: held: {why}{hint}", width), fg="cyan")
    for view in views:
        name = view.worker.instance
        if view.disagreement:
            why = _DISAGREEMENTS.get(view.disagreement, "")
            text = f"{name}: systemd and its pipe disagree: {clean(view.disagreement, 30)}"
            yield click.style(fit(f"{text} ({why})" if why else text, width), fg="yellow")
        if view.load == "masked" and view.failure_reason:
            yield click.style(fit(f"{name}: failed: {view.failure_reason}", width), fg="red")


def draw_in_full(view: View) -> Iterator[str]:
    """One worker, as systemctl status shows a unit."""
    worker = view.worker
    dot = click.style("●", fg=_COLOURS.get(view.state))
    yield f"{dot} {click.style(worker.component_id, bold=True)} - {worker.unit}"
    up = "" if view.uptime_ms is None else f" for {describe_ms(max(0, view.uptime_ms))}"
    pid = f", pid {view.pid}" if view.pid else ""
    mask = ", masked" if view.load == "masked" else ""
    yield f"     Unit: {view.active} ({view.sub}){up}{pid}{mask}"
    phase = f", {clean(view.phase, 30)}" if view.phase else ""
    yield f"   Health: {clean(view.health, 20) or 'unknown'}{phase}"
    if view.job:
        yield f"      Job: {clean(view.job, 300)}"
    if view.disagreement:
        why = _DISAGREEMENTS.get(view.disagreement, "")
        yield click.style(f" Disagree: {clean(view.disagreement, 30)}: {why}", fg="yellow")
    left = max(0, view.window_limit - view.window_used)
    within = describe_ms(round(view.window_s * 1000))
    yield (
        f"   Window: {view.window_used} of {count(view.window_limit, 'restart')} within {within},"
        f" {left} left"
    )
    limit = f" of {view.lifetime_limit}" if view.lifetime_limit else ", without a limit"
    yield f" Lifetime: {view.lifetime_used}{limit}"
    if view.held:
        yield f"     Held: {clean(view.held)}"
    if view.next_restart_ms is not None:
        yield f"     Next: restart in {describe_ms(view.next_restart_ms)}"
    if view.failure_reason:
        yield click.style(f"   Failed: {clean(view.failure_reason)}", fg="red")
        is_pools = view.failure_reason.startswith(POOL_FAILED)
        what = f"--pool {worker.pool}" if is_pools else worker.instance
        yield f"     Mend: nomarrctl reset --start {what}"
    if view.last and view.last_age_ms is not None:
        ran = "" if view.last.run_ms is None else f" after {describe_ms(view.last.run_ms)}"
        ago = describe_ms(view.last_age_ms)
        yield f"     Last: {clean(crash_word(view.last))}{ran}, {ago} ago; {clean(view.last.text)}"
        yield f"      Why: nomarrctl why {worker.instance}"
