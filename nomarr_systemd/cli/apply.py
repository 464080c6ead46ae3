"""``nomarrctl apply``: bring units and workers in line with the configuration. The difference is
shown first; a mistake anywhere changes nothing.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import click

from nomarr_systemd.cli.common import echo_json, examples, json_option, printable
from nomarr_systemd.cli.progress import Progress
from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.text import count
from nomarr_systemd.host.scope import Scope, name_person
from nomarr_systemd.operate.apply import Plan, carry_out, check_plan, make_plan
from nomarr_systemd.operate.differences import Change, compare

_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}
_MAX_NAMES: Final = 8
_UNFINISHED: Final = 1  # exit status


@click.command(epilog=examples("apply --dry-run", "apply", "apply --yes", "apply --dry-run --diff"))
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option("--diff", "with_diff", is_flag=True, help="Show how unit files change, too.")
@click.option("--yes", is_flag=True, help="Remove workers without asking.")
@json_option
@click.pass_obj
def apply(scope: Scope, dry_run: bool, with_diff: bool, yes: bool, as_json: bool) -> int:
    """Bring units and workers in line with nomarr.toml.

    First the difference is shown: settings in the words of nomarr.toml, workers by pool. Workers
    are restarted only if their own settings changed, after their job. Those that are no longer
    configured are stopped and removed with their history; it asks before it does that, and where
    it cannot ask it refuses, unless you say --yes. If the file has a mistake, nothing is changed.
    A worker that continues its job beyond its stop_timeout_s is not waited for: it is named, and
    the exit status is 1. If apply is interrupted or leaves something, run it again.

    With --dry-run everything is checked as apply would, and the exit status is the same.
    """
    config = scope.read_file()
    with Progress() as progress:
        plan = make_plan(scope, config, progress.tell)
    document = _to_json(plan, dry_run)  # before carry_out: afterwards nothing differs
    for concern in plan.concerns:
        if concern.level == "warn" or dry_run:  # carry_out refuses a bad one, with this text
            click.echo(f"nomarrctl: warning: {concern.text}; {concern.mend}", err=True)
    if not as_json:
        for line in [*_describe(plan), *(_draw_diffs(plan) if with_diff else ())]:
            click.echo(line)
    left: list[Component] = []
    if dry_run:
        check_plan(scope, plan)
    else:
        if plan.gone and not yes:
            check_plan(scope, plan)  # a refusal comes before the question
            _confirm(plan.gone, as_json)
        with Progress() as progress:
            say = (lambda _text: None) if as_json else progress.say
            left = carry_out(scope, plan, say, progress.tell)
    if as_json:
        echo_json(document | {"unfinished": [worker.component_id for worker in left]})
    elif not dry_run:
        workers = count(len(config.components()))
        click.echo(f"{workers} configured; nomarrctl status shows their state.")
    if left:
        names = _name(left)
        click.echo(f"nomarrctl: still finishing a job: {names}; run apply again then.", err=True)
    return _UNFINISHED if left else 0


def _confirm(gone: list[Component], as_json: bool) -> None:
    """Ask before workers are removed; refuse if there is no terminal to ask on."""
    what = f"{count(len(gone))} would be stopped and removed with their history: {_name(gone)}"
    if as_json or not sys.stdin.isatty():
        raise NomarrError(what, hint="say --yes if that is meant; nothing was changed")
    click.echo(f"{what}.", err=True)
    if not click.confirm("Go on?", default=False, err=True):
        raise NomarrError("nothing was changed")


def _to_json(plan: Plan, dry_run: bool) -> dict[str, Any]:
    changes = plan.changes
    return {
        "applied": not dry_run,
        "by": name_person(),
        "directory": changes.directory,
        "files": {
            "add": list(changes.add),
            "change": {name: "\n".join(_diff(plan, name)) for name in changes.change},
            "remove": list(changes.remove),
        },
        "settings_changed": plan.settings_differ,
        "settings": [
            {"key": f"{each.section}.{each.key}", "from": each.old, "to": each.new}
            for each in _settings(plan)
        ],
        "warnings": [f"{each.text}; {each.mend}" for each in plan.concerns],
        "workers": {
            "remove": [worker.component_id for worker in plan.gone],
            "restart": [worker.component_id for worker in plan.restart],
            "start": [worker.component_id for worker in plan.start],
        },
    }


def _settings(plan: Plan) -> list[Change]:
    """Return the settings that change; none before the first apply, when all of them do."""
    return compare(plan.before, plan.config) if plan.before else []


def _describe(plan: Plan) -> Iterator[str]:
    if not plan:
        yield "Nothing differs."
        return
    for change in _settings(plan):
        yield printable(f"[{change.section}] {change.key}: {_draw_change(change)}")
    for workers, what in (
        (plan.gone, "to be stopped and removed"),
        (list(plan.restart), "to be restarted with new settings, after its job"),
        (plan.start, "to be started"),
    ):
        yield from _draw_workers(workers, what)
    changes = plan.changes
    if changes:
        numbers = (len(changes.add), len(changes.change), len(changes.remove))
        parts = zip(numbers, ("to add", "to change", "to remove"), strict=True)
        text = ", ".join(f"{number} {what}" for number, what in parts if number)
        yield f"unit files: {text} (--diff shows them)"


def _draw_change(change: Change) -> str:
    if change.key == "workers" and change.old is None:
        return f"new, {count(change.new)}"
    if change.key == "workers" and change.new is None:
        return f"removed, had {count(change.old)}"
    return f"{_spell(change.old)} → {_spell(change.new)}"


def _spell(value: object) -> str:
    """Return a value as it is written in nomarr.toml."""
    match value:
        case None | "" | ():
            return "not set"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case tuple() | list():
            return f"[{', '.join(map(_spell, value))}]"
        case str():
            return f'"{value}"'
    return str(value)


def _draw_workers(workers: list[Component], what: str) -> Iterator[str]:
    """One line for each pool."""
    pools = Counter(worker.pool for worker in workers)
    for pool, number in pools.items():
        names = _name([worker for worker in workers if worker.pool == pool])
        several = what.replace("its job", "their jobs") if number > 1 else what
        yield f"{pool}: {count(number)} {several}: {names}"


def _name(workers: list[Component]) -> str:
    names = [worker.instance for worker in workers]
    if len(names) > _MAX_NAMES:
        return f"{', '.join(names[: _MAX_NAMES - 1])}, … {names[-1]}"
    return ", ".join(names)


def _draw_diffs(plan: Plan) -> Iterator[str]:
    """Yield how files change; of the workers of a pool, which differ in their number, the first."""
    changes = plan.changes
    for sign, colour, names in (
        ("+", "green", list(changes.add)),
        ("-", "red", list(changes.remove)),
    ):
        for name, alike in _fold(names):
            yield click.style(f"{sign} {name}{alike}", fg=colour)
    for name, alike in _fold(list(changes.change)):
        for line in _diff(plan, name):
            yield click.style(printable(line), fg=_COLOURS.get(line[:1]))
        if alike:
            yield f"{name}:{alike}"


def _fold(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the first name of each pool, and of other instances of a template, with how many more
    there are; all others by themselves."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        try:
            key = (" of the same pool", parse_component(name.partition(".d/")[0]).pool)
        except BadName:
            key = (" like it", re.sub(r"@[^.]+|^nomarr-.+(?=\.slice\.d/)", "@", name))
        groups.setdefault(key, []).append(name)
    for (alike, _), found in groups.items():
        more = len(found) - 1
        yield found[0], f" and {more}{alike}" if more else ""


def _diff(plan: Plan, name: str) -> list[str]:
    there = _read(os.path.join(plan.changes.directory, name))
    lines = difflib.unified_diff(
        there.splitlines(),
        plan.changes.change[name].splitlines(),
        f"installed/{name}",
        f"configured/{name}",
        lineterm="",
        n=1,
    )
    return list(lines)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""
