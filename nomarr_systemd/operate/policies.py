"""The policy of a worker: each rule, its value, and where it was written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nomarr_systemd.config.values import DEFAULT_RULES, Config, Origin
from nomarr_systemd.core.ids import Component

Value = int | float | str | tuple[int, ...]


class Effective(NamedTuple):
    """One rule of one worker."""

    rule: str
    value: Value
    default: Value
    origin: Origin

    @property
    def differs(self) -> bool:
        return self.value != self.default


def resolve(config: Config, worker: Component) -> tuple[Effective, ...]:
    """Return every rule of a worker, or NoSuchWorker."""
    rules = config.rules_for(worker)
    return tuple(
        Effective(rule, value, getattr(DEFAULT_RULES, rule), config.origin_of(worker, rule))
        for rule, value in rules._asdict().items()
    )


def to_json(worker: Component, rules: Iterable[Effective]) -> dict[str, object]:
    return {
        "component": worker.component_id,
        "policy": {
            each.rule: {"value": each.value, "default": each.default, "from": each.origin}
            for each in rules
        },
    }
