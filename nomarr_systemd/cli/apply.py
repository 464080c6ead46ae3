"""``nomarrctl apply``: make the machine as the configuration says. The difference is shown first;
a mistake anywhere changes nothing.
"""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Iterator

import click

import nomarr_systemd
from nomarr_systemd.cli.common import Scope, load_config, printable
from nomarr_systemd.core.config import Config
from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host import units
from nomarr_systemd.host.files import remove, write_durably
from nomarr_systemd.host.manager import SUPERVISOR, TARGET, Manager, ManagerError, timer_of
from nomarr_systemd.host.places import make_directories, make_programs

PIPES_S = 20.0


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.pass_obj
def apply(scope: Scope, dry_run: bool) -> None:
    """Bring units and workers in line with the configuration.

    Workers are restarted only if their own settings changed; those that are no longer configured
    are stopped and leave nothing behind.
    """
    config = load_config(scope)
    before = _read_resolved(scope)
    libexec = _libexec(scope)
    directory = _unit_directory(scope)
    changes = units.plan(config, directory, scope.paths, libexec=libexec)
    gone = sorted(set(before.components()) - set(config.components()))
    for line in _describe(changes, gone):
        click.echo(line)
    if dry_run:
        return
    _prepare(scope, libexec)
    units.verify(config, scope.paths, libexec=libexec)
    units.install(changes)
    write_durably(scope.paths.resolved, json.dumps(config.to_dict()).encode(), mode=0o644)
    _bring_about(scope, config, changes, gone)
    count = len(config.components())
    click.echo(f"{count} workers are configured; nomarrctl status shows them.")


def _bring_about(
    scope: Scope, config: Config, changes: units.Changes, gone: list[Component]
) -> None:
    manager = Manager(user=scope.user)
    manager.reload()
    if gone:
        manager.stop([*map(timer_of, gone), *(worker.unit for worker in gone)])
        manager.unmask([worker.unit for worker in gone])
        for worker in gone:
            remove(f"{scope.paths.hold}/{worker.instance}")
    manager.reload_or_start(SUPERVISOR)
    _wait_for_pipes(scope, config)
    changed = [
        worker.unit for worker in config.components() if units.dropin_of(worker) in changes.change
    ]
    manager.try_restart(changed)
    manager.start(TARGET)


def _wait_for_pipes(scope: Scope, config: Config) -> None:
    """Until every worker has its pipe: systemd 252 calls a reload done when it was asked for."""
    ends = time.monotonic() + PIPES_S
    for worker in config.components():
        while not os.path.exists(f"{scope.paths.health}/{worker.instance}"):
            if time.monotonic() > ends:
                raise ManagerError(
                    f"the supervisor made no pipe for {worker.component_id} in {PIPES_S:g} s",
                    hint=f"see systemctl status {SUPERVISOR}",
                )
            time.sleep(0.01)


def _describe(changes: units.Changes, gone: list[Component]) -> Iterator[str]:
    if not changes and not gone:
        yield "Nothing differs."
    for name in changes.add:
        yield click.style(f"+ {name}", fg="green")
    for name in changes.remove:
        yield click.style(f"- {name}", fg="red")
    for name, text in changes.change.items():
        yield click.style(f"~ {name}", fg="yellow")
        with open(os.path.join(changes.directory, name), encoding="utf-8") as file:
            there = file.read()
        lines = difflib.unified_diff(there.splitlines(), text.splitlines(), lineterm="", n=0)
        for line in list(lines)[2:]:
            if not line.startswith("@@"):
                yield f"    {printable(line)}"
    for worker in gone:
        yield click.style(f"- {worker.component_id} is stopped and removed", fg="red")


def _read_resolved(scope: Scope) -> Config:
    """What was applied before; nothing, at first."""
    try:
        with open(scope.paths.resolved, encoding="utf-8") as file:
            return Config.from_dict(json.load(file))
    except (OSError, ValueError, ConfigError):
        return Config()


def _unit_directory(scope: Scope) -> str:
    if not scope.user:
        return "/etc/systemd/system"
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{config}/systemd/user"


def _libexec(scope: Scope) -> str:
    """Where the programs are: the package's, or for a user without it their own."""
    if not scope.user or os.path.exists(f"{units.LIBEXEC}/nomarr-supervisor"):
        return units.LIBEXEC
    return f"{scope.paths.state}/libexec"


def _prepare(scope: Scope, libexec: str) -> None:
    make_directories(scope.paths)
    if libexec != units.LIBEXEC:
        package = os.path.dirname(os.path.abspath(nomarr_systemd.__file__))
        make_programs(libexec, search=[os.path.dirname(package)])
