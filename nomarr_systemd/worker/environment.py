"""A worker's settings, read from the environment that its unit sets (docs/contract.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from nomarr_systemd.config.store_url import parse_store_url
from nomarr_systemd.config.values import Pool, StoreSettings
from nomarr_systemd.core.errors import BadName, ConfigError
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import parse_component

_MAX_PAST = 200
_HINT = "nomarrctl apply writes the unit's environment; run it again"


class Settings(NamedTuple):
    """NOMARR_SETTINGS, a JSON object; a missing field has the configuration's default."""

    frame_interval_s: float = HealthRules().frame_interval_s
    stall_timeout_s: float = HealthRules().stall_timeout_s  # 0: the age of progress is not judged
    idle_evict_s: float = Pool("").idle_evict_s  # 0: never
    gpu_health_max_age_s: float = HealthRules().gpu_health_max_age_s
    claim_batch: int = 1
    store: StoreSettings | None = None  # None: the worker has no queue


class Environment(NamedTuple):
    component_id: str = ""
    health_pipe: str = ""  # empty: send no frames
    invocation: str = ""
    watchdog_s: float = 0.0  # 0: no watchdog
    settings: Settings = Settings()
    state_directory: str = ""  # where the ends of jobs are kept while the store is away
    past: str = ""  # its restarts and its last crash, in a few words


def read_environment(variables: Mapping[str, str], pid: int) -> Environment:
    """Return the environment of process ``pid``, or ConfigError."""
    component_id = variables.get("NOMARR_COMPONENT_ID", "")
    health_pipe = variables.get("NOMARR_HEALTH_PIPE", "")
    if component_id or health_pipe:
        try:
            component_id = parse_component(component_id).component_id
        except BadName as error:
            raise ConfigError(f"NOMARR_COMPONENT_ID: {error}", hint=_HINT) from error
    return Environment(
        component_id,
        health_pipe,
        variables.get("INVOCATION_ID", ""),
        _read_watchdog(variables, pid),
        _read_settings(variables.get("NOMARR_SETTINGS", "{}")),
        variables.get("STATE_DIRECTORY", "").partition(":")[0],
        variables.get("NOMARR_PAST", "")[:_MAX_PAST],
    )


def _read_watchdog(variables: Mapping[str, str], pid: int) -> float:
    if variables.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0  # for a parent process: see sd_watchdog_enabled(3)
    text = variables.get("WATCHDOG_USEC", "0")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"WATCHDOG_USEC is {text!r}, not a number", hint="systemd sets it")
    return int(text) / 1e6


def _read_settings(text: str) -> Settings:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"NOMARR_SETTINGS is not JSON: {error}", hint=_HINT) from error
    if not isinstance(given, dict):
        raise ConfigError("NOMARR_SETTINGS is not a JSON object", hint=_HINT)
    known = {name: given[name] for name in Settings._fields if name in given}
    store = _read_store(known.pop("store", None))
    batch = known.get("claim_batch", 1)
    if type(batch) is not int or not 1 <= batch <= 1000:
        raise ConfigError(f"NOMARR_SETTINGS: claim_batch is {str(batch)[:60]!r}", hint=_HINT)
    for name, value in known.items():
        # An interval of 0 would be a busy loop. NaN fails every comparison.
        least = 0.001 if name == "frame_interval_s" else 0
        if type(value) not in (int, float) or not least <= value <= 1e9:
            raise ConfigError(
                f"NOMARR_SETTINGS: {name} is {str(value)[:60]!r}, not a number of seconds",
                hint=_HINT,
            )
    return Settings(**known, store=store)


def _read_store(given: object) -> StoreSettings | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ConfigError("NOMARR_SETTINGS: store is not an object", hint=_HINT)
    known = {name: given[name] for name in StoreSettings._fields if name in given}
    for name, value in known.items():
        if type(value) is not type(StoreSettings._field_defaults[name]):
            raise ConfigError(f"NOMARR_SETTINGS: store: {name} has a wrong type", hint=_HINT)
    try:
        parse_store_url(known.get("url", ""))
    except BadName as error:
        raise ConfigError(f"NOMARR_SETTINGS: store: {error}", hint=_HINT) from error
    return StoreSettings(**known)
