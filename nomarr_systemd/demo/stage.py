"""What the demo is played on: a private systemd, nomarrctl in it, looks at what is so, and words.

A wait that ends in vain names what was waited for, and shows what the journal has of who it was
about. Everything printed that a worker said is made harmless first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

import nomarr_systemd
from nomarr_systemd.cli.common import printable
from nomarr_systemd.core.account import Account, from_doc
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.demo.lab import Lab

PATIENCE_S: Final = 60.0  # for each wait: a slow disk or a busy machine is no failure
LOOK_AGAIN_S: Final = 0.05
LINES: Final = 40

_Found = TypeVar("_Found")


class DemoFailed(NomarrError):
    """Something the demo claims turned out not to be so."""

    code = "demo-failed"


class Stage:
    """A lab with an installation of ours, seen from outside."""

    def __init__(self, lab: Lab, config: str) -> None:
        self.lab = lab
        self._config = config

    def ctl(self, *arguments: str, check: bool = True) -> str:
        """What nomarrctl prints for a user in the lab."""
        source = os.path.dirname(os.path.dirname(os.path.abspath(nomarr_systemd.__file__)))
        code = (
            f"import sys; sys.path.insert(0, {source!r});"
            "from nomarr_systemd.cli.main import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", code, "--user", "--config", self._config, *arguments]
        ends = time.monotonic() + PATIENCE_S
        while True:
            done = self.lab.run(command, check=False, timeout_s=2 * PATIENCE_S)
            if not check or not done.returncode:
                return done.stdout
            # A disk so slow that others hold the store for seconds: as a person would, once more.
            if "stayed locked" not in done.stderr or time.monotonic() > ends:
                said = f"nomarrctl {arguments[0]}: exit status {done.returncode}"
                raise DemoFailed(said, hint=done.stderr.strip())

    def show(self, instance: str, name: str) -> str:
        """A property of the worker's unit."""
        unit = parse_component(instance).unit
        text = self.lab.systemctl(
            "show", f"--property={name}", unit, check=False, timeout_s=PATIENCE_S
        )
        return text.partition("=")[2].strip()

    def health(self) -> dict[str, str]:
        """The health of every worker, by component id."""
        rows = json.loads(self.ctl("status", "--json", check=False) or "[]")
        return {row["component"]: row["health"] for row in rows}

    def jobs(self, pool: str) -> dict[str, dict[str, Any]]:
        """The pool's jobs by the names of their files."""
        found = json.loads(self.ctl("jobs", "list", "--json", "--limit", "0", "--pool", pool))
        return {os.path.basename(job["path"]): job for job in found["jobs"]}

    def account(self, instance: str) -> Account:
        path = f"{self.lab.home}/.local/state/nomarr/public/{instance}.json"
        try:
            with open(path, encoding="utf-8") as file:
                return from_doc(json.load(file))
        except FileNotFoundError:
            return Account(parse_component(instance).component_id)

    def decision(self, instance: str, invocation: str = "") -> str:
        """What the controller has said last in the journal, about the worker or one run of it."""
        matches = [f"NOMARR_INSTANCE={instance}", "SYSLOG_IDENTIFIER=nomarr-controller"]
        if invocation:
            matches.append(f"NOMARR_INVOCATION_ID={invocation}")
        said = self.lab.journal(*matches, "--output=cat", "--quiet").strip()
        return said.splitlines()[-1] if said else ""

    def said_by(self, instance: str) -> list[str]:
        """The journal of a worker: its own words, systemd's and the controller's about it.

        A journal of root's does not know the units of a private manager by name, only its cgroups.
        """
        unit = parse_component(instance).unit
        lines = []
        for text in self.lab.journal("--quiet", "--output=json").splitlines():
            entry = json.loads(text)
            if (
                str(entry.get("_SYSTEMD_CGROUP")).endswith(f"/{unit}")
                or entry.get("USER_UNIT") == unit
                or entry.get("NOMARR_INSTANCE") == instance
            ):
                who = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or "?"
                lines.append(f"{who}[{entry.get('_PID')}]: {entry.get('MESSAGE')}")
        return lines

    def wait(self, look: Callable[[], _Found | None], what: str, *instances: str) -> _Found:
        """What ``look`` finds in the end; ``instances`` are the workers that it is about."""
        ends = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > ends:
                raise DemoFailed(
                    f"not within {PATIENCE_S:g} s: {what}", hint=self._explain(instances)
                )
            time.sleep(LOOK_AGAIN_S)
        return found

    def _explain(self, instances: tuple[str, ...]) -> str:
        parts = ["this is what the journal has of it; please report it with all of the output"]
        for instance in instances:
            state = self.show(instance, "ActiveState") or "unknown"
            parts.append(f"--- {instance}, which is {state}:")
            parts += self.said_by(instance)[-LINES:] or ["nothing"]
        for name in ("nomarr-supervisor", "nomarr-controller"):
            parts.append(f"--- {name}:")
            said = self.lab.journal(f"SYSLOG_IDENTIFIER={name}", "--quiet", "--lines=10")
            parts.append(said.rstrip() or "nothing")
        return "\n".join(parts)


def say(text: str) -> None:
    """The head of a chapter."""
    click.echo("\n" + click.style(text, bold=True, fg="cyan"))


def explain(text: str) -> None:
    click.echo(f"  {text}")


def command(text: str) -> None:
    """What somebody would type."""
    click.echo("  " + click.style(f"$ {text}", bold=True))


def quote(text: str) -> None:
    """What a program answered, line by line."""
    for line in printable(text).rstrip().split("\n"):
        click.echo("  " + click.style(f"│ {line}".rstrip(), fg="yellow"))


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise DemoFailed(f"not so: {claim}", hint="please report this with the output above")
    click.echo(click.style(f"  ✓ {claim}", fg="green"))
