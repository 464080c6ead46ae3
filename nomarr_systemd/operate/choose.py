"""The workers that a person names, by pool or by worker."""

from __future__ import annotations

from collections.abc import Sequence

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import BadName, NoSuchWorker
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.text import ask_for, quote


def choose(config: Config, names: Sequence[str]) -> list[Component]:
    """Return the named workers, each once and in the order of the configuration; without names all
    of them. NoSuchWorker suggests the nearest name."""
    everyone = config.components()
    if not names:
        if not everyone:
            raise NoSuchWorker(
                "no workers are configured", hint="add [pool.NAME] to nomarr.toml, then apply it"
            )
        return list(everyone)
    pools = {pool.name for pool in config.pools}
    wanted: set[Component] = set()
    for name in names:
        if name in pools:
            wanted.update(worker for worker in everyone if worker.pool == name)
            continue
        try:
            worker = parse_component(name)
        except BadName as error:
            raise _unknown(config, name) from error
        if worker not in everyone:
            raise _unknown(config, name)
        wanted.add(worker)
    return [worker for worker in everyone if worker in wanted]


def choose_one(config: Config, name: str) -> Component:
    """Return the one named worker; the name of a pool is enough if it has only one."""
    found = choose(config, [name])
    if len(found) != 1:
        raise BadName(
            f"the pool {name} has {len(found)} workers, and this command takes one",
            hint=f"name one of them, for example {found[0].instance}" if found else "",
        )
    return found[0]


def choose_pool(config: Config, name: str | None) -> str:
    """Return the named pool; without a name the only one."""
    known = [pool.name for pool in config.pools]
    if name in known:
        return name
    if name is not None:
        raise NoSuchWorker(
            f"there is no pool {quote(name)}",
            hint=ask_for(name, known) or f"pools are {', '.join(known) or 'not configured yet'}",
        )
    if len(known) != 1:
        raise BadName("which pool is meant?", hint=f"say --pool with one of {', '.join(known)}")
    return known[0]


def _unknown(config: Config, name: str) -> NoSuchWorker:
    names = [pool.name for pool in config.pools]
    for worker in config.components():
        names += (worker.instance, worker.component_id)
    pools = ", ".join(f"{pool.name} ({pool.workers})" for pool in config.pools[:10])
    return NoSuchWorker(
        f"there is no worker or pool {quote(name)}",
        hint=ask_for(name, names)
        or (f"pools, with their number of workers: {pools}" if pools else "none are configured"),
    )
