"""``nomarrctl doctor``: the installation examined, each finding with the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from nomarr_systemd.cli.common import echo_json, examples, json_option, printable
from nomarr_systemd.core.errors import NotPermitted
from nomarr_systemd.core.text import count
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.doctor.examine import examine
from nomarr_systemd.operate.doctor.installation import Finding

_SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


@click.command(epilog=examples("doctor", "doctor --user", "doctor --json"))
@json_option
@click.pass_obj
def doctor(scope: Scope, as_json: bool) -> int:
    """Examine the installation, and say what mends it.

    It checks systemd, configuration, units, services, pipes, store, permissions, workers, journal
    and clock. Nothing is changed. The exit status is 1 if something needs mending; warnings, which
    are marked with an exclamation mark, do not count. It is 77 if nothing was found and this user
    may not check everything.
    """
    findings = examine(scope)
    bad, warnings = (sum(each.level == level for each in findings) for level in ("bad", "warn"))
    closed = any(each.lacks_right for each in findings)
    if as_json:
        echo_json({"healthy": not bad, "findings": [each._asdict() for each in findings]})
    else:
        click.echo("\n".join(_draw(findings)))
        if bad:
            click.secho(f"{count(bad, 'problem')} to be mended.", fg="red")
        elif closed:
            click.secho("Not everything was checked: this user lacks rights.", fg="yellow")
        elif warnings:
            click.secho(f"Nothing is broken; {count(warnings, 'warning')}.", fg="yellow")
        else:
            click.secho("All is well.", fg="green")
    return 1 if bad else NotPermitted.exit_status if closed else 0


def _draw(findings: Sequence[Finding]) -> Iterator[str]:
    for each in findings:
        sign, colour = _SIGNS[each.level]
        first, *more = printable(each.text).split("\n")
        yield f"{click.style(sign, fg=colour)} {each.check}: {first}"
        yield from (f"    {line}" for line in more)
        if each.mend:
            yield f"    → {printable(each.mend)}"
