"""``nomarrctl policy simulate``: the failures on record under another policy, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from nomarr_systemd.cli.table import Table
from nomarr_systemd.core.ledger_record import crash_word
from nomarr_systemd.core.simulate import NOT_RUN, Step
from nomarr_systemd.core.text import count, describe_ms, one_line
from nomarr_systemd.operate.simulation import Replayed, add_up

_WORDS: Final = {
    "restart": "restart after {}",
    "fail": "masked",
    "hold": "held",
    "ignore": "not counted",
    NOT_RUN: "did not run",
}
_COLOURS: Final = {"fail": "red", NOT_RUN: "cyan"}


def draw(replays: Sequence[Replayed], settings: dict[str, Any]) -> Iterator[str]:
    tried = ", ".join(f"{key} = {value}" for key, value in settings.items())
    yield click.style(f"With {tried or 'the policy in force'}:", bold=True)
    for each in replays:
        if not each.result.steps:
            continue
        yield ""
        yield click.style(each.worker.component_id, bold=True)
        yield from _draw_steps(each.result.steps)
        if not each.result.whole:
            yield "  Earlier failures are not on record any more."
    recorded, simulated = add_up(replays)
    yield ""
    rows = [
        ("restarts", str(recorded.restarts), str(simulated.restarts)),
        ("masks", str(recorded.masks), str(simulated.masks)),
        ("did not run", "-", str(simulated.not_run)),
        ("downtime", describe_ms(recorded.down_ms), describe_ms(simulated.down_ms)),
    ]
    if simulated.unknown_ms:
        rows.append(("unknown", "-", describe_ms(simulated.unknown_ms)))
    heads = ("", "ON RECORD", "SIMULATED")
    table = Table(heads, rows, least=dict.fromkeys(heads, 12), right=heads[1:])
    yield from (f"  {table.row(cells)}" for cells in (heads, *rows))
    yield ""
    saved_ms = recorded.down_ms - simulated.down_ms
    yield _verdict(saved_ms, len(replays), simulated.unknown_ms)
    if simulated.unknown_ms:
        yield (
            f"Unknown for {describe_ms(simulated.unknown_ms)}: it was masked then, so no run on"
            " record shows whether it would have failed again."
        )
    yield (
        "Assumed: every run fails after the same time as on record; a mask lasts until a person's"
        " next reset, restart or resume on record, or until now."
    )


def _draw_steps(steps: Sequence[Step]) -> Iterator[str]:
    heads = ("DIED", "OF", "ON RECORD", "SIMULATED")
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.record.wall_ms / 1000)),
            one_line(crash_word(step.record), 14),
            _spell(step.record.action, step.record.delay_ms),
            _spell(step.action, step.delay_ms),
        )
        for step in steps
    ]
    table = Table(heads, rows, least={"OF": 14, "ON RECORD": 20})
    yield f"  {table.row(heads)}"
    for step, cells in zip(steps, rows, strict=True):
        differs = (step.action, step.delay_ms) != (step.record.action, step.record.delay_ms)
        colour = _COLOURS.get(step.action, "yellow")
        yield f"  {table.row(cells, colours={'SIMULATED': colour} if differs else None)}"


def _verdict(saved_ms: int, workers: int, unknown_ms: int) -> str:
    of = f" of {count(workers)}" if workers > 1 else ""
    if unknown_ms and saved_ms > 0:
        least_ms = max(0, saved_ms - unknown_ms)
        span = f"between {describe_ms(least_ms)} and {describe_ms(saved_ms)}"
        text, colour = f"It would have saved {span} of downtime{of}.", "yellow"
    elif saved_ms > 0:
        text, colour = f"It would have saved {describe_ms(saved_ms)} of downtime{of}.", "green"
    elif saved_ms < 0:
        text, colour = f"It would have cost {describe_ms(-saved_ms)} more downtime{of}.", "red"
    else:
        text, colour = "It would have made no difference to the downtime.", None
    return click.style(text, fg=colour)


def _spell(action: str, delay_ms: int) -> str:
    return _WORDS.get(action, action).format(describe_ms(delay_ms))
