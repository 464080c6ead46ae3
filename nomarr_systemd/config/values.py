"""The configuration as values: what the file says, with every default filled in and every override
merged. ``file`` reads TOML and ``check`` finds mistakes; this module converts to JSON and back. The
resident programs read only that JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from nomarr_systemd.core.errors import ConfigError, NomarrError, NoSuchWorker
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.job import CrashPolicy
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Rules

Directive = str | int | bool | tuple[str, ...]
Origin = Literal["default", "policy", "pool", "worker"]

DEFAULT_RULES = Rules()


class Copies(NamedTuple):
    """How a cluster of ArangoDB keeps what is made in it; 0 and empty: as the server does."""

    replication_factor: int = 0
    write_concern: int = 0
    sharding: str = ""

    def given(self) -> dict[str, int | str]:
        return {name: value for name, value in self._asdict().items() if value}


class StoreSettings(NamedTuple):
    """``[store]``: where the documents are, and the files that hold the passwords."""

    url: str = "sqlite:///var/lib/nomarr"
    password_file: str = ""
    ca_file: str = ""
    work_user: str = ""
    work_password_file: str = ""
    replication_factor: int = 0
    write_concern: int = 0
    sharding: str = ""
    host: str = ""  # [fleet] host, which every program that uses the store has to know

    @property
    def copies(self) -> Copies:
        return Copies(self.replication_factor, self.write_concern, self.sharding)


class FleetSettings(NamedTuple):
    """``[fleet]``: hosts that share a store."""

    host: str = ""  # this host's name there; empty: an id made from its machine-id
    lease_s: float = 30.0
    max_restarts_at_once: int = 0  # of each pool, on all hosts; 0: no limit


class WebSettings(NamedTuple):
    """``[web]``: where the page is served, its host names, and the file of its token."""

    listen: str = "127.0.0.1:8765"
    hosts: str = ""  # names by which the page is reached, besides those of the address
    token_file: str = ""


class Pool(NamedTuple):
    """``[pool.NAME]``: workers that run the same program. ``rules`` are merged over [policy],
    ``health`` over [health]."""

    name: str
    workers: int = 1
    entrypoint: str = ""
    command: tuple[str, ...] = ()
    user: str = ""  # of the system; empty: the package's user for workers
    watchdog_s: float = 30.0
    stop_timeout_s: float = 90.0
    idle_evict_s: float = 300.0
    claim_timeout_s: float = 30.0
    crash_policy: CrashPolicy = "restart-fail-in-flight"
    crash_max_retries: int | None = None
    job_max_crashes: int = 2
    rules: Rules = DEFAULT_RULES
    own_rules: tuple[str, ...] = ()  # the keys set in [pool.NAME.policy]
    health: HealthRules = HealthRules()  # merged over [health]
    own_health: tuple[str, ...] = ()  # the keys set in [pool.NAME.health]
    unit: tuple[tuple[str, Directive], ...] = ()
    claim_batch: int = 1  # jobs that a worker takes at once


class WorkerRules(NamedTuple):
    """``[worker.INSTANCE.policy]``: one worker's rules, merged over its pool's."""

    component: Component
    rules: Rules
    own_rules: tuple[str, ...] = ()


class Config(NamedTuple):
    """Everything that is configured."""

    store: StoreSettings = StoreSettings()
    fleet: FleetSettings = FleetSettings()
    policy: Rules = DEFAULT_RULES
    own_policy: tuple[str, ...] = ()  # the keys set in [policy]
    health: HealthRules = HealthRules()
    web: WebSettings = WebSettings()
    pools: tuple[Pool, ...] = ()
    workers: tuple[WorkerRules, ...] = ()

    def components(self) -> tuple[Component, ...]:
        """Return every configured worker: pools in the file's order, then by number."""
        return tuple(Component(pool.name, n) for pool in self.pools for n in range(pool.workers))

    def pool_of(self, component: Component) -> Pool:
        """Return the pool that has this worker, or NoSuchWorker."""
        for pool in self.pools:
            if pool.name == component.pool and component.number < pool.workers:
                return pool
        raise NoSuchWorker(
            f"{component} is not configured",
            hint=f"workers are numbered from 0: see workers = … in [pool.{component.pool}]",
        )

    def rules_for(self, component: Component) -> Rules:
        """Return the restart policy in force: the worker's own over its pool's over [policy]."""
        pool = self.pool_of(component)
        own = self._own(component)
        return own.rules if own else pool.rules

    def health_for(self, component: Component) -> HealthRules:
        """Return the rules of health in force: its pool's; for an unknown worker, those of
        [health]."""
        pool = next((each for each in self.pools if each.name == component.pool), None)
        return pool.health if pool else self.health

    def find_rules(self, component: Component) -> Rules:
        """Return the restart policy in force; for a worker that is not configured, [policy]."""
        try:
            return self.rules_for(component)
        except NoSuchWorker:
            return self.policy

    def origin_of(self, component: Component, rule: str) -> Origin:
        """Return where the value of one of the worker's rules was written."""
        pool = self.pool_of(component)
        own = self._own(component)
        if own and rule in own.own_rules:
            return "worker"
        if rule in pool.own_rules:
            return "pool"
        return "policy" if rule in self.own_policy else "default"

    def _own(self, component: Component) -> WorkerRules | None:
        return next((own for own in self.workers if own.component == component), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict that JSON can hold."""
        return {
            "store": self.store._asdict(),
            "fleet": self.fleet._asdict(),
            "policy": self.policy._asdict(),
            "own_policy": self.own_policy,
            "health": self.health._asdict(),
            "web": self.web._asdict(),
            "pools": [
                pool._asdict() | {"rules": pool.rules._asdict(), "health": pool.health._asdict()}
                for pool in self.pools
            ],
            "workers": [
                {
                    "component": own.component.component_id,
                    "rules": own.rules._asdict(),
                    "own_rules": own.own_rules,
                }
                for own in self.workers
            ],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Config:
        """Return the configuration that ``to_dict`` returned, or ConfigError.

        After an upgrade or a downgrade the reader may be of another version than the writer: a
        missing field gets its default, an unknown one is skipped. The controller must run.
        """
        try:
            health = stored.get("health", {})
            return cls(
                store=_build(StoreSettings, stored.get("store", {})),
                fleet=_build(FleetSettings, stored.get("fleet", {})),
                policy=_build(Rules, stored.get("policy", {})),
                own_policy=tuple(stored.get("own_policy", ())),
                health=_build(HealthRules, health),
                web=_build(WebSettings, stored.get("web", {})),
                # A pool that an older version has written has the rules of [health].
                pools=tuple(
                    _build(Pool, {"health": health, **pool}) for pool in stored.get("pools", ())
                ),
                workers=tuple(_build(WorkerRules, own) for own in stored.get("workers", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError, NomarrError) as error:
            raise ConfigError(
                f"the applied configuration is damaged: {error}", hint="run nomarrctl apply"
            ) from error


_Value = TypeVar("_Value", bound=tuple[Any, ...])


def _build(kind: type[_Value], stored: Mapping[str, Any]) -> _Value:
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return kind(**{name: _restore(name, stored[name]) for name in fields if name in stored})


def _restore(name: str, value: Any) -> Any:
    """Convert a decoded JSON value back to the field's type."""
    if name == "component":
        return parse_component(value)
    if name == "rules":
        return _build(Rules, value)
    if name == "health":
        return _build(HealthRules, value)
    if name == "unit":
        return tuple((directive, _freeze(given)) for directive, given in value)
    return _freeze(value)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
