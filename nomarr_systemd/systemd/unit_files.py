"""Unit files: the base units put in their places, each worker's drop-in rendered, the difference
to what is installed found and written. Telling systemd about it (daemon-reload) is the caller's.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from nomarr_systemd.config.values import Config, Directive, Pool
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, UNIT_SUFFIX, Component
from nomarr_systemd.host.files import remove, sync_directory, write_durably
from nomarr_systemd.host.layout import SYSTEM_STATE, Paths

if TYPE_CHECKING:
    from jinja2 import Environment

LIBEXEC: Final = "/usr/lib/nomarr-systemd"
MARK: Final = "# Made by nomarrctl apply"
_MARK_LINE: Final = f"{MARK}: change nomarr.toml, not this file, which is written anew."
# Numbers sort before letters: the system's, then ours, then an admin's override.conf wins.
DROPIN: Final = "20-nomarr.conf"
SYSTEM_DROPIN: Final = "10-system.conf"
TARGET: Final = "nomarr-workers.target"

# What stands in [Unit]; everything else that a pool may set is the [Service]'s.
_UNIT_FAMILIES: Final = ("Assert", "Condition", "Job", "Propagates", "StopPropagated")
_UNIT_NAMES: Final = frozenset(
    [
        "After",
        "AllowIsolate",
        "Before",
        "BindsTo",
        "Conflicts",
        "DefaultDependencies",
        "Description",
        "Documentation",
        "IgnoreOnIsolate",
        "JoinsNamespaceOf",
        "RebootArgument",
        "ReloadPropagatedFrom",
        "Requires",
        "RequiresMountsFor",
        "Requisite",
        "SourcePath",
        "StopWhenUnneeded",
        "SurviveFinalKillSignal",
        "Upholds",
        "Wants",
        "WantsMountsFor",
    ]
)


class UnitError(NomarrError):
    """A unit file that cannot be made, is somebody else's, or is refused by systemd."""

    code = "units"


class Changes(NamedTuple):
    """What makes ``directory`` as it should be; names are relative to it."""

    directory: str
    add: dict[str, str]
    change: dict[str, str]
    remove: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.add or self.change or self.remove)


def find_data(kind: str) -> str:
    """``units`` or ``templates``: beside the package, in a checkout as in an installation."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directory = os.path.join(os.path.dirname(package), kind)
    if not os.path.isdir(directory):
        raise UnitError(
            f"there is no directory {directory}",
            hint="it belongs to nomarr-systemd: install the package again",
        )
    return directory


def adapt(text: str, *, state: str, libexec: str, user: bool = True) -> str:
    """A base unit as it is in another place than the system's own."""
    for place in (state, libexec):
        if not place.startswith("/") or any(sign.isspace() or sign in "'\"\\$;" for sign in place):
            raise UnitError(
                f"{place!r} cannot stand in a unit file",
                hint="use an absolute path without spaces, quotes, backslashes, $ and ;",
            )
    text = text.replace(f"{LIBEXEC}/", f"{libexec.replace('%', '%%')}/")
    text = text.replace(SYSTEM_STATE, state.replace("%", "%%"))
    return text.replace(" --runtime=%t", " --user --runtime=%t") if user else text


def read_base_units(paths: Paths, *, libexec: str = LIBEXEC) -> dict[str, str]:
    """The units of every installation, by name; with the system's drop-ins only in its scope."""
    directory = find_data("units")
    names = sorted(os.listdir(directory))
    files = [name for name in names if not name.endswith(".d")]
    if not paths.user:
        files += [f"{name}/{SYSTEM_DROPIN}" for name in names if name.endswith(".d")]
    found = {}
    for name in files:
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            text = file.read()
        found[name] = adapt(text, state=paths.state, libexec=libexec, user=paths.user)
    return found


def render_dropin(config: Config, component: Component, *, libexec: str = LIBEXEC) -> str:
    """What makes the template unit this worker."""
    return _render_dropin(_templates(), config, component, libexec)


def render_target(config: Config) -> str:
    """Which workers the target starts."""
    template = _templates().get_template("workers-target.conf.j2")
    return template.render(mark=_MARK_LINE, components=config.components())


def quote(argument: str) -> str:
    """One argument for ``ExecStart=:`` or ``Environment=`` that systemd reads as it is."""
    return '"' + "".join(_ESCAPES.get(sign, sign) for sign in argument) + '"'


def render_files(config: Config, paths: Paths, *, libexec: str = LIBEXEC) -> dict[str, str]:
    """Every file that ``nomarrctl apply`` owns. The system's base units are the package's."""
    templates = _templates()
    files = {
        dropin_of(component): _render_dropin(templates, config, component, libexec)
        for component in config.components()
    }
    files[f"{TARGET}.d/{DROPIN}"] = render_target(config)
    if paths.user:
        base = read_base_units(paths, libexec=libexec)
        files |= {name: f"{_MARK_LINE}\n{text}" for name, text in base.items()}
    return files


def plan(config: Config, directory: str, paths: Paths, *, libexec: str = LIBEXEC) -> Changes:
    """What differs in systemd's ``directory`` from what is configured. Nothing is touched."""
    wanted = render_files(config, paths, libexec=libexec)
    add, change = {}, {}
    for name, text in wanted.items():
        path = os.path.join(directory, name)
        there = _read(path)
        if there is None:
            add[name] = text
        elif not there.startswith(MARK):
            raise UnitError(
                f"{path} was not made by nomarrctl", hint="move it away, then apply again"
            )
        elif there != text:
            change[name] = text
    orphans = [name for name in _find_ours(directory) if name not in wanted]
    return Changes(directory, add, change, tuple(orphans))


def install(changes: Changes) -> None:
    """Make it so, each file whole or not at all. Without a change nothing is written."""
    for name, text in (changes.add | changes.change).items():
        path = os.path.join(changes.directory, name)
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        write_durably(path, text.encode(), mode=0o644)
    for name in changes.remove:
        path = os.path.join(changes.directory, name)
        remove(path)
        parent = os.path.dirname(path)
        if parent != changes.directory and not os.listdir(parent):
            os.rmdir(parent)
    if changes.remove:
        sync_directory(changes.directory)


def verify(config: Config, paths: Paths, *, libexec: str = LIBEXEC) -> None:
    """UnitError with systemd's own words unless it accepts every unit as it would be installed.

    One worker of each pool stands for the others, which differ in nothing but their number.
    """
    files = read_base_units(paths, libexec=libexec)
    files |= render_files(config, paths, libexec=libexec)
    firsts = [Component(pool.name, 0) for pool in config.pools if pool.workers]
    with tempfile.TemporaryDirectory(prefix="nomarr-verify-") as directory:
        for name, text in files.items():
            path = os.path.join(directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        for component in firsts:
            template = f"{UNIT_PREFIX}{UNIT_SUFFIX}"
            os.symlink(template, os.path.join(directory, component.unit))
        names = [name for name in files if "/" not in name] + [first.unit for first in firsts]
        complaints = analyze(directory, names, user=paths.user)
    if complaints:
        raise UnitError(
            "systemd does not accept the units:\n" + "\n".join(complaints),
            hint="see command and [pool.NAME.unit] in nomarr.toml; nothing was changed",
        )


def analyze(directory: str, names: Sequence[str], *, user: bool) -> list[str]:
    """What ``systemd-analyze verify`` has to say about units in a directory."""
    environment = dict(os.environ)
    if user:  # it wants one, and looks for nothing in it
        environment.setdefault("XDG_RUNTIME_DIR", directory)
    scope = "--user" if user else "--system"
    try:
        done = subprocess.run(
            ["systemd-analyze", scope, "verify", "--man=no", *names],  # noqa: S607 (any PATH's)
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise UnitError(f"cannot run systemd-analyze: {error}", hint="install systemd") from error
    lines = [line.replace(f"{directory}/", "") for line in done.stderr.splitlines()]
    # Without a failure it may still talk, but then of units of others that ours depend on.
    ours = [line for line in lines if line.startswith("nomarr")]
    return ours or (lines or [f"exit status {done.returncode}"] if done.returncode else [])


def dropin_of(component: Component) -> str:
    return f"{component.unit}.d/{DROPIN}"


def _render_dropin(
    templates: Environment, config: Config, component: Component, libexec: str
) -> str:
    pool = config.pool_of(component)
    if pool.command and any(sign in pool.command[0] for sign in "'\"\\"):
        raise ConfigError(
            f"[pool.{pool.name}] command: systemd runs no program with a quote or a backslash in"
            f" its path: {pool.command[0]}",
            hint="name a link to it",
        )
    lines = [(name, line) for name, value in pool.unit for line in _spell(value)]
    return templates.get_template("worker-dropin.conf.j2").render(
        mark=_MARK_LINE,
        component=component,
        pool=pool,
        health=config.health,
        unit=[line for line in lines if _stands_in_unit(line[0])],
        service=[line for line in lines if not _stands_in_unit(line[0])],
        command=pool.command or (f"{libexec}/nomarr-worker", pool.entrypoint),
        settings="" if pool.command else _settings(pool, config),
    )


def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # heavy: for apply only

    templates = Environment(  # noqa: S701 (no HTML: values are escaped by quote())
        loader=FileSystemLoader(find_data("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals["quote"] = quote
    templates.filters |= {"quote": quote, "time": _spell_time}
    return templates


def _settings(pool: Pool, config: Config) -> str:
    """The settings that worker/environment.py reads, as JSON. The store's URL has no password."""
    names = ("frame_interval_s", "stall_timeout_s", "gpu_health_max_age_s")
    values = {name: getattr(config.health, name) for name in names}
    values["idle_evict_s"] = pool.idle_evict_s
    values["store"] = {name: text for name, text in config.store._asdict().items() if text}
    return json.dumps(values, separators=(",", ":"))


def _stands_in_unit(directive: str) -> bool:
    return directive in _UNIT_NAMES or directive.startswith(_UNIT_FAMILIES)


def _spell(value: Directive) -> Sequence[str]:
    """One text for each line that a directive needs."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    return (str(value),)


def _spell_time(seconds: float) -> str:
    """A time as systemd reads it, exactly."""
    microseconds = round(seconds * 1_000_000)
    for unit, size in (("s", 1_000_000), ("ms", 1000)):
        if microseconds % size == 0:
            return f"{microseconds // size}{unit}"
    return f"{microseconds}us"


def _make_escapes() -> dict[str, str]:
    """Quotes end nothing, % names no specifier, and no control character ends the line."""
    escapes = {chr(code): f"\\x{code:02x}" for code in (*range(1, 32), 127)}
    return escapes | {'"': '\\"', "\\": "\\\\", "%": "%%"}


_ESCAPES: Final = _make_escapes()


def _find_ours(directory: str) -> Iterator[str]:
    """Every file below that carries our mark. Masks and other links are not ours."""
    try:
        entries = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in entries:
        path = os.path.join(directory, name)
        if not name.startswith("nomarr") or os.path.islink(path):
            continue
        ours = f"{name}/{DROPIN}" if os.path.isdir(path) else name
        text = _read(os.path.join(directory, ours))
        if text is not None and text.startswith(MARK):
            yield ours


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None
