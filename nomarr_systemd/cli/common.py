"""What every verb of nomarrctl needs: which installation is meant, its configuration, the workers
that a person names, who that person is, and text that is safe to show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from nomarr_systemd.core.errors import BadName, ConfigError, Mistake, NomarrError, NoSuchWorker
from nomarr_systemd.core.text import ask_for, escape, quote
from nomarr_systemd.host.layout import Paths, system_paths, user_paths

if TYPE_CHECKING:
    from nomarr_systemd.config.values import Config
    from nomarr_systemd.core.ids import Component

MAX_CONFIG_BYTES = 1 << 20
NOT_RUNNING = 3  # the exit status that systemctl has for it


class Scope(NamedTuple):
    """The system's installation or one user's own, and its files."""

    user: bool
    config_file: str
    paths: Paths


def make_scope(config_file: str | None, *, user: bool) -> Scope:
    """The scope that the global options name."""
    if user:
        default = os.path.expanduser("~/.config/nomarr/nomarr.toml")
        return Scope(True, config_file or default, user_paths())
    return Scope(False, config_file or "/etc/nomarr/nomarr.toml", system_paths())


def load_config(scope: Scope) -> Config:
    """The configuration of the scope, or ConfigError with what is wrong with the file."""
    from nomarr_systemd.config.file import parse

    name = scope.config_file
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {name}",
            hint="write it, or name another one with --config FILE",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"cannot read the configuration file {name}: {why}",
            hint="make it a readable file, or name another one with --config FILE",
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration file {name} is larger than {MAX_CONFIG_BYTES} bytes",
            hint="is it the right file? Name another one with --config FILE",
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        mistake = Mistake(line, "", f"the byte 0x{content[error.start]:02x} is not UTF-8")
        raise ConfigError(
            f"{name}:{mistake}", hint="save the file in UTF-8", mistakes=(mistake,)
        ) from error
    return parse(text, source=name, state_directory=scope.paths.state)


def load_applied(scope: Scope) -> Config:
    """The configuration in force, which is the one last applied; before that, the file's."""
    import json

    from nomarr_systemd.config.values import Config

    try:
        with open(scope.paths.resolved, encoding="utf-8") as file:
            stored = json.load(file)
    except FileNotFoundError:
        return load_config(scope)
    except PermissionError as error:
        raise ConfigError(
            f"{scope.paths.resolved} is not for you to read",
            hint="use sudo, or join the group: usermod --append --groups nomarr YOUR-NAME",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {scope.paths.resolved}: {error}", hint="run nomarrctl apply"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{scope.paths.resolved} is damaged", hint="run nomarrctl apply")
    return Config.from_dict(stored)


def choose(config: Config, names: Sequence[str]) -> list[Component]:
    """The workers that a person named, by pool or by worker, each once and in the order of the
    configuration; without names all of them. NoSuchWorker names what is near."""
    everyone = config.components()
    if not names:
        if not everyone:
            raise NoSuchWorker(
                "no workers are configured", hint="add [pool.NAME] to nomarr.toml, then apply it"
            )
        return list(everyone)
    from nomarr_systemd.core.ids import parse_component

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
    """The one worker that is meant; the name of a pool will do if it has only one."""
    found = choose(config, [name])
    if len(found) != 1:
        raise BadName(
            f"the pool {name} has {len(found)} workers, and one is wanted",
            hint=f"say which, for example {found[0].instance}" if found else "",
        )
    return found[0]


def _unknown(config: Config, name: str) -> NoSuchWorker:
    names = [pool.name for pool in config.pools]
    for worker in config.components():
        names += (worker.instance, worker.component_id)
    pools = ", ".join(f"{pool.name} ({pool.workers})" for pool in config.pools[:10])
    return NoSuchWorker(
        f"there is no worker or pool {quote(name)}",
        hint=ask_for(name, names)
        or (f"configured are, with their workers: {pools}" if pools else "none are configured"),
    )


def who() -> str:
    """The person at the terminal, for the record; sudo tells who became root."""
    import pwd

    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "?"
    me = f"{name} (uid {uid})"
    other, number = os.environ.get("SUDO_USER"), os.environ.get("SUDO_UID", "?")
    if uid == 0 and other:  # of anybody else it would be a claim without proof
        me = f"{escape(other)[:40]} (uid {escape(number)[:10]}), by sudo"
    return me


def printable(text: str) -> str:
    """The text with nothing in it that a terminal would obey, but for its line breaks."""
    return "\n".join(escape(line) for line in text.split("\n"))


def clean(value: object, most: int = 200) -> str:
    """Something that a worker said, on one line and not without end."""
    text = escape(str(value)[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def echo_json(value: object) -> None:
    """For scripts. ASCII: what a worker said may have any character."""
    import json

    click.echo(json.dumps(value, indent=2))


def warn(text: str, hint: str = "") -> None:
    """Something is not as it should be, but we go on."""
    click.echo(f"nomarrctl: {printable(text)}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)


def complete(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str, *, pools: bool = True
) -> list[Any]:
    """Names of workers and pools, as they are configured now. A shell is told no errors."""
    from click.shell_completion import CompletionItem

    given = ctx.find_root().params
    user = bool(given.get("user")) or "--user" in os.environ.get("COMP_WORDS", "").split()
    try:
        config = load_applied(make_scope(given.get("config_file"), user=user))
    except (NomarrError, OSError):
        return []
    found = [CompletionItem(worker.instance) for worker in config.components()]
    if "worker:" in incomplete:  # a shell may break words at a colon: only for who began so
        found = [CompletionItem(worker.component_id) for worker in config.components()]
    elif pools:
        found += [
            CompletionItem(pool.name, help=f"all {pool.workers} workers of the pool")
            for pool in config.pools
        ]
    return [item for item in found if str(item.value).startswith(incomplete)]


def complete_worker(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Names of workers only."""
    return complete(ctx, parameter, incomplete, pools=False)


def complete_pool(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Names of pools only."""
    found = complete(ctx, parameter, incomplete)
    return [item for item in found if item.help]


Command = Callable[..., Any]


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="For scripts.")(function)


def names_argument(function: Command) -> Command:
    """POOL or COMPONENT, any number of them; none means all."""
    decorate = click.argument(
        "names", nargs=-1, metavar="[POOL|COMPONENT]...", shell_complete=complete
    )
    return decorate(function)


def examples(*lines: str) -> str:
    """The end of a verb's --help."""
    return "\b\nExamples:\n" + "\n".join(f"  nomarrctl {line}" for line in lines)


def count(number: int, noun: str = "worker") -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
