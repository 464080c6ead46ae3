"""``nomarrctl why``: the post-mortem report of a worker, for a terminal, as a page or as JSON."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import Any

import click

from nomarr_systemd.cli.common import echo_json
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import ConfigError, NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.postmortem.report import render, to_json
from nomarr_systemd.postmortem.verdict import make_report
from nomarr_systemd.postmortem.witnesses import check_known, choose_run, gather

_STYLES: dict[str, dict[str, Any]] = {
    "bad": {"fg": "red"},
    "good": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "bold": {"bold": True},
    "dim": {"dim": True},
}
NO_SUCH_RUN = 4


@click.command()
@click.argument("component")
@click.option(
    "--invocation", default="", metavar="ID", help="An older run, by its id or the beginning of it."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write a self-contained HTML page to FILE; - is standard output.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for scripts: schema nomarr.why/1."
)
@click.pass_obj
def why(scope: Scope, component: str, invocation: str, html: str | None, as_json: bool) -> int:
    """Tell why COMPONENT died last: what killed it, what it was doing, and what was decided.

    It puts together what systemd, the journal, the ledger and the supervisor know. COMPONENT is
    worker:tag:0, tag-0 or nomarr-worker@tag-0.service; nomarrctl history lists the runs that
    --invocation can name. Exit status: 0 when there is an answer, also for a worker that never
    died; 4 if there is no such worker or run.
    """
    worker = parse_component(component)
    check_known(scope.paths, _read_config(scope), worker)
    witnesses = gather(scope.paths, worker)
    report = make_report(witnesses, *choose_run(witnesses, invocation))
    if html is not None:
        _write_page(html, render(report, "why.html.j2"))
    if as_json:
        echo_json(to_json(report))
    elif html is None:
        on_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else 80
        text = render(report, "why.txt.j2", width=max(40, width), fold=on_terminal, paint=_paint)
        click.echo(text, nl=False)
    return NO_SUCH_RUN if report.verdict == "unknown-run" else 0


def _read_config(scope: Scope) -> Config | None:
    """Return the configuration in force, or the file's if this user may not read that; None if
    neither can be read: a post-mortem must not fail for that."""
    for read in (scope.read_in_force, scope.read_file):
        with contextlib.suppress(ConfigError):
            return read()
    return None


def _write_page(name: str, page: str) -> None:
    if name == "-":
        click.echo(page, nl=False)
        return
    try:
        # The page has lines of the journal, which not every user may read.
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise NomarrError(
            f"cannot write {name}: {error.strerror}", hint="name another file with --html FILE"
        ) from error
    click.echo(f"Written to {click.format_filename(name)}.", err=True)


def _paint(text: str, style: str) -> str:
    """Colours for a terminal; click removes them elsewhere."""
    if style not in _STYLES:
        return text
    return "\n".join(click.style(line, **_STYLES[style]) for line in text.split("\n"))
