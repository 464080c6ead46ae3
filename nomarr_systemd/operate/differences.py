"""Two configurations compared, in the words of nomarr.toml: what changes, from what to what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nomarr_systemd.config.settings import POOL
from nomarr_systemd.config.values import Config, Pool


class Change(NamedTuple):
    """One key whose value changes; None where it is not set, or where the section is new."""

    section: str  # as in the file: pool.tag.policy
    key: str
    old: Any
    new: Any


def compare(before: Config, after: Config) -> list[Change]:
    """Return all changes, in the order of the sections. A pool that is new or gone is one change of
    its ``workers``."""
    both = (before, after)
    return [
        *_compare_values("store", *(each.store._replace(host="")._asdict() for each in both)),
        *_compare_values("fleet", before.fleet._asdict(), after.fleet._asdict()),
        *_compare_values("policy", before.policy._asdict(), after.policy._asdict()),
        *_compare_values("health", before.health._asdict(), after.health._asdict()),
        *_compare_values("web", before.web._asdict(), after.web._asdict()),
        *_compare_pools(before.pools, after.pools),
        *_compare_workers(before, after),
    ]


def _compare_pools(before: Iterable[Pool], after: Iterable[Pool]) -> Iterator[Change]:
    old, new = ({pool.name: pool for pool in pools} for pools in (before, after))
    for name in [*new, *(name for name in old if name not in new)]:
        was, now = old.get(name), new.get(name)
        section = f"pool.{name}"
        if was is None or now is None:
            numbers = (pool and pool.workers for pool in (was, now))
            yield Change(section, "workers", *numbers)
            continue
        keys = [setting.key for setting in POOL]
        yield from _compare_values(section, _pick(was, keys), _pick(now, keys))
        for part, rules, own in (
            ("policy", "rules", "own_rules"),
            ("health", "health", "own_health"),
        ):
            # What a pool takes over from [policy] and [health] is shown there.
            values = [_pick(getattr(pool, rules), getattr(pool, own)) for pool in (was, now)]
            yield from _compare_values(f"{section}.{part}", *values)
        yield from _compare_values(f"{section}.unit", dict(was.unit), dict(now.unit))


def _compare_workers(before: Config, after: Config) -> Iterator[Change]:
    old, new = (
        {own.component.instance: _pick(own.rules, own.own_rules) for own in config.workers}
        for config in (before, after)
    )
    for name in sorted(old.keys() | new.keys()):
        yield from _compare_values(f"worker.{name}.policy", old.get(name, {}), new.get(name, {}))


def _compare_values(
    section: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Change]:
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key), new.get(key)
        if was != now:
            yield Change(section, key, was, now)


def _pick(value: object, keys: Iterable[str]) -> dict[str, Any]:
    return {key: getattr(value, key) for key in keys}
