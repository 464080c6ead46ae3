"""``nomarrctl pause``, ``resume``, ``reset`` and ``reconcile``: what a person does to workers.

A hold is a file that the unit's condition looks for, so it survives a reboot. Everything may be
said twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing

import click

from nomarr_systemd.cli.common import Scope, load_config
from nomarr_systemd.controller.failures import Controller
from nomarr_systemd.controller.reconcile import reconcile as run_reconcile
from nomarr_systemd.core.config import Config
from nomarr_systemd.core.errors import NoSuchWorker
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.host import control
from nomarr_systemd.host.files import remove, write_durably
from nomarr_systemd.host.manager import Manager, timer_of


def open_controller(scope: Scope, config: Config) -> closing[Controller]:
    """The controller's own means, for as long as a verb needs them."""
    return closing(Controller(scope.paths, config, Manager(user=scope.user)))


@click.command()
@click.argument("pool", required=False)
@click.pass_obj
def pause(scope: Scope, pool: str | None) -> None:
    """Let all workers, or those of POOL, finish their job and stay down, also after a reboot."""
    config = load_config(scope)
    workers = _workers_of(config, pool)
    manager = Manager(user=scope.user)
    os.makedirs(scope.paths.hold, 0o755, exist_ok=True)
    for worker in workers:
        text = f"paused by uid {os.getuid()}\n".encode()
        write_durably(f"{scope.paths.hold}/{worker.instance}", text, mode=0o644)
    # The hold comes first: whatever dies from here on stays down.
    manager.stop([*map(timer_of, workers), *(worker.unit for worker in workers)])
    click.echo(f"{len(workers)} workers are paused; nomarrctl resume lets them run again.")


@click.command()
@click.argument("pool", required=False)
@click.pass_obj
def resume(scope: Scope, pool: str | None) -> None:
    """Let paused workers run again; counts are as they were."""
    workers = _workers_of(load_config(scope), pool)
    manager = Manager(user=scope.user)
    held = [worker for worker in workers if remove(f"{scope.paths.hold}/{worker.instance}")]
    shown = manager.show([worker.unit for worker in held], ["LoadState"])
    started = [worker for worker in held if shown[worker.unit]["LoadState"] != "masked"]
    for worker in started:
        manager.start(worker.unit)
    click.echo(f"{len(started)} workers were started, {len(held) - len(started)} are masked.")


@click.command()
@click.argument("components", nargs=-1, required=True, metavar="COMPONENT…")
@click.option("--start", is_flag=True, help="Start them, too.")
@click.pass_obj
def reset(scope: Scope, components: tuple[str, ...], start: bool) -> None:
    """Begin a worker's counts again and unmask it. It is not started unless --start says so."""
    workers = [parse_component(name) for name in components]
    config = load_config(scope)
    for worker in workers:
        config.pool_of(worker)
    with open_controller(scope, config) as controller:
        manager = controller.manager
        for worker in workers:
            controller.ledger.reset(worker.component_id, by=f"uid {os.getuid()}")
            manager.stop([timer_of(worker)])
            manager.unmask([worker.unit])
            manager.reset_failed([worker.unit])
            request = {"op": "reset", "component": worker.component_id}
            control.ask(scope.paths.live, request)
            if start:
                manager.start(worker.unit)
            click.echo(f"{worker.component_id} was reset" + (" and started." if start else "."))


@click.command()
@click.pass_obj
def reconcile(scope: Scope) -> None:
    """Look for failures and effects that were left undone, and finish them."""
    with open_controller(scope, load_config(scope)) as controller:
        run_reconcile(controller)


def _workers_of(config: Config, pool: str | None) -> Sequence[Component]:
    workers = [worker for worker in config.components() if pool in (None, worker.pool)]
    if not workers:
        raise NoSuchWorker(
            f"no workers are configured in pool {pool}" if pool else "no workers are configured"
        )
    return workers
