"""What another policy would have done with the failures on record: settings, sums, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nomarr_systemd.config.settings import POLICY, check, convert, explain_unknown
from nomarr_systemd.core.account import RING
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.simulate import Simulation, Sum
from nomarr_systemd.core.text import quote


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
            raise BadName(f"{quote(text)} is not KEY=VALUE", hint="write --set max_restarts=3")
        if key not in settings:
            fault = explain_unknown(key, list(settings))
            hint = fault.suggestion or f"keys are {', '.join(settings)}"
            raise BadName(f"--set {quote(key)}: {fault.problem}", hint=hint)
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except (ValueError, RecursionError):
            value = written.strip()  # a text that was written without quotes
        for fault in check(settings[key], value):
            raise BadName(f"--set {key}: {fault.problem}", hint=fault.suggestion)
        found[key] = convert(settings[key], value)
    return found


def change(rules: Rules, settings: dict[str, Any]) -> Rules:
    """Return the rules with these settings, or BadName if they do not fit each other."""
    changed = rules._replace(**settings)
    if changed.lifetime_days and changed.max_lifetime_restarts > RING:
        raise BadName(f"with lifetime_days max_lifetime_restarts must not be above {RING}")
    if changed.backoff_base_s > changed.backoff_max_s:
        raise BadName(
            f"backoff_base_s ({changed.backoff_base_s:g}) must not be above backoff_max_s"
            f" ({changed.backoff_max_s:g})",
            hint="set both",
        )
    return changed


def add_up(replays: Sequence[Replayed]) -> tuple[Sum, Sum]:
    """Return the sums of all workers, recorded and simulated."""
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
        "saved_at_least_s": (recorded.down_ms - simulated.down_ms - simulated.unknown_ms) / 1000,
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
                            "unknown_s": step.unknown_ms / 1000,
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
        "unknown_s": total.unknown_ms / 1000,
    }
