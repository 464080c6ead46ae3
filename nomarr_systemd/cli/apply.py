"""``nomarrctl apply``: bring units and workers in line with the configuration. The difference is
shown first; a mistake anywhere changes nothing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

import click

from nomarr_systemd.cli.common import echo_json, examples, json_option, printable
from nomarr_systemd.cli.progress import Progress
from nomarr_systemd.core.text import count
from nomarr_systemd.host.scope import Scope, name_person
from nomarr_systemd.operate.apply import Plan, carry_out, make_plan

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@click.command(epilog=examples("apply --dry-run", "apply", "apply --dry-run --json"))
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@json_option
@click.pass_obj
def apply(scope: Scope, dry_run: bool, as_json: bool) -> None:
    """Bring units and workers in line with nomarr.toml.

    First the difference is shown: files as a unified diff, workers as a plan. Workers are
    restarted only if their own settings changed, after their job; those that are no longer
    configured are stopped and removed. If the file has a mistake, nothing is changed. If apply is
    interrupted, run it again.
    """
    config = scope.read_file()
    plan = make_plan(scope, config)
    document = _to_json(plan, dry_run)  # before carry_out: afterwards nothing differs
    for concern in plan.concerns:
        if concern.level == "warn" or dry_run:  # carry_out refuses a bad one, with this text
            click.echo(f"nomarrctl: warning: {concern.text}; {concern.mend}", err=True)
    if not as_json:
        for line in _describe(plan):
            click.echo(line)
    if not dry_run:
        with Progress() as progress:
            say = (lambda _text: None) if as_json else progress.say
            carry_out(scope, plan, say, progress.tell)
    if as_json:
        echo_json(document)
    elif not dry_run:
        workers = count(len(config.components()))
        click.echo(f"{workers} configured; nomarrctl status shows their state.")


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
        "warnings": [f"{each.text}; {each.mend}" for each in plan.concerns],
        "workers": {
            "remove": [worker.component_id for worker in plan.gone],
            "restart": [worker.component_id for worker in plan.restart],
            "start": [worker.component_id for worker in plan.start],
        },
    }


def _describe(plan: Plan) -> Iterator[str]:
    if not plan:
        yield "Nothing differs."
        return
    changes = plan.changes
    for name in changes.add:
        yield click.style(f"+ {name}", fg="green")
    for name in changes.remove:
        yield click.style(f"- {name}", fg="red")
    for name in changes.change:
        for line in _diff(plan, name):
            yield click.style(printable(line), fg=_COLOURS.get(line[:1]))
    for workers, what in (
        (plan.gone, "to be stopped and removed"),
        (list(plan.restart), "to be restarted, its settings changed"),
        (plan.start, "to be started"),
    ):
        for worker in workers:
            yield f"{worker.component_id}: {what}"
    if plan.settings_differ and not changes:
        yield "Settings changed that take effect without a restart (policy, health or store)."


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
