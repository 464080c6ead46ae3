"""``nomarrctl store``: what a person does to the store as a whole."""

from __future__ import annotations

import sys

import click

from nomarr_systemd.cli.common import echo_json, examples, json_option
from nomarr_systemd.config.store_url import SqliteUrl, parse_store_url
from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.text import count
from nomarr_systemd.host.configuration import read_file
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.store_copy import Copied, copy_domain, find_running, open_side
from nomarr_systemd.store.protocol import DOMAINS


@click.group()
def store() -> None:
    """Move the documents of ledger and jobs from one store to another."""


@store.command(
    epilog=examples(
        "store copy sqlite:///var/lib/nomarr /etc/nomarr/new.toml",
        "store copy /etc/nomarr/nomarr.toml sqlite:///srv/nomarr",
    )
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--while-running", is_flag=True, help="Copy although workers run.")
@json_option
@click.pass_obj
def copy(scope: Scope, source: str, target: str, while_running: bool, as_json: bool) -> int:
    """Copy all documents FROM one store TO another, and compare them.

    FROM and TO are a directory, written sqlite:///DIRECTORY, or a nomarr.toml whose [store] names
    a server and the files of its passwords. Documents of other hosts stay behind when SQLite is
    the target. It may be interrupted and run again: then it continues. Nothing is deleted,
    and nomarr.toml is not changed: point [store] url at the new store afterwards, and apply.
    """
    running = [] if while_running else find_running(scope)
    if running:
        raise NomarrError(
            f"{count(len(running), 'worker')} still run, and would write to the old store",
            hint="nomarrctl pause, then copy, change [store] url, apply, and nomarrctl resume",
        )
    old, new = (_read_settings(scope, each) for each in (source, target))
    done: list[Copied] = []
    for domain in DOMAINS:
        with open_side(old, domain) as here, open_side(new, domain) as there:
            done += copy_domain(here, there, domain, _show)
    if as_json:
        echo_json({"collections": [each._asdict() for each in done]})
        return 0
    for each in done:
        more = f"; {each.skipped} of other hosts stay behind" if each.skipped else ""
        click.echo(f"{each.collection}: {each.documents} documents, {each.written} written{more}")
    click.echo("Both stores have the same documents.")
    return 0


def _read_settings(scope: Scope, name: str) -> StoreSettings:
    if "://" not in name:
        return read_file(name, scope.paths).store
    if isinstance(parse_store_url(name), SqliteUrl):
        return StoreSettings(name)
    raise NomarrError(
        "a server needs passwords, which do not belong on a command line",
        hint="write its [store] section to a file, and name the file",
    )


def _show(collection: str, documents: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{collection}: {documents}", err=True, nl=False)
