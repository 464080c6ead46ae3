"""Unit files: renders the drop-in of each worker, finds the difference to what is installed, and
writes it. The caller has systemd read it (daemon-reload).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from nomarr_systemd.config.store_url import find_addresses
from nomarr_systemd.config.values import Config, Directive, Pool
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.core.ids import TARGET, UNIT_PREFIX, UNIT_SUFFIX, Component
from nomarr_systemd.host.files import remove, sync_directory, write_all_durably
from nomarr_systemd.host.layout import LIBEXEC, SYSTEM_STATE, Paths
from nomarr_systemd.systemd import portions

if TYPE_CHECKING:
    from jinja2 import Environment

MARK: Final = "# Made by nomarrctl apply"
_MARK_LINE: Final = f"{MARK}: change nomarr.toml, not this file, which is written anew."
# In the order in which systemd reads them: the system's, ours, then an admin's override.conf.
DROPIN: Final = "20-nomarr.conf"
SYSTEM_DROPIN: Final = "10-system.conf"
# They need a network only for a store on a server, and only to reach that.
STORE_USERS: Final = (
    "nomarr-controller.service",
    "nomarr-reconcile.service",
    "nomarr-supervisor.service",
)
_MAX_COMPLAINTS: Final = 20
_SYSTEMCTL: Final = re.compile(r"\bsystemctl (?=(start|stop|show|list-jobs) )")
# In the text of a pool; no setting can have them.
_COMPONENT_ID: Final = "\0component\0"
_SLICE: Final = "\0slice\0"
_OWN_SLICE: Final = re.compile(r"^Slice=nomarr-.*\n", re.MULTILINE)

# Directives of [Unit]; all others that a pool may set belong to [Service].
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
    """A unit file cannot be written, is not ours, or is refused by systemd."""

    code = "units"


class UnitsRefused(ConfigError):
    """systemd does not accept what the configuration makes of the units."""

    code = "units"


class Changes(NamedTuple):
    """The files to add, change and remove; names are relative to ``directory``."""

    directory: str
    add: dict[str, str]
    change: dict[str, str]
    remove: tuple[str, ...]
    moved: frozenset[str] = frozenset()  # those of change that only name another slice

    def is_old(self, component: Component) -> bool:
        """True if the worker's present run has other settings. A new slice waits for the next."""
        name = dropin_of(component)
        return name in self.change and name not in self.moved

    def concern(self, unit: str) -> bool:
        """Return True if the drop-in of this unit is among the files."""
        return f"{unit}.d/{DROPIN}" in (*self.add, *self.change, *self.remove)

    def __bool__(self) -> bool:
        return bool(self.add or self.change or self.remove)


def find_data(kind: str) -> str:
    """Return the directory ``units``, ``templates`` or ``examples``: beside the package, or inside
    it if pip installed it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    inside = os.path.join(package, "data", kind)
    if os.path.isdir(inside):
        return inside
    directory = os.path.join(os.path.dirname(package), kind)
    if not os.path.isdir(directory):
        raise UnitError(
            f"there is no directory {directory}",
            hint="it belongs to nomarr-systemd: install the package again",
        )
    return directory


def adapt(text: str, *, state: str, libexec: str, user: bool = True) -> str:
    """Return a base unit with other directories than those of the system."""
    for place in (state, libexec):
        if not place.startswith("/") or any(sign.isspace() or sign in "'\"\\$;" for sign in place):
            raise UnitError(
                f"{place!r} cannot stand in a unit file",
                hint="use an absolute path without spaces, quotes, backslashes, $ and ;",
            )
    text = text.replace(f"{LIBEXEC}/", f"{libexec.replace('%', '%%')}/")
    text = text.replace(SYSTEM_STATE, state.replace("%", "%%"))
    if user:
        text = text.replace(" --runtime=%t", " --user --runtime=%t")
        text = _SYSTEMCTL.sub("systemctl --user ", text)
    return text


def read_base_units(paths: Paths, *, libexec: str = LIBEXEC) -> dict[str, str]:
    """Return the base units by name; in the system's scope with their 10-system.conf."""
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


def render_target(config: Config) -> dict[str, str]:
    """Return the drop-in that names the workers of the target, or else those of their portions."""
    components = config.components()
    found = portions.split(components)
    units = [portions.STARTER] if found else [worker.unit for worker in components]
    target = _templates().get_template("workers-target.conf.j2")
    files = {f"{TARGET}.d/{DROPIN}": target.render(mark=_MARK_LINE, units=units)}
    for unit, text in portions.render(found).items():
        files[f"{unit}.d/{DROPIN}"] = f"{_MARK_LINE}\n\n{text}"
    return files


def quote(argument: str) -> str:
    """Return one argument for ``ExecStart=:`` or ``Environment=``, quoted for systemd."""
    return '"' + "".join(_ESCAPES.get(sign, sign) for sign in argument) + '"'


def render_files(config: Config, paths: Paths, *, libexec: str = LIBEXEC) -> dict[str, str]:
    """Return every file that ``nomarrctl apply`` owns; the package owns the system's base units."""
    templates = _templates()
    files = {}
    for pool in config.pools:
        text = _render_dropin(templates, config, pool, libexec)
        for number in range(pool.workers):
            component = Component(pool.name, number)
            own = text.replace(_COMPONENT_ID, component.component_id)
            files[dropin_of(component)] = own.replace(_SLICE, component.slice)
    files |= render_target(config)
    if not paths.user:
        template = templates.get_template("network.conf.j2")
        addresses = find_addresses(config.store.url)
        limited = template.render(mark=_MARK_LINE, addresses=addresses)
        files |= {f"{unit}.d/{DROPIN}": limited for unit in STORE_USERS}
    if paths.user:
        base = read_base_units(paths, libexec=libexec)
        files |= {name: f"{_MARK_LINE}\n{text}" for name, text in base.items()}
    return files


def plan(config: Config, directory: str, paths: Paths, *, libexec: str = LIBEXEC) -> Changes:
    """Return how systemd's ``directory`` differs from the configuration. Changes nothing."""
    wanted = render_files(config, paths, libexec=libexec)
    add, change = {}, {}
    moved = set()
    for name, text in wanted.items():
        path = f"{directory}/{name}"
        there = _read(path)
        if there is None:
            add[name] = text
        elif not there.startswith(MARK):
            raise UnitError(
                f"{path} was not made by nomarrctl", hint="move it away, then apply again"
            )
        elif there != text:
            change[name] = text
            if _OWN_SLICE.sub("", there) == _OWN_SLICE.sub("", text):
                moved.add(name)
    orphans = tuple(_find_orphans(directory, wanted))
    return Changes(directory, add, change, orphans, frozenset(moved))


def install(changes: Changes) -> None:
    """Write and remove the files, each whole or not at all."""
    files = {}
    for name, text in (changes.add | changes.change).items():
        path = os.path.join(changes.directory, name)
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        files[path] = text.encode()
    write_all_durably(changes.directory, files, mode=0o644)
    for name in changes.remove:
        path = os.path.join(changes.directory, name)
        remove(path)
        parent = os.path.dirname(path)
        if parent != changes.directory and not os.listdir(parent):
            os.rmdir(parent)
    if changes.remove:
        sync_directory(changes.directory)


def verify(config: Config, paths: Paths, *, libexec: str = LIBEXEC) -> None:
    """Raise UnitsRefused with systemd's message unless it accepts every unit as to be installed.

    One worker of each pool is checked: the others differ only in their number.
    """
    config = config._replace(
        pools=tuple(pool._replace(workers=min(pool.workers, 1)) for pool in config.pools)
    )
    files = read_base_units(paths, libexec=libexec)
    files |= render_files(config, paths, libexec=libexec)
    firsts = config.components()
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
        if len(complaints) > _MAX_COMPLAINTS:
            more = f"… and {len(complaints) - _MAX_COMPLAINTS} lines more"
            complaints = [*complaints[:_MAX_COMPLAINTS], more]
        raise UnitsRefused(
            "systemd does not accept the units:\n" + "\n".join(complaints),
            hint="see command and [pool.NAME.unit] in nomarr.toml; nothing was changed",
        )


def analyze(directory: str, names: Sequence[str], *, user: bool) -> list[str]:
    """Return the complaints of ``systemd-analyze verify`` about units in a directory."""
    environment = dict(os.environ)
    if user:  # it must be set; nothing is read from it
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
    # If it succeeds, its other lines are about units of others.
    ours = [line for line in lines if line.startswith("nomarr")]
    return ours or (lines or [f"exit status {done.returncode}"] if done.returncode else [])


def dropin_of(component: Component) -> str:
    return f"{component.unit}.d/{DROPIN}"


def _render_dropin(templates: Environment, config: Config, pool: Pool, libexec: str) -> str:
    """Return the drop-in of the pool's workers, with _COMPONENT_ID and _SLICE where they differ."""
    if pool.command and any(sign in pool.command[0] for sign in "'\"\\"):
        raise ConfigError(
            f"[pool.{pool.name}] command: systemd runs no program with a quote or a backslash in"
            f" its path: {pool.command[0]}",
            hint="name a link to it",
        )
    lines = [(name, line) for name, value in pool.unit for line in _spell(value)]
    return templates.get_template("worker-dropin.conf.j2").render(
        mark=_MARK_LINE,
        component_id=_COMPONENT_ID,
        slice=_SLICE,
        pool=pool,
        health=pool.health,
        unit=[line for line in lines if _stands_in_unit(line[0])],
        service=[line for line in lines if not _stands_in_unit(line[0])],
        command=pool.command or (f"{libexec}/nomarr-worker", pool.entrypoint),
        settings=_settings(pool, config),
    )


@functools.cache  # apply renders three times, and a template is compiled at its first use
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
    """Return the settings that worker/environment.py reads, as JSON. The store's URL has no
    password. A worker that is not Python needs the store only, for ``nomarrctl job``."""
    values: dict[str, object] = {}
    if not pool.command:
        names = ("frame_interval_s", "stall_timeout_s", "gpu_health_max_age_s")
        values |= {name: getattr(pool.health, name) for name in names}
        values["idle_evict_s"] = pool.idle_evict_s
        if pool.claim_batch > 1:  # else the units of earlier versions would change
            values["claim_batch"] = pool.claim_batch
    values["store"] = {name: text for name, text in config.store._asdict().items() if text}
    return json.dumps(values, separators=(",", ":"))


def _stands_in_unit(directive: str) -> bool:
    return directive in _UNIT_NAMES or directive.startswith(_UNIT_FAMILIES)


def _spell(value: Directive) -> Sequence[str]:
    """Return a directive's value as one text for each line."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    return (str(value),)


def _spell_time(seconds: float) -> str:
    """Return a time as systemd reads it, without rounding."""
    microseconds = round(seconds * 1_000_000)
    for unit, size in (("s", 1_000_000), ("ms", 1000)):
        if microseconds % size == 0:
            return f"{microseconds // size}{unit}"
    return f"{microseconds}us"


def _make_escapes() -> dict[str, str]:
    """Return escapes for quotes, backslashes, % and control characters."""
    escapes = {chr(code): f"\\x{code:02x}" for code in (*range(1, 32), 127)}
    return escapes | {'"': '\\"', "\\": "\\\\", "%": "%%"}


_ESCAPES: Final = _make_escapes()


def _find_orphans(directory: str, wanted: Container[str]) -> Iterator[str]:
    """Yield every other file that begins with our mark. Masks and other links are not ours."""
    try:
        entries = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in entries:
        path = os.path.join(directory, name)
        if not name.startswith("nomarr") or name in wanted or f"{name}/{DROPIN}" in wanted:
            continue
        if os.path.islink(path):
            continue
        ours = f"{name}/{DROPIN}" if os.path.isdir(path) else name
        text = _read(os.path.join(directory, ours))
        if text is not None and text.startswith(MARK):
            yield ours


def _read(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:  # of thousands, a text file takes twice as long
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
