"""``nomarrctl history --health``: the health of a worker over time, drawn in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import click

from nomarr_systemd.cli.common import echo_json
from nomarr_systemd.cli.table import width_of_terminal
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.host import clock
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.ledger import health_series
from nomarr_systemd.ledger.health_series import STATUS_OF, Bucket
from nomarr_systemd.live import client
from nomarr_systemd.live.protocol import HISTORY

SCHEMA: Final = "nomarr.health/1"
DAY_MS: Final = 86_400_000
_WAIT_S: Final = 5.0
_ROWS: Final = 4
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_COLOURS: Final = {"h": "green", "s": "blue", "r": "blue", "u": "yellow", "c": "red", "f": "red"}


def show(paths: Paths, worker: Component, since_ms: int | None, *, as_json: bool) -> None:
    """Draw the health, or print JSON. The supervisor reads the store: users need no access."""
    now_ms = clock.wall_ms()
    since_ms = now_ms - DAY_MS if since_ms is None else since_ms
    points = 300 if as_json else max(20, min(width_of_terminal(), 200) - 2)
    request = {
        "op": HISTORY,
        "components": [worker.component_id],
        "since_ms": since_ms,
        "until_ms": now_ms,
        "points": points,
        "records": True,
    }
    answer = client.ask(paths.live, request, timeout_s=_WAIT_S)
    if not answer:
        raise NomarrError(
            "the supervisor does not answer, and only it can read the history of health",
            hint="see systemctl status nomarr-supervisor.service; nomarrctl history"
            " without --health works without it",
        )
    buckets, records = health_series.parse_answer(answer, worker.component_id)
    if as_json:
        echo_json(_to_json(worker, since_ms, now_ms, points, buckets))
    else:
        click.echo("\n".join(draw(worker, since_ms, now_ms, points, buckets, records)))


def draw(
    worker: Component,
    since_ms: int,
    until_ms: int,
    points: int,
    buckets: list[Bucket],
    records: list[Record],
) -> Iterator[str]:
    """Yield a column for each step: how much of it the worker was healthy, in the colour of its
    worst status; marks above for deaths."""
    step_ms = health_series.choose_step(since_ms, until_ms, points)
    first = since_ms // step_ms
    width = until_ms // step_ms - first + 1
    columns: dict[int, Bucket] = {each.start_ms // step_ms - first: each for each in buckets}
    marks = {record.wall_ms // step_ms - first for record in records if record.kind}
    yield click.style(f"{worker.component_id}, each column {_span(step_ms)}", bold=True)
    if not columns:
        yield "There are no samples in this span."
        return
    yield click.style("".join("▼" if n in marks else " " for n in range(width)).rstrip(), fg="red")
    for row in range(_ROWS - 1, -1, -1):
        yield "".join(_cell(columns.get(n), row) for n in range(width)).rstrip()
    left, right = (
        time.strftime("%m-%d %H:%M", time.localtime(m / 1000)) for m in (since_ms, until_ms)
    )
    yield f"{left}{right:>{max(1, width - len(left))}}"
    yield _sum(buckets, len([record for record in records if record.kind]))


def _cell(bucket: Bucket | None, row: int) -> str:
    if bucket is None:
        return " "
    total = sum(bucket.counts.values())
    share = bucket.counts.get("h", 0) / total
    # If the worker was never healthy in a step, the lowest row shows that there are samples.
    level = max(share * _ROWS * 8, 1 if row == 0 else 0)
    block = _BLOCKS[max(0, min(8, round(level - row * 8)))]
    return click.style(block, fg=_COLOURS.get(bucket.worst)) if block != " " else block


def _sum(buckets: list[Bucket], deaths: int) -> str:
    counts: dict[str, int] = {}
    for bucket in buckets:
        for letter, count in bucket.counts.items():
            counts[letter] = counts.get(letter, 0) + count
    total = sum(counts.values())
    parts = [
        f"{STATUS_OF[letter]} {100 * count / total:.1f} %"
        for letter, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return f"{', '.join(parts)}; {deaths} deaths (▼), {sum(b.runs for b in buckets)} new runs"


def _span(ms: int) -> str:
    for size, unit in ((DAY_MS, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 1000:.3g} s"


def _to_json(
    worker: Component, since_ms: int, until_ms: int, points: int, buckets: list[Bucket]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "component": worker.component_id,
        "since_ms": since_ms,
        "until_ms": until_ms,
        "step_ms": health_series.choose_step(since_ms, until_ms, points),
        "health": [each.to_json() for each in buckets],
    }
