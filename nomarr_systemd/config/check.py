"""Check a parsed document and make the configuration from it: which sections there are, how they
are merged, and how settings must fit each other. The single settings are a table in ``settings``.
Lines of the file are not known here, only paths of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nomarr_systemd.config.settings import (
    FLEET,
    HEALTH,
    POLICY,
    POOL,
    POOL_HEALTH,
    STORE,
    WEB,
    Fault,
    Setting,
    check,
    convert,
    explain_unknown,
)
from nomarr_systemd.config.store_url import (
    ArangoUrl,
    ServerUrl,
    SqliteUrl,
    engine_of,
    parse_store_url,
)
from nomarr_systemd.config.unit_directives import check_directive
from nomarr_systemd.config.values import (
    Config,
    Directive,
    FleetSettings,
    Pool,
    StoreSettings,
    WebSettings,
    WorkerRules,
)
from nomarr_systemd.core.account import RING
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import MAX_INDEX, Component, check_pool, parse_component
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.text import ask_for, quote, show, spell

MAX_WORKERS = MAX_INDEX + 1  # of all pools
SECTIONS = ("store", "fleet", "policy", "health", "web", "pool", "worker")

Path = tuple[str | int, ...]
Table = Mapping[str, Any]


class Order(NamedTuple):
    """Two settings: ``low`` must not be above ``high``; if ``strict``, it must be below."""

    low: str
    high: str
    strict: bool = False

    def breaks(self, values: Rules | HealthRules) -> bool:
        low, high = getattr(values, self.low), getattr(values, self.high)
        return bool(low >= high if self.strict else low > high)


POLICY_ORDER = (Order("backoff_base_s", "backoff_max_s"),)
HEALTH_ORDER = (
    Order("min_recovery_s", "max_recovery_s"),
    Order("frame_interval_s", "staleness_interval_s", strict=True),
)


class ConfigChecker:
    """Reads the document once; collects ``faults`` and continues with the valid values."""

    def __init__(self, store: StoreSettings) -> None:
        self.faults: list[tuple[Path, Fault]] = []
        self._store = store
        self._refused: set[Path] = set()  # faulty tables and values, left out of later checks

    def read(self, document: Table) -> Config:
        """Return the configuration; valid only if no faults were found."""
        self._check_keys(document, (), SECTIONS)
        own = self._read_section(document, ("policy",), POLICY)
        policy = Rules(**own)
        self._check_order(POLICY_ORDER, policy, own, [("policy",)])
        health = self._read_health(document)
        self._check_lifetime(policy, own, [("policy",)])
        tables = self._read_table(document, ("pool",))
        pools = tuple(self._read_pool(tables, name, policy, health) for name in tables)
        self._check_total(pools)
        store, fleet = self._read_fleet(document, self._read_store(document))
        return Config(
            store=store,
            fleet=fleet,
            policy=policy,
            own_policy=tuple(own),
            health=health,
            web=WebSettings(**self._read_section(document, ("web",), WEB)),
            pools=pools,
            workers=self._read_workers(document, pools),
        )

    def _read_store(self, document: Table) -> StoreSettings:
        values = self._read_section(document, ("store",), STORE)
        store = self._store._replace(**values)
        if ("store", "url") in self._refused:
            return store
        url = parse_store_url(values["url"]) if "url" in values else None
        if url is None or isinstance(url, SqliteUrl):
            for key in values:
                if key != "url":
                    problem = "it is only for a postgresql:// or arangodb:// url"
                    self._blame(("store", key), problem, "remove it")
        else:
            scheme = engine_of(url).scheme
            if store.ca_file and not url.tls:
                problem = f"it does nothing with {scheme}://, which is not encrypted"
                self._blame(("store", "ca_file"), problem, f"write {scheme}+tls:// in url")
            self._check_work_user(store, url)
            self._check_copies(store, url)
        return store

    def _check_copies(self, store: StoreSettings, url: ServerUrl) -> None:
        if not isinstance(url, ArangoUrl):
            for key in store.copies.given():
                self._blame(("store", key), "it is only for an arangodb:// url", "remove it")
        elif store.write_concern > max(store.replication_factor, 1):
            problem = "it is more than replication_factor: nothing could be written"
            self._blame(("store", "write_concern"), problem, "2 of 3 is usual")

    def _read_fleet(
        self, document: Table, store: StoreSettings
    ) -> tuple[StoreSettings, FleetSettings]:
        values = self._read_section(document, ("fleet",), FLEET)
        if ("store", "url") not in self._refused and isinstance(
            parse_store_url(store.url), SqliteUrl
        ):
            for key in ("host", "lease_s"):
                if key in values:
                    problem = "it is only for a store that hosts share, and SQLite is for one host"
                    self._blame(("fleet", key), problem, "remove it")
        fleet = FleetSettings(**values)
        return store._replace(host=fleet.host), fleet

    def _check_work_user(self, store: StoreSettings, url: ServerUrl) -> None:
        """Workers must not hold the ledger's password, so jobs need a user of their own."""
        if any(("store", setting.key) in self._refused for setting in STORE):
            return
        if not store.work_user:
            given = "work_password_file" if store.work_password_file else "url"
            problem = "there is no work_user, and workers must not hold the ledger's password"
            self._blame(("store", given), problem, "set work_user and work_password_file")
        elif store.work_user == url.user:
            problem = "it is the ledger's user, whose password workers must not hold"
            self._blame(
                ("store", "work_user"), problem, f"make another user in {engine_of(url).title}"
            )
        elif bool(store.password_file) != bool(store.work_password_file):
            given, other = "password_file", "work_password_file"
            if store.work_password_file:
                given, other = other, given
            self._blame(("store", given), f"there is no {other}", "set both, or neither")
        elif store.password_file and store.password_file == store.work_password_file:
            problem = "it is the ledger's password file, which workers must not read"
            self._blame(("store", "work_password_file"), problem, "make another file")

    def _read_health(self, document: Table) -> HealthRules:
        values = self._read_section(document, ("health",), HEALTH)
        health = HealthRules(**values)
        self._check_order(HEALTH_ORDER, health, values, [("health",)])
        return health

    def _read_pool(self, tables: Table, name: str, policy: Rules, health: HealthRules) -> Pool:
        path = ("pool", name)
        table = self._read_table(tables, path)
        values = self._read_values(table, path, POOL, also=("policy", "health", "unit"))
        programs = [key for key in ("entrypoint", "command") if key in table]
        if not programs and path not in self._refused:
            self._blame(path, "the pool has no program", "set entrypoint or command")
        if len(programs) == 2:
            self._blame((*path, "command"), "entrypoint is set too", "remove one of the two")
        own = self._read_section(table, (*path, "policy"), POLICY)
        rules = policy._replace(**own)
        self._check_order(POLICY_ORDER, rules, own, [("policy",), (*path, "policy")])
        own_health = self._read_section(table, (*path, "health"), POOL_HEALTH)
        merged = health._replace(**own_health)
        self._check_order(HEALTH_ORDER, merged, own_health, [("health",), (*path, "health")])
        self._check_lifetime(rules, own, [("policy",), (*path, "policy")])
        unit = self._read_unit(table, (*path, "unit"))
        try:
            check_pool(name)
        except BadName:
            wanted = "a small letter, then at most 30 small letters, digits or underscores"
            self._blame(path, f"{quote(name)} cannot name a pool", f"a name is {wanted}")
        return Pool(
            name,
            **values,
            rules=rules,
            own_rules=tuple(own),
            health=merged,
            own_health=tuple(own_health),
            unit=unit,
        )

    def _read_unit(self, table: Table, path: Path) -> tuple[tuple[str, Directive], ...]:
        unit: list[tuple[str, Directive]] = []
        for name, value in self._read_table(table, path).items():
            faults = list(check_directive(name, value))
            for fault in faults:
                self._blame((*path, name, *fault.at), fault.problem, fault.suggestion)
            if not faults:
                unit.append((name, tuple(value) if isinstance(value, list) else value))
        return tuple(unit)

    def _read_workers(self, document: Table, pools: Sequence[Pool]) -> tuple[WorkerRules, ...]:
        workers = []
        by_name = {pool.name: pool for pool in pools}
        tables = self._read_table(document, ("worker",))
        for instance in tables:
            path = ("worker", instance)
            table = self._read_table(tables, path)
            self._check_keys(table, path, ("policy",))
            own = self._read_section(table, (*path, "policy"), POLICY)
            found = self._find_worker(instance, pools)
            if isinstance(found, Fault):
                self._blame(path, found.problem, found.suggestion)
                continue
            pool = by_name[found.pool]
            rules = pool.rules._replace(**own)
            levels = [("policy",), ("pool", pool.name, "policy"), (*path, "policy")]
            self._check_order(POLICY_ORDER, rules, own, levels)
            self._check_lifetime(rules, own, levels)
            workers.append(WorkerRules(found, rules, tuple(own)))
        return tuple(sorted(workers))

    def _find_worker(self, instance: str, pools: Sequence[Pool]) -> Component | Fault:
        """Return the configured worker that a [worker.INSTANCE] section is for."""
        try:
            component = parse_component(instance)
        except BadName:
            problem = f"{quote(instance)} is not the name of an instance"
            return Fault(problem, "write [worker.POOL-NUMBER.policy]")
        if component.instance != instance:
            problem = "here a worker is named by its instance only"
            return Fault(problem, f"write [worker.{component.instance}.policy]")
        pool = next((pool for pool in pools if pool.name == component.pool), None)
        if pool is None:
            near = ask_for(component.pool, [pool.name for pool in pools])
            return Fault(f"there is no [pool.{component.pool}]", near)
        known = not {("pool", pool.name), ("pool", pool.name, "workers")} & self._refused
        if known and component.number >= pool.workers:
            has = f"the pool {pool.name} has workers = {pool.workers}, numbered from 0"
            return Fault(f"there is no worker {instance}: {has}")
        return component

    def _check_total(self, pools: Iterable[Pool]) -> None:
        total = 0
        for pool in pools:
            total += pool.workers
            if total > MAX_WORKERS:
                problem = f"up to here the pools have {total} workers; {MAX_WORKERS} is the most"
                self._blame(("pool", pool.name, "workers"), problem)
                return

    def _check_order(
        self,
        orders: Iterable[Order],
        values: Rules | HealthRules,
        own: Mapping[str, Any],
        levels: Sequence[Path],
    ) -> None:
        """Report a broken order at the last of the merged levels, if that one sets a key of it."""
        for order in orders:
            keys = (order.low, order.high)
            here = [key for key in keys if key in own]
            known = not any((*level, key) in self._refused for level in levels for key in keys)
            if here and known and order.breaks(values):
                relation = "must be below" if order.strict else "must not be above"
                low, high = getattr(values, order.low), getattr(values, order.high)
                problem = f"{order.low} ({low:g}) {relation} {order.high} ({high:g})"
                self._blame((*levels[-1], here[0]), problem)

    def _check_lifetime(self, rules: Rules, own: Mapping[str, Any], levels: Sequence[Path]) -> None:
        """Only the last RING restarts of a worker are known with their times."""
        keys = ("lifetime_days", "max_lifetime_restarts")
        here = [key for key in keys if key in own]
        known = not any((*level, key) in self._refused for level in levels for key in keys)
        if here and known and rules.lifetime_days and rules.max_lifetime_restarts > RING:
            limit = rules.max_lifetime_restarts
            problem = f"with lifetime_days max_lifetime_restarts ({limit}) must not be above {RING}"
            self._blame((*levels[-1], here[0]), problem)

    def _read_section(self, parent: Table, path: Path, settings: Sequence[Setting]) -> Table:
        return self._read_values(self._read_table(parent, path), path, settings)

    def _read_table(self, parent: Table, path: Path) -> Table:
        table = parent.get(str(path[-1]), {})
        if isinstance(table, dict):
            return table
        self._blame(path, f"{show(table)} is not a table", f"write [{spell(path)}]")
        self._refused.add(path)
        return {}

    def _read_values(
        self, table: Table, path: Path, settings: Sequence[Setting], also: Sequence[str] = ()
    ) -> Table:
        """Return the good values in a table, by key."""
        self._check_keys(table, path, [*(setting.key for setting in settings), *also])
        values = {}
        for setting in settings:
            if setting.key in table:
                value = table[setting.key]
                faults = list(check(setting, value))
                for fault in faults:
                    where = (*path, setting.key)
                    self._blame((*where, *fault.at), fault.problem, fault.suggestion)
                    self._refused.add(where)
                if not faults:
                    values[setting.key] = convert(setting, value)
        return values

    def _check_keys(self, table: Table, path: Path, known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                fault = explain_unknown(key, known)
                self._blame((*path, key), fault.problem, fault.suggestion)

    def _blame(self, path: Path, problem: str, suggestion: str = "") -> None:
        self.faults.append((path, Fault(problem, suggestion)))
