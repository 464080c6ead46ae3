"""Status as lines of text: a table that fits the terminal, or one worker in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import click

from nomarr_systemd.cli.table import Table, brief, fit
from nomarr_systemd.core.job import POOL_FAILED
from nomarr_systemd.core.ledger_record import crash_word
from nomarr_systemd.core.text import count, describe_ms, one_line
from nomarr_systemd.operate.overview import Overview
from nomarr_systemd.operate.worker_view import View, describe_last_chance

_WIDE: Final = 120
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
    "waiting": "yellow",
    "inactive": "red",
    "paused": "cyan",
    "held": "cyan",
}
_DISAGREEMENTS: Final = {
    "hung-but-pinging": "frames come, and say that the work makes no progress",
    "pipe-wedged": "it still pings systemd, but no frames come any more",
    "supervisor-blind": "systemd shows it running, but the supervisor has received nothing",
}
_LEAST: Final = {"UNIT": 8, "HEALTH": 10, "UP": 6, "NEXT": 7}
_STATE: Final = {True: "UNIT", False: "HEALTH"}  # the column in the colour of the worker's state
_JOB: Final = {True: "JOB", False: "DOING"}  # the column that is cut when there is no room


def draw(overview: Overview, width: int, height: int | None = None) -> list[str]:
    """Return the lines of the whole table. If they are more than ``height``, those in trouble come
    first, and healthy ones are only counted, by pool."""
    lines = [*_draw_supervisor(overview, width)]
    if overview.spooled:
        text = f"The ledger is away: {count(overview.spooled, 'failure')} not booked yet; see"
        lines.append(click.style(fit(f"{text} nomarrctl doctor", width), fg="yellow"))
    views = overview.views
    if not overview.total:
        hint = "add [pool.NAME] to nomarr.toml, then nomarrctl apply."
        return [*lines, f"No workers are configured: {hint}"]
    if not views:
        return [*lines, f"No problems: {count(overview.total)}, none in trouble."]
    drawn = [*lines, *_draw_table(views, width), *_notes(views, width)]
    if height is None or len(drawn) <= height or not any(view.is_healthy for view in views):
        return drawn
    return [*lines, *_draw_table(views, width, fold=True), *_notes(views, width)]


def _draw_table(views: Sequence[View], width: int, *, fold: bool = False) -> Iterator[str]:
    wide = width >= _WIDE
    # Least widths, so that the columns of --watch do not move with every change.
    table = Table(_heads(wide), [_row(view, wide) for view in views], least=_LEAST)
    table.shrink(_JOB[wide], width, _SHORTEST_JOB)
    yield table.head(width)
    pools: dict[str, list[View]] = {}
    for view in sorted(views, key=lambda each: (each.rank if fold else 0, each.worker)):
        pools.setdefault(view.worker.pool, []).append(view)
    folded = 0
    for pool, members in pools.items():
        text = f"{pool}: {_count_states(members)}"
        yield click.style(fit(text, max(20, width)), dim=True)
        for view in members:
            if fold and view.is_healthy and not view.trouble:
                folded += 1
                continue
            colour = _COLOURS.get(view.state)
            yield table.row(_row(view, wide), width, {_STATE[wide]: colour} if colour else None)
    if folded:
        text = f"{count(folded)} healthy, and only counted here; nomarrctl status | less shows all."
        yield click.style(fit(text, max(20, width)), dim=True)


def _draw_supervisor(overview: Overview, width: int) -> Iterator[str]:
    if not overview.supervisor:
        unit = overview.supervisor_unit or "unknown"
        text = f"The supervisor does not answer (unit: {unit}): health and jobs are not known."
        yield click.style(fit(text, width), fg="yellow")
        systemctl = "systemctl --user" if overview.user else "systemctl"
        verb = "restart" if overview.supervisor_unit == "active" else "start"
        yield fit(f"To {verb} it: {systemctl} {verb} nomarr-supervisor.service", width)
    if overview.is_disk_full:
        text = "The ledger's disk is full: it lives on its reserve, and what is shown may be old."
        yield click.style(fit(text, width), fg="yellow")


def _heads(wide: bool) -> tuple[str, ...]:
    if wide:
        names = ("WORKER", "UNIT", "HEALTH", "PHASE", "JOB", "UP", "WINDOW", "LIFETIME", "NEXT")
        return (*names, "LAST CRASH")
    return ("WORKER", "HEALTH", "DOING", "UP", "WINDOW", "LIFE", "NEXT", "LAST")


def _row(view: View, wide: bool) -> tuple[str, ...]:
    up = "-" if view.uptime_ms is None else brief(view.uptime_ms)
    limit = f"/{view.lifetime_limit}" if view.lifetime_limit else ""
    known = not view.ledger_problem
    window = f"{view.window_used if known else '?'}/{view.window_limit}"
    lifetime = f"{view.lifetime_used}{limit}" if known else "?"
    job, phase = one_line(view.job, _MAX_CELL), one_line(view.phase, 20)
    upcoming = _next(view)
    if wide:
        unit = "masked" if view.load == "masked" else view.active
        last = "-"
        if view.last and view.last_age_ms is not None:
            last = f"{crash_word(view.last)} {brief(view.last_age_ms)} ago"
        health = one_line(view.health, 12) or "-"
        if view.load == "masked" and view.failure_reason:
            health = "failed"  # also if the supervisor was not told yet
        if view.state in ("paused", "held", "finished", "stopped", "waiting", "restarting"):
            health = view.state
        cells = (unit, health, phase or "-", job or "-", up, window, lifetime, upcoming, last)
        return (view.worker.instance, *cells)
    last = crash_word(view.last) if view.last else "-"
    state = one_line(view.state, 12)
    return (view.worker.instance, state, job or phase or "-", up, window, lifetime, upcoming, last)


def _next(view: View) -> str:
    if view.load == "masked":
        return "reset"
    if view.held:
        return "held" if _is_held(view) else "resume"
    if view.next_restart_ms is not None:
        return f"in {brief(view.next_restart_ms)}"
    return "retry" if view.state == "waiting" else "-"


def _count_states(views: Sequence[View]) -> str:
    counts: dict[str, int] = {}
    for view in views:
        counts[view.state] = counts.get(view.state, 0) + 1
    parts = ", ".join(f"{number} {one_line(word, 12)}" for word, number in sorted(counts.items()))
    return f"{count(len(views))}, {parts}"


def _is_held(view: View) -> bool:
    """Return True if it is held for another reason than a pause."""
    return bool(view.held) and not view.held.startswith("paused")


def _notes(views: Sequence[View], width: int) -> Iterator[str]:
    """Yield lines for what no column has room for."""
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
            text = f"{name}: systemd and its pipe disagree: {one_line(view.disagreement, 30)}"
            yield click.style(fit(f"{text} ({why})" if why else text, width), fg="yellow")
        if view.ledger_problem:
            yield click.style(fit(f"{name}: {view.ledger_problem}", width), fg="yellow")
        if view.note:
            yield click.style(fit(f"{name}: {one_line(view.note, 200)}", width), fg="yellow")
        if view.killed_by_jobs and "jobs killed it" in view.trouble:
            text = f"{name}: {view.trouble}; see nomarrctl jobs list --status error"
            yield click.style(fit(text, width), fg="yellow")
        if view.last_chance:
            text = f"{name}: {describe_last_chance(view.last_chance)}"
            yield click.style(fit(text, width), fg="yellow")
        is_told = view.held or view.load == "masked" or view.idle in ("", "restarting")
        if view.load not in ("loaded", "masked", "") or (view.trouble and not is_told):
            yield click.style(fit(f"{name}: {view.trouble}", width), fg="yellow")
        if view.load == "masked":
            why = f"failed: {view.failure_reason}" if view.failure_reason else view.trouble
            yield click.style(fit(f"{name}: {why}", width), fg="red")


def draw_in_full(view: View, ours: str) -> Iterator[str]:
    """Yield the lines about one worker, as systemctl status shows a unit. ``ours``: the command
    that people are told."""
    worker = view.worker
    dot = click.style("●", fg=_COLOURS.get(view.state))
    yield f"{dot} {click.style(worker.component_id, bold=True)} - {worker.unit}"
    up = "" if view.uptime_ms is None else f" for {describe_ms(max(0, view.uptime_ms))}"
    pid = f", pid {view.pid}" if view.pid else ""
    mask = ", masked" if view.load == "masked" else ""
    yield f"     Unit: {view.active} ({view.sub}){up}{pid}{mask}"
    phase = f", {one_line(view.phase, 30)}" if view.phase else ""
    yield f"   Health: {one_line(view.health, 20) or 'unknown'}{phase}"
    if view.note:
        yield f"     Says: {one_line(view.note, 200)}"
    if view.job:
        yield f"      Job: {one_line(view.job, 300)}"
    if view.disagreement:
        why = _DISAGREEMENTS.get(view.disagreement, "")
        yield click.style(f" Disagree: {one_line(view.disagreement, 30)}: {why}", fg="yellow")
    if view.ledger_problem:
        yield click.style(f"   Ledger: {one_line(view.ledger_problem, 400)}", fg="yellow")
    else:
        yield from _draw_counts(view)
    if view.held:
        yield f"     Held: {one_line(view.held, 200)}"
    if view.trouble and view.active in ("inactive", "failed") and view.load != "masked":
        yield click.style(f"     Down: {one_line(view.trouble, 300)}", fg="yellow")
    if view.next_restart_ms is not None:
        yield f"     Next: restart in {describe_ms(view.next_restart_ms)}"
    if view.failure_reason:
        yield click.style(f"   Failed: {one_line(view.failure_reason, 200)}", fg="red")
        is_pools = view.failure_reason.startswith(POOL_FAILED)
        what = f"--pool {worker.pool}" if is_pools else worker.instance
        yield f"     Mend: {ours} reset --start {what}"
    if view.last and view.last_age_ms is not None:
        ran = "" if view.last.run_ms is None else f" after {describe_ms(view.last.run_ms)}"
        ago = describe_ms(view.last_age_ms)
        yield f"     Last: {crash_word(view.last)}{ran}, {ago} ago; {one_line(view.last.text, 200)}"
        yield f"      Why: {ours} why {worker.instance}"


def _draw_counts(view: View) -> Iterator[str]:
    left = max(0, view.window_limit - view.window_used)
    within = describe_ms(round(view.window_s * 1000))
    yield (
        f"   Window: {view.window_used} of {count(view.window_limit, 'restart')} within {within},"
        f" {left} left"
    )
    limit = f" of {view.lifetime_limit}" if view.lifetime_limit else ", without a limit"
    yield f" Lifetime: {view.lifetime_used}{limit}"
