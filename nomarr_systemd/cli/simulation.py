"""``nomarrctl policy simulate``: the failures on record under another policy, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from nomarr_systemd.cli.table import Table
from nomarr_systemd.config.settings import POLICY, check, convert, explain_unknown
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.simulate import NOT_RUN, Simulation, Step, Sum
from nomarr_systemd.core.text import count, describe_ms, one_line, quote
from nomarr_systemd.operate.overview import crash_word

_WORDS: Final = {
    "restart": "restart after {}",
    "fail": "masked",
    "hold": "held",
    "ignore": "not counted",
    NOT_RUN: "did not run",
}
_COLOURS: Final = {"fail": "red", NOT_RUN: "cyan"}


class Replayed(NamedTuple):
    """One worker's failures under the rules that are tried."""

    worker: Component
    rules: Rules
    result: Simulation


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` as in [policy]; BadName says what is wrong."""
    import tomllib

    settings = {setting.key: setting for setting in POLICY}
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        key = key.strip()
        if not equals:
            raise BadName(f"{quote(text)} sets nothing", hint="write --set max_restarts=3")
        if key not in settings:
            fault = explain_unknown(key, list(settings))
            hint = fault.suggestion or f"keys are {', '.join(settings)}"
            raise BadName(f"--set {quote(key)}: {fault.problem}", hint=hint)
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except (ValueError, RecursionError):
            value = written.strip()  # a text without its quotes
        for fault in check(settings[key], value):
            raise BadName(f"--set {key}: {fault.problem}", hint=fault.suggestion)
        found[key] = convert(settings[key], value)
    return found


def change(rules: Rules, settings: dict[str, Any]) -> Rules:
    """The rules with these settings, or BadName if they do not fit each other."""
    changed = rules._replace(**settings)
    if changed.backoff_base_s > changed.backoff_max_s:
        raise BadName(
            f"backoff_base_s ({changed.backoff_base_s:g}) must not be above backoff_max_s"
            f" ({changed.backoff_max_s:g})",
            hint="set both",
        )
    return changed


def add_up(replays: Sequence[Replayed]) -> tuple[Sum, Sum]:
    """The sums of all workers, recorded and simulated."""
    recorded = [each.result.recorded for each in replays]
    simulated = [each.result.simulated for each in replays]
    return _sum(recorded), _sum(simulated)


def _sum(sums: Sequence[Sum]) -> Sum:
    return Sum(*(sum(column) for column in zip(*sums, strict=True))) if sums else Sum(0, 0, 0, 0)


def to_json(replays: Sequence[Replayed], settings: dict[str, Any]) -> dict[str, Any]:
    recorded, simulated = add_up(replays)
    return {
        "set": settings,
        "recorded": _sum_to_json(recorded),
        "simulated": _sum_to_json(simulated),
        "saved_s": (recorded.down_ms - simulated.down_ms) / 1000,
        "workers": [
            {
                "component": each.worker.component_id,
                "policy": each.rules._asdict(),
                "whole": each.result.whole,
                "recorded": _sum_to_json(each.result.recorded),
                "simulated": _sum_to_json(each.result.simulated),
                "failures": [
                    {
                        "invocation": step.record.invocation,
                        "wall_ms": step.record.wall_ms,
                        "class": step.record.kind,
                        "code": step.record.code,
                        "recorded": {
                            "action": step.record.action,
                            "delay_s": step.record.delay_ms / 1000,
                            "down_s": step.down_ms / 1000,
                            "reason": step.record.text,
                        },
                        "simulated": {
                            "action": step.action,
                            "delay_s": step.delay_ms / 1000,
                            "down_s": step.would_be_down_ms / 1000,
                            "reason": step.reason,
                        },
                    }
                    for step in each.result.steps
                ],
            }
            for each in replays
        ],
    }


def _sum_to_json(total: Sum) -> dict[str, Any]:
    return {
        "restarts": total.restarts,
        "masks": total.masks,
        "not_run": total.not_run,
        "down_s": total.down_ms / 1000,
    }


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
    heads = ("", "ON RECORD", "SIMULATED")
    table = Table(heads, rows, least=dict.fromkeys(heads, 12), right=heads[1:])
    yield from (f"  {table.row(cells)}" for cells in (heads, *rows))
    yield ""
    yield _verdict(recorded.down_ms - simulated.down_ms, len(replays))
    yield (
        "Taken for granted: every run fails after the time it did; a mask lasts until somebody"
        " acted, or until now."
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


def _verdict(saved_ms: int, workers: int) -> str:
    of = f" of {count(workers)}" if workers > 1 else ""
    if saved_ms > 0:
        text, colour = f"It would have saved {describe_ms(saved_ms)} of downtime{of}.", "green"
    elif saved_ms < 0:
        text, colour = f"It would have cost {describe_ms(-saved_ms)} more downtime{of}.", "red"
    else:
        text, colour = "It would have made no difference to the downtime.", None
    return click.style(text, fg=colour)


def _spell(action: str, delay_ms: int) -> str:
    return _WORDS.get(action, action).format(describe_ms(delay_ms))
